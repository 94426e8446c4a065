"""Quantised checkpoints come out dequantised, bit for bit as in plain loading, and partitioned or sharded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import transformers

import hf_zero_stream
from tests.packed.test_packed_matrix import files as gguf_files  # noqa: F401
from tests.support.allocations import AllocationWatch
from tests.support.checkpoint_files import tensors_of
from tests.support.cluster import run_ranks, run_ranks_expecting_errors
from tests.support.parity import ds_config, load_and_compare
from tests.support.quantised_checkpoints import (
    SCHEMES,
    compressed_tensors,
    fp4_experts,
    fp8,
    fp8_with_a_short_block,
    mxfp4,
)
from tests.support.sharded import Case, wrong_cases


FORMATS: dict[str, tuple[Callable[..., None], Any]] = {
    "fp8": (fp8, transformers.FineGrainedFP8Config),
    "fp4 experts": (fp4_experts, transformers.FineGrainedFP8Config),
    "mxfp4": (mxfp4, transformers.Mxfp4Config),
}


def load_dequantised(folder: Path, world_size: int, quantization_config: Any) -> None:
    """The model at `folder` comes out as in plain loading, and no tensor of it is read whole."""
    kwargs = {"quantization_config": quantization_config}
    for result in run_ranks(
        world_size, load_and_compare, "AutoModelForCausalLM", folder, torch.bfloat16, torch.bfloat16, kwargs
    ):
        assert result["differences"] == []
        assert result["info"] == result["plain_info"]
        assert [rank["materialised"] for rank in result["report"]["ranks"]] == [{}] * world_size


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("format_name", FORMATS)
def test_dequantised_as_plain(cluster: None, tmp_path: Path, format_name: str, world_size: int) -> None:
    make, config_class = FORMATS[format_name]
    make(tmp_path)
    load_dequantised(tmp_path, world_size, config_class(dequantize=True))


def dequantised(folder: Path, names: list[str]) -> dict[str, torch.Tensor]:
    model = hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(
        folder,
        quantization_config=transformers.FineGrainedFP8Config(dequantize=True),
        ds_config=ds_config(torch.bfloat16),
    )
    params = dict(model.named_parameters())
    with deepspeed.zero.GatheredParameters([params[name] for name in names]):
        return {name: params[name].detach().clone() for name in names}


@pytest.mark.parametrize("world_size", [1, 3])
def test_last_block_cut_short(cluster: None, tmp_path: Path, world_size: int) -> None:
    """As in DeepSeek-V3's files: plain loading raises in transformers 5.23, but what the format means is clear."""
    expected = fp8_with_a_short_block(tmp_path)
    assert expected
    for found in run_ranks(world_size, dequantised, tmp_path, list(expected)):
        assert all(torch.equal(found[name], values) for name, values in expected.items())


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("scheme_name", SCHEMES)
def test_compressed_tensors(cluster: None, tmp_path: Path, scheme_name: str, world_size: int) -> None:
    compressed_tensors(tmp_path, scheme_name)
    load_dequantised(tmp_path, world_size, transformers.CompressedTensorsConfig(dequantize=True))


# -------------------------------------------------------------------------------------------- bytes and memory

KIB = 2**10


def load_watched(folder: Path, quantization_config: Any) -> dict[str, Any]:
    settings = hf_zero_stream.StreamingConfig(staging_bytes=2048 * KIB, progress=False)
    with hf_zero_stream.streaming(settings), AllocationWatch() as watch:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=quantization_config, ds_config=ds_config(torch.bfloat16)
        )
    return {
        "largest_allocation": watch.largest,
        "largest_partition": max(param.ds_tensor.nbytes for param in model.parameters()),
        "largest_parameter": max(param.ds_numel * param.ds_tensor.itemsize for param in model.parameters()),
        "read": sum(rank["bytes_read"] for rank in model.streaming_report.to_dict()["ranks"]),
    }


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "format_name",
    [
        *(pytest.param(name, marks=pytest.mark.slow) if name == "mxfp4" else name for name in FORMATS),
        "float8 by channel",
        "int4 by group",
    ],
)
def test_reads_the_quantised_bytes_once_in_bounded_memory(cluster: None, tmp_path: Path, format_name: str) -> None:
    if format_name in FORMATS:
        make, config_class = FORMATS[format_name]
        make(tmp_path, width=512)
    else:
        config_class = transformers.CompressedTensorsConfig
        compressed_tensors(tmp_path, format_name, width=512)
    in_file = sum(value.nbytes for value in tensors_of(tmp_path).values())

    for found in run_ranks(3, load_watched, tmp_path, config_class(dequantize=True)):
        # Beside the partitions, only what one request takes, and what it becomes: dequantised, in fp32 on the way.
        assert found["largest_allocation"] <= max(found["largest_partition"], 1024 * KIB) < found["largest_parameter"]
        # A rank's part may begin and end within a block.
        assert in_file * 0.99 <= found["read"] <= in_file * 1.02


# ------------------------------------------------------------------------------------------------------ refused


def load(folder: Path) -> None:
    hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(
        folder,
        quantization_config=transformers.CompressedTensorsConfig(dequantize=True),
        ds_config=ds_config(torch.bfloat16),
    )


def test_unknown_format_is_refused_by_name(cluster: None, tmp_path: Path) -> None:
    compressed_tensors(tmp_path, "float8 by tensor")
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"float-quantized"', '"mxfp8-quantized"'))
    for outcome in run_ranks_expecting_errors(2, load, tmp_path):
        assert outcome.error_type == "UnsupportedError"
        assert "mxfp8-quantized" in outcome.error_message


@pytest.mark.slow
def test_dequantised_into_shards(cluster: None, tmp_path: Path, gguf_files: Path) -> None:  # noqa: F811
    formats: dict[str, tuple[Callable[..., Any], Any]] = {
        "fp8": (fp8, transformers.FineGrainedFP8Config),
        "fp4": (fp4_experts, transformers.FineGrainedFP8Config),
        "mxfp4": (mxfp4, transformers.Mxfp4Config),
    }
    cases: dict[str, Case] = {}
    for name, (make, config_class) in formats.items():
        make(tmp_path / name)
        kwargs = {"quantization_config": config_class(dequantize=True), "dtype": torch.bfloat16}
        cases[name] = ("AutoModelForCausalLM", tmp_path / name, kwargs)
    for name in SCHEMES:
        compressed_tensors(tmp_path / name, name)
        config = transformers.CompressedTensorsConfig(dequantize=True)
        cases[name] = (
            "AutoModelForCausalLM",
            tmp_path / name,
            {"quantization_config": config, "dtype": torch.bfloat16},
        )
    for name in ("lfm2.gguf", "llama.gguf"):
        config = transformers.GgufConfig(dequantize=True)
        cases[name] = ("AutoModelForCausalLM", gguf_files, {"gguf_file": name, "quantization_config": config})
    assert run_ranks(2, wrong_cases, cases, [{"fsdp_size": 2}]) == [{}, {}]
    del cases["lfm2.gguf"]  # has no plan
    assert run_ranks(2, wrong_cases, cases, [{"tp_size": 2}]) == [{}, {}]
