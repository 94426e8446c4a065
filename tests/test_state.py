"""``save_state`` and ``load_state``: losses after a resume are those of DeepSpeed's own resume, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cluster import run_ranks
from tests.saving import different
from tests.training_state import (
    Prepare,
    all_in_one_group,
    frozen_embeddings,
    resume_all,
    resume_and_save,
    resume_plain,
    state_config,
    train_and_save,
    train_plain_and_save,
    two_groups,
)


Checkpoint = Callable[..., Path]

CPU_ADAM = {"offload_optimizer": {"device": "cpu"}}
HOMES: dict[str, tuple[dict[str, Any], Prepare]] = {
    "stage 3": (state_config(3), all_in_one_group),
    "stage 2": (state_config(2), all_in_one_group),
    "stage 1": (state_config(1), all_in_one_group),
    "stage 3, fp32": (state_config(3, torch.float32), all_in_one_group),
    "sub-groups": (state_config(3, sub_group_size=2000), all_in_one_group),
    "two groups": (state_config(3), two_groups),
    "two groups, stage 2": (state_config(2), two_groups),
    "frozen": (state_config(3), frozen_embeddings),
    "frozen, stage 1": (state_config(1), frozen_embeddings),
    "offload": (state_config(3, **CPU_ADAM, offload_param={"device": "cpu"}), all_in_one_group),
    "hpz": (state_config(3, zero_hpz_partition_size=2), all_in_one_group),
}


def test_losses_equal_deepspeeds_own_resume(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = zoo_checkpoint("qwen3_moe")
    configs, prepares = map(list, zip(*HOMES.values(), strict=True))
    continued = run_ranks(2, train_and_save, folder, tmp_path, configs, prepares, timeout=300)[0]
    resumed = run_ranks(2, resume_all, folder, tmp_path, configs, prepares, ("ours", "stock"), timeout=300)[0]
    for name, losses, found in zip(HOMES, continued, resumed, strict=True):
        assert found == {"ours": losses, "stock": losses}, name


def same_state(first: Path, second: Path) -> list[str]:
    """Names of the files of weights and elementwise states that differ between two folders of ``save_state``."""
    return [name for name in different(first, second) if name.endswith(".safetensors") and "rng" not in name]


@pytest.mark.parametrize("sizes", [{"fsdp_size": 2}, None], ids=["fsdp", "one rank"])
def test_without_an_engine(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, sizes: dict[str, Any] | None
) -> None:
    """Losses go on as if nothing had happened."""
    folder, world_size = zoo_checkpoint("llama"), 1 if sizes is None else 2
    continued = run_ranks(world_size, train_plain_and_save, folder, tmp_path / "state", sizes)
    assert run_ranks(world_size, resume_plain, folder, tmp_path / "state", sizes) == continued


def test_other_numbers_of_ranks(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Masters, moments and steps that M ranks load are those that N ranks saved: saving them again gives the same."""
    folder = zoo_checkpoint("llama")
    config = state_config(3, torch.bfloat16)
    run_ranks(2, train_and_save, folder, tmp_path, [config], [two_groups])
    for world_size, stage in ((1, 3), (3, 3), (4, 3), (3, 1), (2, 2)):
        again = tmp_path / f"again {world_size} {stage}"
        run_ranks(world_size, resume_and_save, folder, tmp_path / "ours 0", state_config(stage), two_groups, again)
        assert same_state(tmp_path / "ours 0", again) == []


def test_between_zero_and_fsdp2(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder, config = zoo_checkpoint("llama"), state_config(3, torch.float32)
    train = run_ranks(2, train_plain_and_save, folder, tmp_path / "fsdp", {"fsdp_size": 2})
    run_ranks(3, resume_and_save, folder, tmp_path / "fsdp", config, two_groups, tmp_path / "zero", False)
    again = tmp_path / "fsdp again"
    losses = run_ranks(2, resume_plain, folder, tmp_path / "zero", {"fsdp_size": 2}, again, False)
    assert losses == train
    assert same_state(tmp_path / "fsdp", again) == []
