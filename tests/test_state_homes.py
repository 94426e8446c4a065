"""Training states where parameters, masters and moments lie elsewhere: swap files, the ranks of experts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cluster import run_ranks
from tests.test_expert_parallel import checkpoint as moe_checkpoint  # noqa: F401 - a fixture
from tests.test_state import different_states
from tests.training_state import all_in_one_group, resume_all, resume_and_save_all, state_config, train_and_save
from tests.zoo import make_moe_checkpoint


Checkpoint = Callable[..., Path]

MIB = 2**20


def nvme_config(swap: Path, *, parameters: bool) -> dict[str, Any]:
    where = {"device": "nvme", "nvme_path": str(swap)}
    offload = {"offload_optimizer": {**where, "buffer_count": 6}}
    if parameters:
        offload["offload_param"] = {**where, "buffer_count": 5, "buffer_size": 2 * MIB}
    return state_config(3, sub_group_size=10**6, **offload)


@pytest.mark.slow
@pytest.mark.usefixtures("async_io")
@pytest.mark.parametrize("parameters", [False, True], ids=["optimizer", "both"])
def test_nvme(cluster: None, tmp_path: Path, parameters: bool) -> None:
    """Goes on as if nothing had happened; and on 3 ranks, with or without swap files."""
    folder = make_moe_checkpoint(tmp_path / "moe", 4e6, num_layers=2, num_experts=8)
    config = nvme_config(tmp_path / "swap", parameters=parameters)
    continued = run_ranks(2, train_and_save, folder, tmp_path, [config], [all_in_one_group], False)
    resumed = run_ranks(2, resume_all, folder, tmp_path, [config], [all_in_one_group], ["ours"])
    assert [[each["ours"] for each in found] for found in resumed] == continued
    source = tmp_path / "ours 0"
    run_ranks(
        3, resume_and_save_all, folder, [source], [config, state_config(3)], all_in_one_group, tmp_path / "again"
    )
    for number in range(2):
        assert different_states(source, tmp_path / "again" / f"{number} {tmp_path.name}") == []


def no_groups(model: Any) -> None:
    """DeepSpeed makes them: it needs experts apart."""


@pytest.mark.slow
def test_expert_parallelism(cluster: None, moe_checkpoint: Checkpoint, tmp_path: Path) -> None:  # noqa: F811
    """States have the experts of all ranks, as the model has them: other numbers of parts, and none, go on."""
    folder = moe_checkpoint("qwen3_moe", torch.bfloat16)
    section = {"enabled": True, "autoep_size": 2, "use_grouped_mm": False}
    config = {**state_config(3), "expert_parallel": section}
    continued = run_ranks(4, train_and_save, folder, tmp_path, [config], [no_groups], False)
    resumed = run_ranks(4, resume_all, folder, tmp_path, [config], [no_groups], ["ours"])
    assert [[each["ours"] for each in found] for found in resumed] == continued
    source = tmp_path / "ours 0"
    run_ranks(2, resume_and_save_all, folder, [source], [config], no_groups, tmp_path / "again")
    assert different_states(source, tmp_path / "again" / f"0 {tmp_path.name}") == []
