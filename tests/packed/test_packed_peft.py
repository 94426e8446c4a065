"""Adapters beside packed weights, and where packed weights are not taken.

- Adapters of PEFT beside packed weights: other kinds than LoRA, several at a time, and what else one does to a model.
  Each is compared with the same done to the dequantised model.
- Quantised checkpoints where packed weights are not taken: under tensor and expert parallelism.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import transformers

import hf_zero_stream
from tests.support.cli import run
from tests.support.cluster import run_ranks, run_ranks_expecting_errors
from tests.support.messages import listen
from tests.support.packed_training import adapter_engine, fill_adapters, inputs, load, three_losses
from tests.support.parity import ds_config
from tests.support.quantised_checkpoints import compressed_tensors, fp8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model in int4."""
    compressed_tensors(found := tmp_path_factory.mktemp("int4"), "int4 with zero points")
    return found


TARGETS = ["q_proj", "o_proj"]

KINDS: dict[str, Callable[[], Any]] = {
    "AdaLoRA": lambda: peft.AdaLoraConfig(
        init_r=4, target_r=2, total_step=10, tinit=1, tfinal=2, target_modules=TARGETS
    ),
    "VeRA": lambda: peft.VeraConfig(r=4, target_modules=["q_proj"]),
    "IA3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
}


def adapted(base: Any, config: Any) -> Any:
    """A model with such adapters, with random values."""
    model = peft.get_peft_model(base, config)
    for name, param in model.named_parameters():
        if "ranknum" in name:  # PEFT trains AdaLoRA's where it has cast it, which it does in plain layers alone
            param.requires_grad_(False)
    fill_adapters(model)
    return model


def losses_of_kinds(folder: Path, names: list[str]) -> dict[str, list[list[float]]]:
    found: dict[str, list[list[float]]] = {}
    config = ds_config(torch.bfloat16)
    for name in names:
        for keep in (True, False):
            torch.manual_seed(0)
            engine = adapter_engine(adapted(load(folder, config, keep), KINDS[name]()), config)
            found.setdefault(name, []).append(three_losses(engine))
    return found


@pytest.mark.slow
def test_kinds_of_adapters(cluster: None, folder: Path) -> None:
    for of_rank in run_ranks(2, losses_of_kinds, folder, list(KINDS), timeout=120):
        for name, (packed, dequantised) in of_rank.items():
            assert packed == dequantised and packed[0] != packed[2], name


def with_lora(folder: Path, keep_quantized: bool, change: Callable[[Any], Any] = lambda base: base) -> Any:
    """An engine with LoRA; `change` is made to the base model before."""
    config = ds_config(torch.bfloat16)
    base = load(folder, config, keep_quantized)
    change(base)
    return adapter_engine(adapted(base, peft.LoraConfig(r=3, target_modules=TARGETS)), config)


def generated(folder: Path, keep_quantized: bool) -> Any:
    """Ranks have prompts of their own, and stop at times of their own: the others go on gathering."""
    engine, rank = with_lora(folder, keep_quantized), dist.get_rank()
    tokens = inputs(seed=rank)["input_ids"][:, : 4 + rank]
    made = engine.module.generate(input_ids=tokens, max_new_tokens=4 + 3 * rank, do_sample=False, synced_gpus=True)
    return made.tolist()


def with_checkpointing(folder: Path, keep_quantized: bool) -> Any:
    def change(base: Any, use_reentrant: bool) -> None:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        base.enable_input_require_grads()
        base.train()

    return [
        three_losses(with_lora(folder, keep_quantized, lambda base, each=each: change(base, each)))
        for each in (True, False)
    ]


def evaluated_between(folder: Path, keep_quantized: bool) -> Any:
    engine = with_lora(folder, keep_quantized)
    found = three_losses(engine)
    engine.eval()
    for without_gradients in (torch.no_grad, torch.inference_mode):
        with without_gradients():
            found.append(engine(**inputs()).loss.item())
    engine.train()
    return found + three_losses(engine)


def with_several(folder: Path, keep_quantized: bool) -> Any:
    config = ds_config(torch.bfloat16)
    model = peft.get_peft_model(load(folder, config, keep_quantized), peft.LoraConfig(r=3, target_modules=TARGETS))
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["v_proj", "q_proj"]))
    model.base_model.set_adapter(["default", "second"])
    fill_adapters(model)
    engine = adapter_engine(model, config)
    found = three_losses(engine)
    for name in ("default", "second"):
        model.set_adapter(name)
        found.append(engine(**inputs()).loss.item())
    with model.disable_adapter():
        found.append(engine(**inputs()).loss.item())
    assert len(set(found)) == len(found), "each does something"
    return found


def resized(folder: Path, keep_quantized: bool) -> Any:
    torch.manual_seed(0)
    engine = with_lora(folder, keep_quantized, lambda base: base.resize_token_embeddings(56))
    logits = engine(**inputs()).logits
    assert logits.shape[-1] == 56
    return logits[..., :48].tolist()


