"""Weights that bitsandbytes quantises while they are loaded: byte for byte what stock makes in one process."""

import json
import shutil
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import save_file

import hf_zero_stream
from tests.support.allocations import AllocationWatch
from tests.support.checkpoint_files import tensors_of
from tests.support.cluster import run_ranks, run_ranks_expecting_errors
from tests.support.packed_training import load, packed_names, plain_losses_of, trained
from tests.support.parity import ds_config
from tests.support.quantised_checkpoints import unquantised


def bitsandbytes_config(kind: str) -> transformers.BitsAndBytesConfig:
    if kind == "int8":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    *double, quant_type = kind.split()
    skipped = ["lm_head", "model.layers.1.self_attn.v_proj"] if double else None
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quant_type,
        bnb_4bit_use_double_quant=bool(double),
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_storage=torch.bfloat16 if double else torch.uint8,
        llm_int8_skip_modules=skipped,
    )


MODELS: dict[str, dict[str, Any]] = {"dense": {}, "moe": {"experts": 3}, "gpt2": {"kind": "gpt2"}}
KINDS = ["nf4", "double nf4", "fp4", "int8"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, arguments in MODELS.items():
        unquantised(folder := tmp_path_factory.mktemp(name), **arguments)
        found[name] = folder
    return found


def saved_by_stock(folder: Path, out: Path, kinds: list[str]) -> None:
    """In one process, without DeepSpeed: quantised by transformers and bitsandbytes alone."""
    for kind in kinds:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, quantization_config=bitsandbytes_config(kind)
        )
        model.save_pretrained(out / f"stock {kind}")


def saved_by_us(folder: Path, out: Path, kinds: list[str]) -> dict[str, Any]:
    found = {}
    for kind in kinds:
        model = load(folder, ds_config(torch.bfloat16), quantization_config=bitsandbytes_config(kind))
        hf_zero_stream.save_pretrained(model, out / f"ours {kind}")
        again = load(out / f"ours {kind}", ds_config(torch.bfloat16))
        hf_zero_stream.save_pretrained(again, out / f"again {kind}")
        found[kind] = packed_names(model), packed_names(again), model.streaming_report.to_dict()
    return found


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_bytes_are_those_of_stock(
    cluster: None, folders: dict[str, Path], tmp_path: Path, name: str, world_size: int
) -> None:
    run_ranks(1, saved_by_stock, folders[name], tmp_path, KINDS)
    for of_rank in run_ranks(world_size, saved_by_us, folders[name], tmp_path, KINDS, timeout=300):
        for packed, again, _ in of_rank.values():
            assert packed and packed == again
    for kind in KINDS:
        expected = tensors_of(tmp_path / f"stock {kind}")
        assert any(value.dtype in (torch.uint8, torch.int8) for value in expected.values())
        for ours in (f"ours {kind}", f"again {kind}"):
            found = tensors_of(tmp_path / ours)
            assert found.keys() == expected.keys()
            for key, value in expected.items():
                assert (found[key].dtype, found[key].shape) == (value.dtype, value.shape), (kind, key)
                mine, theirs = (each.contiguous().view(-1).view(torch.uint8) for each in (found[key], value))
                assert torch.equal(mine, theirs), (kind, key)
            configs = [json.loads((tmp_path / each / "config.json").read_text()) for each in (ours, f"stock {kind}")]
            assert configs[0] == configs[1]


# ----------------------------------------------------------------------------------------------------- training


def losses(folder: Path, prepared: Path, kinds: list[str]) -> dict[str, Any]:
    found = {}
    for kind in kinds:
        arguments = {"quantization_config": bitsandbytes_config(kind)}
        _, bf16 = trained(folder, ds_config(torch.bfloat16), True, **arguments)
        _, from_quantised = trained(prepared / f"stock {kind}", ds_config(torch.bfloat16), True)
        _, fp32 = trained(folder, ds_config(torch.float32), True, **arguments)
        _, of_values = trained(prepared / f"values {kind}", ds_config(torch.float32), True)
        found[kind] = {"bf16": bf16, "from quantised": from_quantised, "fp32": fp32, "of values": of_values}
    return found


