"""Quantised checkpoints stay quantised under ZeRO-3: adapters train beside packed, partitioned weights."""

import filecmp
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

import hf_zero_stream
from hf_zero_stream.errors import ConfigError, UnsupportedError
from tests import sampling
from tests.support.cluster import run_ranks, run_ranks_expecting_errors
from tests.support.messages import listen, message_of
from tests.support.packed_training import (
    CONFIGS,
    TARGETS,
    check_saved,
    inputs,
    load,
    packed_names,
    trained,
    with_adapters,
)
from tests.support.parity import ds_config
from tests.support.quantised_checkpoints import bitsandbytes, compressed_tensors, fp8, mxfp4


DYNAMIC = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True}

FORMATS: dict[str, Callable[[Path], None]] = {
    "fp8": fp8,  # a dense layer, and one of experts
    "mxfp4": mxfp4,  # transposed experts with biases
    "int4 experts": lambda folder: compressed_tensors(folder, "int4 by group"),
    "int4 dense": lambda folder: compressed_tensors(folder, "int4 with zero points"),
    "nf4 dense": lambda folder: bitsandbytes(folder, "double nf4", width=64, dequantised=folder / "plain"),
    "int8 dense": lambda folder: bitsandbytes(folder, "int8", width=64, dequantised=folder / "plain"),
}


def make_folders(tmp_path_factory: pytest.TempPathFactory, names: Iterable[str] = FORMATS) -> dict[str, Path]:
    """A checkpoint of each of these `FORMATS`, by name."""
    found = {}
    for name in names:
        FORMATS[name](folder := tmp_path_factory.mktemp(name.replace(" ", "_")))
        found[name] = folder
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    some = ("fp8", "mxfp4", "int4 dense", "nf4 dense")
    return make_folders(tmp_path_factory, some if sampling.is_sample else FORMATS)


# ------------------------------------------------------------------------------------------------------- saving


def saved_twice(folders: dict[str, Path], out: Path) -> list[str]:
    for name, folder in folders.items():
        model = load(folder, ds_config(torch.bfloat16))
        hf_zero_stream.save_pretrained(model, out / name)
        again = load(out / name, ds_config(torch.bfloat16))
        with hf_zero_stream.streaming():
            again.save_pretrained(out / f"{name} again", max_shard_size="20KB")
        hf_zero_stream.save_pretrained(again, out / f"{name} once more")
    return packed_names(again)


def test_saved_as_it_was(cluster: None, folders: dict[str, Path], tmp_path: Path) -> None:
    assert all(run_ranks(2, saved_twice, folders, tmp_path, timeout=300))
    for name, folder in folders.items():
        for saved in (tmp_path / name, tmp_path / f"{name} again"):
            check_saved(saved, folder)
        assert len(list((tmp_path / f"{name} again").glob("*.safetensors"))) > 1
        for file in ("model.safetensors", "config.json"):
            assert filecmp.cmp(tmp_path / name / file, tmp_path / f"{name} once more" / file, shallow=False)
        before, after = (
            transformers.AutoConfig.from_pretrained(each).quantization_config for each in (folder, tmp_path / name)
        )
        assert before == after


def said_of_activations(folder: Path) -> int:
    said = listen()
    for _ in range(2):
        assert packed_names(load(folder, ds_config(torch.bfloat16)))
    return sum("also quantises what goes into layers" in text for text in said)


@pytest.mark.parametrize(("inputs", "count"), [({**DYNAMIC, "strategy": "token"}, 1), (None, 0)], ids=["said", "not"])
def test_activations_that_the_config_quantises(
    cluster: None, tmp_path: Path, inputs: dict[str, Any] | None, count: int
) -> None:
    """They stay as they are, which is said once, on rank 0."""
    compressed_tensors(tmp_path, "int8 by channel", input_activations=inputs)
    assert run_ranks(2, said_of_activations, tmp_path) == [count, 0]


# -------------------------------------------------------------------------------------------------------- plan


def sparse_mxfp4(folder: Path, config: transformers.GptOssConfig) -> int:
    """A checkpoint in MXFP4 of any size, whose tensors are a hole in the file; returns the model's parameters."""
    with torch.device("meta"):
        model = transformers.GptOssForCausalLM(config)
    header: dict[str, Any] = {}
    stop = 0
    for name, value in model.state_dict().items():
        shapes = {name: ("BF16", list(value.shape), 2)}
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inner, outer = value.shape
            rows = [experts, outer, inner // 32]
            shapes = {f"{name}_blocks": ("U8", [*rows, 16], 1), f"{name}_scales": ("U8", rows, 1)}
        for key, (dtype, shape, itemsize) in shapes.items():
            start, stop = stop, stop + math.prod(shape) * itemsize
            header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + stop)
    config.dtype = torch.bfloat16  # else transformers looks into the file
    config.architectures = ["GptOssForCausalLM"]
    config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    config.save_pretrained(folder)
    return model.num_parameters()