def cast(folder: Path, keep_quantized: bool) -> Any:
    return [three_losses(with_lora(folder, keep_quantized, change)) for change in (torch.nn.Module.half, to_fp32)]


def to_fp32(base: Any) -> None:
    base.to(torch.float32)


USES: tuple[Callable[[Path, bool], Any], ...]
USES = (generated, with_checkpointing, evaluated_between, with_several, resized, cast)


def used(folder: Path, uses: tuple[Callable[[Path, bool], Any], ...]) -> dict[str, list[Any]]:
    return {use.__name__: [use(folder, keep) for keep in (True, False)] for use in uses}


@pytest.mark.slow
def test_used_as_others(cluster: None, folder: Path) -> None:
    uses = USES
    for of_rank in run_ranks(2, used, folder, uses, timeout=200):
        for name, (packed, dequantised) in of_rank.items():
            assert packed == dequantised, name


def load_sharded(folder: Path, sizes: dict[str, int], **settings: Any) -> tuple[list[str], list[str]]:
    messages = listen()
    with hf_zero_stream.streaming(hf_zero_stream.StreamingConfig(progress=False, **settings)):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, distributed_config=sizes)
    dtypes = sorted({str(param.dtype) for param in model.parameters()})
    return dtypes, [text for text in messages if "keep_quantized" in text]


def refuse(folder: Path, sizes: dict[str, int]) -> None:
    load_sharded(folder, sizes, keep_quantized=True)


def loads(folder: Path) -> list[Any]:
    return [load_sharded(folder, {"tp_size": 2}), load_sharded(folder, {"tp_size": 2}, keep_quantized=False)]


def test_sharded(cluster: None, tmp_path: Path) -> None:
    fp8(tmp_path)
    for rank, (by_default, without) in enumerate(run_ranks(2, loads, tmp_path)):
        assert by_default[0] == without[0] == ["torch.bfloat16"]
        assert without[1] == []
        assert len(by_default[1]) == (rank == 0)
        if rank == 0:
            assert "rows, columns and experts" in by_default[1][0] and "are dequantised" in by_default[1][0]


@pytest.mark.sample(2)
@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"fsdp_size": 2, "ep_size": 2}], ids=str)
def test_refused(cluster: None, tmp_path: Path, sizes: dict[str, int]) -> None:
    """Tensor and expert parallelism, with ``keep_quantized=True``."""
    fp8(tmp_path)
    (size,) = sizes.keys() - {"fsdp_size"}
    for outcome in run_ranks_expecting_errors(2, refuse, tmp_path, sizes):
        assert outcome.error_type == "UnsupportedError"
        assert outcome.error_message.startswith("keep_quantized: ") and f"{size} 2" in outcome.error_message


MAKERS: dict[str, Callable[[Path], None]] = {
    "fp8": fp8,
    "int4": lambda folder: compressed_tensors(folder, "int4 by group"),
}


@pytest.mark.plugin("forecast")
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_plan(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """What would not be streamed is not planned; dequantised, it is."""
    make(tmp_path)
    sharded = ("plan", str(tmp_path), "--world-size", "2", "--tp", "2")
    error = run(*sharded, code=1).stderr
    assert "stays quantised" in error and "dequantize" in error
    run(*sharded, "--dequantize")


@pytest.mark.plugin("forecast")
def test_plan_of_chunks(tmp_path: Path) -> None:
    """FSDP2 alone shards packed bytes: a rank holds its part of the file."""
    fp8(tmp_path, width=256)
    found = hf_zero_stream.plan(str(tmp_path), world_size=2, rank=1, distributed_config={"fsdp_size": 2})
    in_file = (tmp_path / "model.safetensors").stat().st_size
    assert found.load.cost.bytes_read <= 1.01 * in_file / 2
    assert found.memory.partitions["cpu"] <= 1.01 * in_file / 2
    assert found.memory.largest_gather <= 0.7 * in_file, "one of the two layers"


def test_setting() -> None:
    assert hf_zero_stream.StreamingConfig().keep_quantized == "auto"
    for text, expected in (("auto", "auto"), ("yes", True), ("0", False)):
        found = hf_zero_stream.StreamingConfig.resolve(None, None, {"HF_ZERO_STREAM_KEEP_QUANTIZED": text})
        assert found.keep_quantized == expected
    section = {"hf_zero_stream": {"keep_quantized": True}}
    assert hf_zero_stream.StreamingConfig.resolve(None, section, {}).keep_quantized is True
    for wrong in ("always", 1):
        with pytest.raises(hf_zero_stream.errors.ConfigError, match="keep_quantized"):
            hf_zero_stream.StreamingConfig(keep_quantized=wrong)  # type: ignore[arg-type]
