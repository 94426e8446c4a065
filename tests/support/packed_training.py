"""What ranks run to train adapters beside weights that stay quantised, and beside the same weights dequantised."""

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import peft
import torch
import transformers
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import hf_zero_stream
from tests.support.checkpoint_files import tensors_of
from tests.support.parity import ds_config
from tests.support.trainings import Training


TARGETS = ["q_proj", "o_proj", "q_b_proj", "kv_b_proj"]


def one_module_at_a_time() -> dict[str, Any]:
    """A config in bf16 under which ZeRO-3 gathers each module's parameters for it alone, and keeps none."""
    return ds_config(
        torch.bfloat16,
        stage3_max_live_parameters=0,
        stage3_max_reuse_distance=0,
        stage3_prefetch_bucket_size=0,
        stage3_param_persistence_threshold=0,
    )


def inputs(length: int = 12, seed: int = 3) -> dict[str, torch.Tensor]:
    tokens = torch.randint(48, (2, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "labels": tokens}


CONFIGS = {
    "fp8": transformers.FineGrainedFP8Config,
    "mxfp4": transformers.Mxfp4Config,
    "compressed-tensors": transformers.CompressedTensorsConfig,
}


def dequantised(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The folder and arguments to load the same values dequantised; transformers has none for bitsandbytes."""
    if (folder / "plain").exists():
        return folder / "plain", {}
    method = json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"]
    return folder, {"quantization_config": CONFIGS[method](dequantize=True)}


def load(folder: Path, config: dict[str, Any], keep_quantized: bool = True, **kwargs: Any) -> Any:
    if not keep_quantized:
        folder, how = dequantised(folder)
        kwargs |= how
    with hf_zero_stream.streaming(hf_zero_stream.StreamingConfig(progress=False)):
        return transformers.AutoModelForCausalLM.from_pretrained(folder, ds_config=config, **kwargs)


def with_adapters(model: Any) -> Any:
    """Adapters with random values in both factors, so that the first step's gradients reach both."""
    model = peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=5, target_modules=TARGETS))
    fill_adapters(model)
    return model


def fill_adapters(model: nn.Module) -> None:
    torch.manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.normal_(std=0.1)


def adapter_engine(model: Any, config: dict[str, Any]) -> Any:
    """An engine that trains a model's adapters alone."""
    trainable = [param for param in model.parameters() if param.requires_grad]
    assert trainable and len(trainable) < len(list(model.parameters()))
    return deepspeed.initialize(model=model, config=config, model_parameters=trainable)[0]


def three_losses(engine: Any) -> list[float]:
    return Training(engine, batch=lambda _: inputs()).train(range(3))


def trained(folder: Path, config: dict[str, Any], keep_quantized: bool, **kwargs: Any) -> tuple[Any, list[float]]:
    engine = adapter_engine(with_adapters(load(folder, config, keep_quantized, **kwargs)), config)
    return engine, three_losses(engine)


def plain_losses(folder: Path, dtype: torch.dtype) -> list[float]:
    """Of one process, without DeepSpeed: dequantised by transformers, on the same adapters and inputs."""
    folder, how = dequantised(folder)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **how)
    return plain_losses_of(base.to(dtype))  # what is not quantised has kept the file's dtype


def plain_losses_of(base: Any) -> list[float]:
    """Of one process, without DeepSpeed: of a whole model, on the same adapters and inputs."""
    return losses_of_whole(with_adapters(base))


def losses_of_whole(model: Any) -> list[float]:
    """Of three steps of a whole model with adapters, without DeepSpeed."""
    trainable = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-3)
    losses = []
    for _ in range(3):
        loss = model(**inputs()).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)  # as DeepSpeed does by default
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def packed_names(model: nn.Module) -> list[str]:
    return sorted(name for name, param in model.named_parameters() if param.dtype == torch.uint8)


@contextmanager
def watched_memory(most: float = math.inf) -> Iterator[dict[str, Any]]:
    """Weak references to the gathered bytes of every weight that is dequantised inside, and to the last matrix.

    `bytes` are those of each gathered parameter, `peak` the most of them that were there at one time. If it would be
    more than `most`, gloo's own thread gets time to let go of what it gathered a moment ago.
    """
    from hf_zero_stream.plugins.packed.weights import PackedWeight

    seen: dict[str, Any] = {"gathered": [], "matrices": 0, "overlapping": 0, "bytes": {}, "peak": 0}
    there: dict[int, tuple[StorageWeakRef, int]] = {}
    original, last = PackedWeight.matrix, []

    def matrix(self: PackedWeight, parameter: torch.Tensor, number: int = 0) -> torch.Tensor:
        assert parameter.dtype == torch.uint8
        assert parameter.numel() >= self.row_bytes * len(self.rows), "the whole parameter is gathered"
        storage = parameter.untyped_storage()
        seen["gathered"].append(StorageWeakRef(storage))
        seen["bytes"][id(self)] = parameter.nbytes
        there[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        deadline = time.monotonic() + 20
        while (now := sum(nbytes for reference, nbytes in there.values() if not reference.expired())) > most:
            if time.monotonic() > deadline:
                break
            time.sleep(0.01)
        for key in [key for key, (reference, _) in there.items() if reference.expired()]:
            del there[key]
        seen["peak"] = max(seen["peak"], now)
        seen["overlapping"] += sum(not each.expired() for each in last)
        result = original(self, parameter, number)
        last[:] = [StorageWeakRef(result.untyped_storage())]
        seen["matrices"] += 1
        return result

    PackedWeight.matrix = matrix  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        PackedWeight.matrix = original  # type: ignore[method-assign]


def count_alive(references: list[StorageWeakRef]) -> int:
    """How many are alive, once gloo's own thread has let go of what it gathered a moment ago."""
    deadline = time.monotonic() + 20
    while (alive := sum(not each.expired() for each in references)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return alive


def check_saved(saved: Path, original: Path) -> None:
    """All tensors of the checkpoint `original` are in `saved`, byte for byte."""
    found, expected = tensors_of(saved), tensors_of(original)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if not key.endswith("e_score_correction_bias"):  # a buffer, which transformers keeps in fp32
            assert found[key].dtype == value.dtype and found[key].shape == value.shape, key
            value = value.view(-1).view(torch.uint8)
            assert torch.equal(found[key].view(-1).view(torch.uint8), value), key
