"""Models of DTensors are saved as the whole model is, byte for byte, whatever training has left them in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import live_sharded as live
from tests.cluster import run_ranks
from tests.live_sharded import save_live
from tests.saving import different


Checkpoint = Callable[..., Path]

ON_TWO = [
    live.fully_sharded,
    live.after_an_eval,
    live.after_a_step_and_an_eval,
    live.one_group,
    live.offloaded,
    live.mixed_precision,
    live.other_dimension,
    live.checkpointed,
    live.compiled,
    live.partly_sharded,
    live.tp,
    live.by_transformers,
]
ON_FOUR = [live.hsdp, live.fsdp_of_tp, live.by_transformers_in_two_ways]


def assert_whole(folder: Path, ways: list[live.Way]) -> None:
    found = {way.__name__: different(folder / way.__name__ / "ours", folder / way.__name__ / "whole") for way in ways}
    assert found == {way.__name__: [] for way in ways}


@pytest.mark.parametrize(("world_size", "ways"), [(2, ON_TWO), (4, ON_FOUR)], ids=["2", "4"])
def test_live_models(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, world_size: int, ways: list[live.Way]
) -> None:
    run_ranks(world_size, save_live, zoo_checkpoint("llama"), tmp_path, ways, {})
    assert_whole(tmp_path, ways)


def test_ranks_with_empty_shards(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    run_ranks(4, save_live, zoo_checkpoint("qwen3_moe"), tmp_path, [live.on_four_ranks], {})
    assert_whole(tmp_path, [live.on_four_ranks])


def test_tied_heads(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    ways = [live.after_an_eval, live.after_a_step, live.by_transformers]
    run_ranks(2, save_live, zoo_checkpoint("qwen3"), tmp_path, ways, {})
    assert_whole(tmp_path, ways)


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": torch.bfloat16, "verify": True},
        {"write_from": "rank0", "verify": True},
        {"variant": "trained", "chunk_bytes": 1000},
    ],
    ids=["dtype", "rank0", "variant"],
)
def test_settings(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, settings: dict[str, Any]) -> None:
    for reports in run_ranks(2, save_live, zoo_checkpoint("deepseek_v3"), tmp_path, [live.after_a_step], settings):
        assert not reports["after_a_step"].materialised
    assert_whole(tmp_path, [live.after_a_step])