def losses_of_stock(folder: Path, out: Path, kinds: list[str]) -> dict[str, Any]:
    """In one process, without DeepSpeed: with bitsandbytes' own layers, and with the values that it gives back.

    A model with these values is saved in `out`.
    """
    found = {}
    for kind in kinds:
        config = bitsandbytes_config(kind)
        config.bnb_4bit_compute_dtype = torch.float32

        def model(config: Any = config) -> Any:
            return transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, quantization_config=config
            )

        values = model().dequantize()
        values.save_pretrained(out / f"values {kind}")
        found[kind] = {"of values": plain_losses_of(values)}
        if kind != "int8":  # whose layers quantise what they get, too
            found[kind]["own layers"] = plain_losses_of(model().train())  # in others, on a CPU, bitsandbytes fails
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", ["dense", "moe"])
def test_losses(cluster: None, tmp_path: Path, name: str, world_size: int) -> None:
    folder = tmp_path / "bf16"
    # Rows of whole blocks: bitsandbytes 0.50 on a CPU dequantises others with wrong scales.
    unquantised(folder, **MODELS[name], intermediate_size=64, head_dim=64)
    run_ranks(1, saved_by_stock, folder, tmp_path, KINDS)
    (expected,) = run_ranks(1, losses_of_stock, folder, tmp_path, KINDS, timeout=300)
    for of_rank in run_ranks(world_size, losses, folder, tmp_path, KINDS, timeout=600):
        for kind, found in of_rank.items():
            assert found["bf16"] == found["from quantised"], kind
            assert found["fp32"] == found["of values"], kind
            assert len(set(found["bf16"])) == 3, "three steps must change the loss"
            for how, reference in expected[kind].items():  # an ulp of DeepSpeed's Adam grows
                assert found["fp32"] == pytest.approx(reference, rel=3e-7), (kind, how)


def losses_of_homes(folder: Path) -> list[list[float]]:
    homes: list[dict[str, Any]] = [{}, {"zero_hpz_partition_size": 2}, {"offload_param": {"device": "cpu"}}]
    arguments = {"quantization_config": bitsandbytes_config("double nf4")}
    return [trained(folder, ds_config(torch.bfloat16, **zero), True, **arguments)[1] for zero in homes]


@pytest.mark.slow
def test_homes(cluster: None, folders: dict[str, Path]) -> None:
    for alone, *others in run_ranks(2, losses_of_homes, folders["moe"], timeout=300):
        assert others == [alone, alone]


# ------------------------------------------------------------------------------------------------------- memory


def watched(folder: Path) -> dict[str, Any]:
    from hf_zero_stream.plugins.packed import batches, quantised_rows

    batches.VALUES_BYTES, quantised_rows.CHUNK_NUMEL = 2**18, 2**14
    settings = hf_zero_stream.StreamingConfig(staging_bytes=2**20, progress=False)
    with hf_zero_stream.streaming(settings), AllocationWatch() as watch:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, ds_config=ds_config(torch.bfloat16), quantization_config=bitsandbytes_config("double nf4")
        )
    packed = [param.ds_numel for param in model.parameters() if param.dtype == torch.uint8]
    return {
        "largest_allocation": watch.largest,
        "largest_row": max(packed),
        "packed": sum(packed),
        "held": sum(param.ds_tensor.nbytes for param in model.parameters()),
        "whole": sum(param.ds_numel * param.ds_tensor.itemsize for param in model.parameters()),
        "read": [rank["bytes_read"] for rank in model.streaming_report.to_dict()["ranks"]],
    }


def test_bounded_memory(cluster: None, tmp_path: Path) -> None:
    """Each value is read by one rank only, and no rank ever has the values of a whole weight."""
    unquantised(tmp_path, width=512)
    in_file = sum(value.nbytes for value in tensors_of(tmp_path).values())
    largest = max(value.nbytes for key, value in tensors_of(tmp_path).items() if key.endswith("proj.weight"))
    for found in run_ranks(2, watched, tmp_path):
        assert max(found["read"]) <= 1.02 * in_file / 2
        assert found["largest_row"] < 0.3 * largest
        assert found["largest_allocation"] <= max(2**20, 1.01 * found["largest_row"]) < largest
        assert found["held"] <= 1.01 * found["whole"] / 2


# ------------------------------------------------------------------------------------------- plans and refusals


@pytest.mark.plugin("forecast")
def test_plan(folders: dict[str, Path], tmp_path: Path) -> None:
    """A plan reads what the load reads, and holds what it holds."""
    config = bitsandbytes_config("double nf4")
    plans = [
        hf_zero_stream.plan(
            str(folders["dense"]), world_size=2, rank=rank, ds_config=ds_config(), quantization_config=config
        )
        for rank in range(2)
    ]
    found = run_ranks(2, read_and_held, folders["dense"], config)
    for rank, planned in enumerate(plans):
        assert planned.load.cost.bytes_read == found[rank]["read"]
        assert planned.memory.partitions["cpu"] == found[rank]["held"]