@pytest.mark.plugin("forecast")
def test_plan_of_a_large_model(tmp_path: Path) -> None:
    """284 billion parameters in 4 bits fit on 8 devices of 25 GiB, but for activations and adapters."""
    config = transformers.GptOssConfig(
        hidden_size=4096, intermediate_size=4096, num_local_experts=128, num_hidden_layers=44, vocab_size=200064
    )
    assert 284e9 < sparse_mxfp4(tmp_path, config) < 287e9
    with open(tmp_path / "model.safetensors", "rb") as file:
        size = (tmp_path / "model.safetensors").stat().st_size - 8 - int.from_bytes(file.read(8), "little")
    bf16 = ds_config(torch.bfloat16)
    found = hf_zero_stream.plan(str(tmp_path), world_size=8, rank=3, ds_config=bf16, device="cuda")
    memory = found.memory
    assert size / 8 <= memory.partitions["cuda"] <= 1.001 * size / 8
    assert found.load.cost.bytes_read <= 1.001 * size / 8
    assert memory.largest_gather_of.endswith("mlp.experts")
    assert 3 * 128 * 4096 * 4096 * 17 / 32 < memory.largest_gather < 1.001 * 3 * 128 * 4096 * (4096 * 17 / 32 + 2)
    assert not memory.master and not memory.optimizer_states, "all of it is frozen"
    assert memory.held["cuda"] + memory.largest_gather <= 25 * 2**30


LORA = {"r": 3, "target_modules": TARGETS}


def held_in_training(folders: dict[str, Path], dtype: torch.dtype) -> dict[str, dict[str, int]]:
    """What a rank really holds after three steps, in the words of a footprint."""
    found = {}
    for name, folder in folders.items():
        engine, _ = trained(folder, ds_config(dtype), True)
        masters = engine.optimizer.fp32_partitioned_groups_flat
        states = [engine.optimizer.optimizer.state[master] for master in masters]
        adam = [state[key] for state in states for key in ("exp_avg", "exp_avg_sq")]
        found[name] = {
            "partitions": sum(param.ds_tensor.nbytes for param in engine.module.parameters()),
            "master": sum(master.nbytes for master in masters),
            "optimizer_states": sum(state.nbytes for state in adam),
            "gradients": engine.optimizer.grad_partitions_flat_buffer.nbytes,
        }
    return found


@pytest.mark.plugin("forecast")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_plan_counts_adapters(cluster: None, folders: dict[str, Path], dtype: torch.dtype) -> None:
    config = ds_config(dtype)
    for rank, of_rank in enumerate(run_ranks(2, held_in_training, folders, dtype, timeout=300)):
        for name, found in of_rank.items():
            where = {"world_size": 2, "rank": rank, "ds_config": config, "device": "cpu"}
            bare = hf_zero_stream.plan(str(folders[name]), **where).memory
            memory = hf_zero_stream.plan(str(folders[name]), lora=LORA, **where).memory
            for part, nbytes in found.items():
                assert getattr(memory, part) == {"cpu": nbytes}, (name, part)
            assert memory.load_peak == bare.load_peak and not bare.master


