"""Quantised checkpoints that are dequantised while they are loaded.

- Quantised checkpoints come out dequantised, bit for bit as in plain loading, and partitioned or sharded.
- What the Trainer and accelerate save of trained models that were dequantised while they were loaded is plain.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin

import hf_zero_stream
from tests.packed.test_packed_matrix import files as gguf_files  # noqa: F401
from tests.support.allocations import AllocationWatch
from tests.support.checkpoint_files import differing, tensors_of
from tests.support.cluster import run_ranks, run_ranks_expecting_errors
from tests.support.fsdp2 import announce, force_fsdp_on_cpu
from tests.support.packed_training import dequantised, inputs
from tests.support.parity import assert_same, compare, ds_config, whole_values
from tests.support.quantised_checkpoints import (
    SCHEMES,
    compressed_tensors,
    fp4_experts,
    fp8,
    fp8_with_a_short_block,
    mxfp4,
)
from tests.support.sharded import Case, wrong_cases
from tests.support.trainers import FSDP2, arguments_of, join_as_launched


FORMATS: dict[str, tuple[Callable[..., None], Any]] = {
    "fp8": (fp8, transformers.FineGrainedFP8Config),
    "fp4 experts": (fp4_experts, transformers.FineGrainedFP8Config),
    "mxfp4": (mxfp4, transformers.Mxfp4Config),
}


def load_dequantised(folder: Path, world_size: int, quantization_config: Any) -> None:
    """The model at `folder` comes out as in plain loading, and no tensor of it is read whole."""
    kwargs = {"dtype": torch.bfloat16, "quantization_config": quantization_config}
    results = run_ranks(world_size, compare, "AutoModelForCausalLM", folder, kwargs, torch.bfloat16)
    assert_same(results)
    for result in results:
        assert [rank["materialised"] for rank in result["report"]["ranks"]] == [{}] * world_size


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("format_name", FORMATS)
def test_dequantised_as_plain(cluster: None, tmp_path: Path, format_name: str, world_size: int) -> None:
    make, config_class = FORMATS[format_name]
    make(tmp_path)
    load_dequantised(tmp_path, world_size, config_class(dequantize=True))


def values_of(folder: Path, names: list[str]) -> dict[str, torch.Tensor]:
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
    for found in run_ranks(world_size, values_of, tmp_path, list(expected)):
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


MAKERS: dict[str, Callable[[Path], None]] = {"fp8": fp8, "mxfp4": mxfp4}


def load_plain(folder: Path) -> Any:
    folder, how = dequantised(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **how)


def announce_home(home: str) -> dict[str, Any]:
    """What a launcher announces; returns the Trainer's arguments for it."""
    if home == "FSDP2":
        announce(cpu_ram_efficient_loading=True)
        force_fsdp_on_cpu()
        return FSDP2
    join_as_launched()
    config = ds_config(torch.bfloat16)
    del config["optimizer"]
    return {"deepspeed": config | {"zero_allow_untested_optimizer": True}, "bf16": True, "use_cpu": True}


def by_trainer(home: str, folder: Path, target: Path) -> Any:
    """A step, the checkpoint after it, and ``save_model``."""
    arguments = arguments_of(target, max_steps=1, save_steps=1, learning_rate=1e-2, **announce_home(home))
    model = load_plain(folder)
    rows = [{name: value[0] for name, value in inputs(seed=seed).items()} for seed in range(8)]
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)  # type: ignore[arg-type]
    trainer.train()
    trainer.save_model(str(target / "saved"))
    return model


def by_accelerate(home: str, folder: Path, target: Path) -> Any:
    """A step, and ``accelerator.save_model``."""
    config = announce_home(home).get("deepspeed")
    accelerator = Accelerator(deepspeed_plugin=None if config is None else DeepSpeedPlugin(hf_ds_config=config))
    model = load_plain(folder)
    loader = torch.utils.data.DataLoader([0, 1], batch_size=1)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trained, optimizer, _ = accelerator.prepare(model, optimizer, loader)
    accelerator.backward(trained(**inputs()).loss)
    optimizer.step()
    accelerator.save_model(trained, str(target / "saved"))
    if accelerator.is_main_process:
        model.config.save_pretrained(target / "saved")
    return model


SAVERS = {"Trainer": by_trainer, "accelerate": by_accelerate}


def save(home: str, saver: str, folder: Path, target: Path) -> tuple[dict[str, torch.Tensor], bool]:
    """The values in memory after the save, and whether the step has changed them."""
    with hf_zero_stream.streaming(hf_zero_stream.StreamingConfig(progress=False)):
        model = SAVERS[saver](home, folder, target)
        values = whole_values(model)
    return values, bool(differing(values, dict(load_plain(folder).state_dict())))


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("home", ["ZeRO-3", "FSDP2"])
@pytest.mark.parametrize("saver", SAVERS)
def test_saved_as_plain(cluster: None, tmp_path: Path, saver: str, home: str, name: str) -> None:
    MAKERS[name](folder := tmp_path / "model")
    (values, is_changed), _ = run_ranks(2, save, home, saver, folder, tmp_path / "out", timeout=300)
    assert is_changed
    saved = [tmp_path / "out" / "saved", *(tmp_path / "out").glob("checkpoint-*")]
    assert len(saved) == (2 if saver == "Trainer" else 1)
    for each in saved:
        tensors = tensors_of(each, "model*.safetensors")
        assert {tensor.dtype for tensor in tensors.values()} <= {torch.bfloat16, torch.float32}
        assert not [key for key in tensors if key.endswith(("_scale_inv", "_scales", "_blocks"))]
        assert "quantization_config" not in json.loads((each / "config.json").read_text())
        again = transformers.AutoModelForCausalLM.from_pretrained(each, dtype=torch.bfloat16)
        assert differing(dict(again.state_dict()), values) == []