def read_and_held(folder: Path, config: Any) -> dict[str, int]:
    model = load(folder, ds_config(), quantization_config=config)
    return {
        "read": model.streaming_report.to_dict()["ranks"][dist.get_rank()]["bytes_read"],
        "held": sum(param.ds_tensor.nbytes for param in model.parameters()),
    }


def as_documented(folder: Path) -> list[str]:
    """The code in docs/quantised.md."""
    text = (Path(__file__).parents[2] / "docs" / "quantised.md").read_text(encoding="utf-8")
    code = text.partition("## Quantised while loading")[2].partition("```python\n")[2].partition("```")[0]
    found: dict[str, Any] = {
        "ds_config": ds_config(torch.bfloat16),
        "hf_zero_stream": hf_zero_stream,
        "AutoModelForCausalLM": transformers.AutoModelForCausalLM,
    }
    exec(code.replace("checkpoint-in-bf16", str(folder)), found)
    return packed_names(found["model"])


def test_documentation(cluster: None, folders: dict[str, Path]) -> None:
    for names in run_ranks(2, as_documented, folders["dense"]):
        assert len(names) == 14


def load_with(folder: Path, zero: dict[str, Any], **changes: Any) -> None:
    config = bitsandbytes_config("nf4")
    for name, value in changes.items():
        setattr(config, name, value)
    load(folder, ds_config(torch.bfloat16, **zero), quantization_config=config)


def test_refused(cluster: None, folders: dict[str, Path]) -> None:
    setting = "stage3_use_all_reduce_for_fetch_params"
    for outcome in run_ranks_expecting_errors(2, load_with, folders["dense"], {setting: True}):
        assert outcome.error_type == "UnsupportedError"
        assert setting in outcome.error_message and "keep_quantized" in outcome.error_message


def incomplete(folder: Path) -> dict[str, Any]:
    model = load(folder, ds_config(torch.bfloat16), quantization_config=bitsandbytes_config("nf4"))
    lacking = model.model.layers[0].self_attn.q_proj
    with deepspeed.zero.GatheredParameters([lacking.weight]):
        std = lacking.weight.float().std().item()
    trainable = [name for name, param in model.named_parameters() if param.requires_grad]
    return {"packed": packed_names(model), "trainable": trainable, "std": std}


def test_what_the_checkpoint_lacks(cluster: None, folders: dict[str, Path], tmp_path: Path) -> None:
    """A weight that the checkpoint lacks is initialised, and trained; those of another shape are an error."""
    name = "model.layers.0.self_attn.q_proj.weight"
    folder = Path(shutil.copytree(folders["dense"], tmp_path / "incomplete"))
    tensors = tensors_of(folder)
    save_file(
        {key: value for key, value in tensors.items() if key != name}, folder / "model.safetensors", {"format": "pt"}
    )
    for found in run_ranks(2, incomplete, folder):
        assert found["trainable"] == [name]
        assert name not in found["packed"] and len(found["packed"]) == 13
        assert 0.01 < found["std"] < 0.04
    save_file(tensors | {name: tensors[name][:-1].clone()}, folder / "model.safetensors", {"format": "pt"})
    for outcome in run_ranks_expecting_errors(2, load_with, folder, {}):
        assert outcome.error_type == "RuntimeError" and "ignore_mismatched_sizes" in outcome.error_message


def left_to_stock(folder: Path) -> dict[str, Any]:
    import bitsandbytes

    settings = hf_zero_stream.StreamingConfig(keep_quantized=False, progress=False)
    with hf_zero_stream.streaming(settings):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, ds_config=ds_config(torch.bfloat16), quantization_config=bitsandbytes_config("nf4")
        )
    layer = model.model.layers[0].self_attn.q_proj
    return {
        "is_stock": isinstance(layer, bitsandbytes.nn.Linear4bit),
        "partitioned": any(hasattr(param, "ds_tensor") for param in model.parameters()),
    }


def test_left_to_stock(cluster: None, folders: dict[str, Path]) -> None:
    for found in run_ranks(2, left_to_stock, folders["dense"]):
        assert found == {"is_stock": True, "partitioned": False}
