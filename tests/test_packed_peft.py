"""Adapters of PEFT beside packed weights: other kinds than LoRA, several at a time, and what else one does to a model.

Each is compared with the same done to the dequantised model.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from tests.cluster import run_ranks
from tests.packed_training import load, three_losses
from tests.parity import ds_config
from tests.quantised_checkpoints import compressed_tensors


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
    torch.manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.normal_(std=0.1)
    return model


def losses_of_kinds(folder: Path) -> dict[str, list[list[float]]]:
    import deepspeed

    found: dict[str, list[list[float]]] = {}
    config = ds_config(torch.bfloat16)
    for name, kind in KINDS.items():
        for keep in (True, False):
            torch.manual_seed(0)
            model = adapted(load(folder, config, keep), kind())
            trainable = [param for param in model.parameters() if param.requires_grad]
            engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=trainable)
            found.setdefault(name, []).append(three_losses(engine))
    return found


def test_kinds_of_adapters(cluster: None, folder: Path) -> None:
    for of_rank in run_ranks(2, losses_of_kinds, folder, timeout=120):
        for name, (packed, dequantised) in of_rank.items():
            assert packed == dequantised and packed[0] != packed[2], name
