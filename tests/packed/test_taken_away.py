"""What needs the plug-in while it is gone is an error that names it, on all ranks, before anything is changed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hf_zero_stream
from hf_zero_stream.errors import MissingPluginError
from tests.packed.test_packed_matrix import write_lfm2
from tests.support.cluster import run_ranks
from tests.support.packed_training import load, with_adapters
from tests.support.parity import ds_config
from tests.support.plugins import without_plugin
from tests.support.quantised_checkpoints import fp8, unquantised


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
