"""Adapters trained on a base that stays in its files are bit for bit those that are trained on it in memory."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.moe_checkpoint import make_moe_checkpoint
from tests.from_files.trainings import EXPERTS, train
from tests.support.cluster import run_ranks


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE of 40 MB in bf16, with a tensor for each expert in its four shards."""
    return make_moe_checkpoint(tmp_path_factory.mktemp("moe"), 4e7, num_layers=4, num_experts=8)


TRAININGS: dict[str, Any] = {
    "attention": {},
    "experts": {"adapters": {"parameters": EXPERTS}},
    "no checkpointing": {"adapters": {"checkpointing": False}},
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("how", [*TRAININGS])
def test_losses_and_adapters_are_those_in_memory(cluster: None, mixture: Path, world_size: int, how: str) -> None:
    from_files = run_ranks(world_size, train, mixture, "files", 6, TRAININGS[how])
    assert from_files == run_ranks(world_size, train, mixture, "memory", 6, TRAININGS[how])
    assert len({*from_files[0][0]}) == 6
