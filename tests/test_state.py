"""``save_state`` and ``load_state``: losses after a resume are those of DeepSpeed's own resume, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.cluster import run_ranks
from tests.training_state import (
    Prepare,
    all_in_one_group,
    frozen_embeddings,
    resume_all,
    state_config,
    train_and_save,
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
