"""States on hosts of all kinds of training, and with all arguments of a save: losses go on as they would have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import peft
import pytest
import torch
import transformers

import hf_zero_stream
from tests.support.cluster import run_ranks
from tests.support.hosts import can_mount
from tests.support.simulated_hosts import join_host
from tests.support.training_state import (
    all_in_one_group,
    engine_of,
    frozen_embeddings,
    plain_training,
    state_config,
    train,
    train_plain,
    two_groups,
)


pytestmark = pytest.mark.skipif(not can_mount(), reason="mounting in a namespace of its own is not allowed here")

Made = tuple[Any, dict[str, Any]]
"""What is trained; and what trains it, if it is no engine."""


def zero(stage: int, prepare: Callable[[Any], Any] = two_groups) -> Callable[[Path], Made]:
    return lambda checkpoint: (engine_of(checkpoint, state_config(stage), prepare), {})


def fsdp2(checkpoint: Path) -> Made:
    model, optimizer, scheduler = plain_training(checkpoint, {"fsdp_size": 2})
    return model, {"optimizer": optimizer, "scheduler": scheduler}


def adapters(checkpoint: Path) -> Made:
    config = state_config(3)
    with hf_zero_stream.streaming():
        model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16, ds_config=config)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", r=2))
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=all_in_one_group(model))
    return engine, {}


KINDS: dict[str, tuple[Callable[[Path], Made], dict[str, Any]]] = {
    "stage 1": (zero(1), {}),
    "stage 2": (zero(2), {}),
    "FSDP2": (fsdp2, {}),
    "adapters": (adapters, {}),
    "frozen": (zero(3, frozen_embeddings), {}),
    "exclude_frozen": (zero(3, frozen_embeddings), {"exclude_frozen": True}),
    "asynchronous": (zero(3), {"asynchronous": True}),
    "no copies": (zero(3), {"copies": 0}),
    "more copies than hosts": (zero(3), {"copies": 2}),
}


def save_and_resume(checkpoint: Path, work: Path, hosts: Sequence[str], kind: str) -> list[list[float]]:
    """The losses of two steps after a save, and after a resume from it."""
    join_host(hosts, work / "disks", work / "own")
    (make, how), losses = KINDS[kind], []

    def train_some(trained: Any, own: dict[str, Any], steps: range) -> list[float]:
        return train_plain(trained, own["optimizer"], own["scheduler"], steps) if own else train(trained, steps)

    trained, own = make(checkpoint)
    train_some(trained, own, range(2))
    hf_zero_stream.save_state(trained, work / "own", hosts=True, **own, **how)
    losses.append(train_some(trained, own, range(2, 4)))
    trained, own = make(checkpoint)
    hf_zero_stream.load_state(trained, work / "own", hosts=True, **own)
    return [*losses, train_some(trained, own, range(2, 4))]


@pytest.mark.parametrize("hosts", ["ab", "aa"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resume(
    cluster: None, zoo_checkpoint: Callable[..., Path], tmp_path: Path, kind: str, hosts: Sequence[str]
) -> None:
    (tmp_path / "own").mkdir()
    for saved, resumed in run_ranks(2, save_and_resume, zoo_checkpoint("llama"), tmp_path, hosts, kind):
        assert saved == resumed