@pytest.mark.plugin("forecast")
@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"r": 2, "target_modules": ["no_such"]}, "lora: Target modules .*no_such"),
        ({"rank": 2}, "lora: .*unexpected keyword argument 'rank'"),
    ],
)
def test_plan_refuses_adapters(folders: dict[str, Path], lora: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hf_zero_stream.plan(str(folders["fp8"]), world_size=2, lora=lora)


# ------------------------------------------------------------------------------------------------------ refused


def as_documented(folder: Path) -> dict[str, str]:
    """The code in docs/quantised.md, then what is refused."""
    text = (Path(__file__).parents[2] / "docs" / "quantised.md").read_text(encoding="utf-8")
    code = text.partition("```python\n")[2].partition("```")[0]
    found: dict[str, Any] = {"ds_config": ds_config(torch.bfloat16)}
    exec(code.replace("checkpoint-in-fp8", str(folder)), found)
    assert packed_names(found["engine"].module) and found["engine"](**inputs()).loss.isfinite()
    return refusals(folder)


REFUSED_ADAPTERS: dict[str, dict[str, Any]] = {
    "target_parameters": {"target_parameters": ["self_attn.o_proj.weight"]},
    "use_dora": {"use_dora": True},
    "pissa": {"init_lora_weights": "pissa"},
    "loftq": {"init_lora_weights": "loftq", "loftq_config": peft.LoftQConfig()},
    "modules_to_save": {"modules_to_save": ["o_proj"]},
}


def refusals(folder: Path) -> dict[str, str]:
    found = {}
    base = load(folder, ds_config(torch.bfloat16))
    for title, settings in REFUSED_ADAPTERS.items():
        config = peft.LoraConfig(**{"r": 2, "target_modules": ["q_b_proj"], **settings})
        found[title] = message_of(lambda: peft.get_peft_model(load(folder, ds_config(torch.bfloat16)), config))
    found["load_into"] = message_of(lambda: hf_zero_stream.load_into(base, str(folder)))
    found["train"] = message_of(lambda: base.requires_grad_(True))
    base.requires_grad_(False)
    return found


def test_refused(cluster: None, folders: dict[str, Path]) -> None:
    for found in run_ranks(2, as_documented, folders["fp8"], timeout=300):
        assert "UnsupportedError: target_parameters: model.layers.0.self_attn.o_proj" in found["target_parameters"]
        assert "UnsupportedError: use_dora: " in found["use_dora"]
        for name in ("pissa", "loftq"):
            assert f"UnsupportedError: init_lora_weights='{name}': " in found[name]
        assert "UnsupportedError: load_into(model): the model's weights are packed" in found["load_into"]
        for name in ("modules_to_save", "train"):
            assert "only Tensors of floating point dtype can require gradients" in found[name]


def attempts_to_merge(folders: dict[str, Path], out: Path) -> dict[str, str]:
    """What `merge_and_unload` answers, and `merge_adapter`; the adapters are saved in `out`."""
    found = {}
    for name, folder in folders.items():
        model = with_adapters(load(folder, ds_config(torch.bfloat16)))
        for merge in (model.merge_and_unload, model.merge_adapter):
            with pytest.raises(UnsupportedError) as error:
                merge()
        found[name] = str(error.value)
        with hf_zero_stream.streaming():
            model.save_pretrained(out / name)
    return found


def merged_as_advised(folders: dict[str, Path], adapters: Path) -> dict[str, float]:
    """By the words of that answer, in one process; the largest change of logits that merging makes."""
    found = {}
    for name, folder in folders.items():
        config = transformers.AutoConfig.from_pretrained(folder).quantization_config
        if config["quant_method"] == "bitsandbytes":
            base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).dequantize()
        else:
            how = {"quantization_config": CONFIGS[config["quant_method"]](dequantize=True)}
            base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **how)
        model = peft.PeftModel.from_pretrained(base.float(), adapters / name)
        with torch.no_grad():
            before, bare = model(**inputs()).logits, base_logits(model)
            after = model.merge_and_unload()(**inputs()).logits
        assert (before - bare).abs().max() > 0.01, "the adapters do something"
        found[name] = ((after - before).abs().max() / before.abs().max()).item()
    return found


def base_logits(model: Any) -> torch.Tensor:
    with model.disable_adapter():
        logits: torch.Tensor = model(**inputs()).logits
    return logits


def test_merging(cluster: None, folders: dict[str, Path], tmp_path: Path) -> None:
    """Refused in every format, with advice that works."""
    for of_rank in run_ranks(2, attempts_to_merge, folders, tmp_path, timeout=300):
        assert of_rank.keys() == folders.keys()
        for answer in of_rank.values():
            assert "dequantize=True" in answer and "PeftModel.from_pretrained" in answer
    for name, change in run_ranks(1, merged_as_advised, folders, tmp_path, timeout=300)[0].items():
        assert change < 1e-4, name


SETTINGS: dict[str, dict[str, Any]] = {
    "stage3_use_all_reduce_for_fetch_params": {"stage3_use_all_reduce_for_fetch_params": True},
    "offload_param.device: nvme": {"offload_param": {"device": "nvme", "nvme_path": "/nowhere"}},
}


def load_with_settings(folder: Path, zero: dict[str, Any]) -> None:
    load(folder, ds_config(torch.bfloat16, **zero))


@pytest.mark.plugin("forecast")
def test_refused_expert_parallelism(folders: dict[str, Path]) -> None:
    """AutoEP of DeepSpeed: a plan refuses what a load would."""
    config = {**ds_config(torch.bfloat16), "expert_parallel": {"enabled": True, "autoep_size": 2}}
    with pytest.raises(UnsupportedError, match="expert_parallel.*keep_quantized"):
        hf_zero_stream.plan(str(folders["fp8"]), world_size=2, ds_config=config)


@pytest.mark.parametrize("setting", SETTINGS)
def test_refused_settings(cluster: None, folders: dict[str, Path], setting: str) -> None:
    for outcome in run_ranks_expecting_errors(2, load_with_settings, folders["fp8"], SETTINGS[setting]):
        assert outcome.error_type == "UnsupportedError"
        assert setting in outcome.error_message and "keep_quantized" in outcome.error_message
