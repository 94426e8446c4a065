"""Packed models where transformers saves alone, or the plug-in is gone.

- Packed models and ``save_pretrained`` of transformers alone, which would write bytes as if they were values.
- What needs the plug-in while it is gone is an error that names it, on all ranks, before anything is changed.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import transformers

import hf_zero_stream
from hf_zero_stream.errors import MissingPluginError, UnsupportedError
from tests import sampling
from tests.packed.test_packed import FORMATS, make_folders
from tests.packed.test_packed_fsdp2 import load as load_lazily
from tests.packed.test_packed_fsdp2 import load_native
from tests.packed.test_packed_matrix import write_lfm2
from tests.support.checkpoint_files import tensors_of
from tests.support.cluster import run_ranks
from tests.support.fsdp2 import announce, make_accelerator
from tests.support.packed_training import check_saved, load, packed_names, with_adapters
from tests.support.parity import ds_config
from tests.support.plugins import without_plugin
from tests.support.quantised_checkpoints import fp8, unquantised


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_folders(tmp_path_factory, ("fp8", "int4 dense") if sampling.is_sample else FORMATS)


def refused(save: Callable[[], Any], folder: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"packed.*hf_zero_stream\.save_pretrained\(model, folder\)"):
        save()
    assert not folder.exists(), "refused before anything is written"


def save_zero3(folders: dict[str, Path], out: Path) -> None:
    for name, folder in folders.items():
        model = load(folder, ds_config(torch.bfloat16))
        refused(lambda: model.save_pretrained(out / "partitioned"), out / "partitioned")
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            if dist.get_rank() == 0:
                values = dict(model.state_dict())
                refused(lambda: model.save_pretrained(out / "values", state_dict=values), out / "values")
                refused(lambda: model.save_pretrained(out / "gathered"), out / "gathered")
                with hf_zero_stream.streaming():
                    refused(lambda: model.save_pretrained(out / "streaming"), out / "streaming")
        with_adapters(model).save_pretrained(out / name)
        check_adapters(out / name)
        hf_zero_stream.save_pretrained(model, out / f"{name} base")


def check_adapters(saved: Path) -> None:
    dist.barrier()
    assert (saved / "adapter_model.safetensors").exists() and not (saved / "model.safetensors").exists()


def test_zero3(cluster: None, folders: dict[str, Path], tmp_path: Path) -> None:
    run_ranks(2, save_zero3, folders, tmp_path, timeout=120)


def save_fsdp2(folders: dict[str, Path], out: Path) -> None:
    for name, folder in folders.items():
        model = load_native(folder)
        refused(lambda: model.save_pretrained(out / "sharded"), out / "sharded")
        refused(lambda: model.save_pretrained(out / "parts", distributed_checkpoint=True), out / "parts")
        with_adapters(model).save_pretrained(out / name)
        check_adapters(out / name)
        announce()
        make_accelerator()
        model = load_lazily(folder, dtype=torch.bfloat16)
        refused(lambda: model.save_pretrained(out / "unprepared"), out / "unprepared")
        with hf_zero_stream.streaming():
            model.save_pretrained(out / f"{name} unprepared")


def test_fsdp2(cluster: None, folders: dict[str, Path], tmp_path: Path) -> None:
    run_ranks(2, save_fsdp2, folders, tmp_path, timeout=120)
    for name, folder in folders.items():
        check_saved(tmp_path / f"{name} unprepared", folder)


def test_other_models_are_saved_by_transformers(cluster: None, folders: dict[str, Path], tmp_path: Path) -> None:
    run_ranks(1, save_another, folders["fp8"], tmp_path)


def save_another(folder: Path, out: Path) -> None:
    original = vars(transformers.PreTrainedModel)["save_pretrained"]
    assert packed_names(load(folder, ds_config(torch.bfloat16)))
    assert vars(transformers.PreTrainedModel)["save_pretrained"] is not original
    config = transformers.Qwen3Config(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, head_dim=8, vocab_size=48
    )
    model = transformers.Qwen3ForCausalLM(config)
    model.save_pretrained(out)
    saved = tensors_of(out)
    assert saved.keys() == model.state_dict().keys()
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())


NEEDS = r"needs the plug-in 'packed' of hf_zero_stream \(quantised checkpoints: .*\), which is not installed"


def messages(root: Path) -> dict[str, str]:
    """What is said, case by case, of what needs the plug-in."""
    folder, config = root / "fp8", ds_config(torch.bfloat16)
    causal = transformers.AutoModelForCausalLM
    packed = load(folder, config)
    how = {"quantization_config": transformers.FineGrainedFP8Config(dequantize=True)}
    dequantised = causal.from_pretrained(folder, **how)
    with hf_zero_stream.streaming():
        plain = causal.from_pretrained(root / "plain", ds_config=config)
    four_bits = transformers.BitsAndBytesConfig(load_in_4bit=True)
    cases: dict[str, Callable[[], Any]] = {
        "load": lambda: causal.from_pretrained(folder, ds_config=config),
        "dequantise": lambda: causal.from_pretrained(folder, ds_config=config, **how),
        "quantise": lambda: causal.from_pretrained(root / "plain", ds_config=config, quantization_config=four_bits),
        "GGUF": lambda: causal.from_pretrained(root, gguf_file="lfm2.gguf", ds_config=config),
        "load_into": lambda: hf_zero_stream.load_into(plain, folder),
        "plan": lambda: hf_zero_stream.plan(str(folder), world_size=2),
        "save": lambda: hf_zero_stream.save_pretrained(packed, root / "saved"),
        "save dequantised": lambda: dequantised.save_pretrained(root / "saved"),
        "adapters": lambda: with_adapters(packed),
    }
    found = {}
    with without_plugin("packed"), hf_zero_stream.streaming():
        for name, act in cases.items():
            with pytest.raises(MissingPluginError, match=NEEDS) as error:
                act()
            found[name] = str(error.value).partition(" needs the plug-in")[0]
    return found


@pytest.mark.plugin("forecast")
def test_all_that_needs_it(cluster: None, tmp_path: Path) -> None:
    fp8(tmp_path / "fp8")
    unquantised(tmp_path / "plain")
    write_lfm2(tmp_path / "lfm2.gguf")
    of_config, of_save = "its quantization_config", "saving a model that was dequantised"
    for found in run_ranks(2, messages, tmp_path):
        assert found == {
            **dict.fromkeys(("load", "dequantise", "load_into"), f"{tmp_path / 'fp8'}: {of_config}"),
            "quantise": f"{tmp_path / 'plain'}: {of_config}",
            "GGUF": f"{tmp_path}: lfm2.gguf",
            "plan": f"this checkpoint: {of_config}",
            "save": of_save,
            "save dequantised": of_save,
            "adapters": "adapters on packed weights",
        }
    assert not [*(tmp_path / "saved").iterdir()]
