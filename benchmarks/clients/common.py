"""What all clients share: the model, the batches, and what rank 0 reports."""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch


MODULES = {
    "lightning": "lightning",
    "lightning_fsdp2": "lightning",
    "fabric": "lightning",
    "lightning_example": "lightning",
    "ray_train": "ray",
    "ray_example": "ray",
    "sentence_transformers": "sentence_transformers",
    "actor": "openrlhf",
    "critic": "openrlhf",
    "reward": "openrlhf",
    "broadcast": "openrlhf_ray",
    "colocated": "openrlhf_ray",
    "fsdp2": "verl",
    "fsdp2_lora": "verl",
    "parameter_server": "checkpoint_engine",
}
"""By the function of each client: its module."""

RESULT = "result.json"
STEPS = 3
TRAINED = "trained"
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}


def rank() -> int:
    return int(os.environ["RANK"])


def world_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def ds_config(**more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
        "zero_allow_untested_optimizer": True,
        **more,
    }


def load(folder: Path, **kwargs: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, **kwargs).train()


def tokens(number: int) -> torch.Tensor:
    return torch.randint(0, 128, (16,), generator=torch.Generator().manual_seed(number))


def batch(step: int) -> torch.Tensor:
    return torch.stack([tokens(100 * step + 10 * rank() + each) for each in range(2)])


def digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Of names, dtypes, shapes and bytes."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors):
        found.update(_described(name, tensor))
    return found.hexdigest()[:16]


def assert_rows(package: str) -> None:
    """What hf_zero_stream replaces in an imported `package`, or calls of it, is there."""
    from hf_zero_stream.bindings.table import TABLE

    rows = [row for rows in TABLE.values() for row in rows if row.package == package]
    assert rows and all(row.is_imported() and row.places() and not row.lacking() for row in rows), rows


class Sent:
    """What an engine gets: names, dtypes, shapes and bytes, in their order, as a digest."""

    def __init__(self) -> None:
        self._found, self.count = hashlib.sha256(), 0

    def note(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors:
            self.count += 1
            self._found.update(_described(name, tensor))

    def digest(self) -> str:
        return self._found.hexdigest()[:16]


def _described(name: str, tensor: torch.Tensor) -> bytes:
    values: bytes = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{name} {tensor.dtype} {list(tensor.shape)}".encode() + values


def in_memory(model: torch.nn.Module) -> str:
    """The digest of a model's parameters, whoever has sharded them (all ranks)."""
    found = []
    for name, param in model.named_parameters():
        if hasattr(param, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([param]):
                found.append((name, param.data.clone()))
        else:
            found.append((name, param.full_tensor() if hasattr(param, "full_tensor") else param))
    return digest(found)


def of_zero_folder(folder: Path) -> str:
    """The digest of the fp32 values in a checkpoint of an engine, by DeepSpeed's function; of ours, by `convert`."""
    place = folder
    while (place / "latest").is_file():
        place /= (place / "latest").read_text().strip()
    if (place / "training_state.json").is_file():
        from hf_zero_stream.plugins.pickled.convert import convert

        with tempfile.TemporaryDirectory() as converted:
            convert(place, converted, progress=False)
            return of_files(Path(converted))
    from deepspeed.utils import zero_to_fp32

    return digest(zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(folder)).items())


def of_files(folder: Path) -> str:
    """The digest of the weights in a folder of ``save_pretrained``."""
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return digest(tensors.items())


def report(folder: Path, model: Any, losses: Iterable[Any], *, streamed: bool | None = None, **digests: str) -> None:
    """Write on rank 0 what a run gave: losses, the digests of `memory` and `files`, and whether its load streamed."""
    if rank() == 0:
        if streamed is None:
            given = getattr(model, "streaming_report", None)  # stock's loads inside a block have one, too
            streamed = given is not None and given.streamed
        found = {"losses": [f"{float(loss):.7f}" for loss in losses], **digests, "streamed": streamed}
        (folder / RESULT).write_text(json.dumps(found))
