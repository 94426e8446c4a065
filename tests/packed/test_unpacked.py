"""Quantised checkpoints where packed weights are not taken: under tensor and expert parallelism."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

import hf_zero_stream
from tests.support.cli import run
from tests.support.cluster import run_ranks, run_ranks_expecting_errors
from tests.support.messages import listen
from tests.support.quantised_checkpoints import compressed_tensors, fp8


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


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_plan(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """What would not be streamed is not planned; dequantised, it is."""
    make(tmp_path)
    sharded = ("plan", str(tmp_path), "--world-size", "2", "--tp", "2")
    error = run(*sharded, code=1).stderr
    assert "stays quantised" in error and "dequantize" in error
    run(*sharded, "--dequantize")


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
