"""A weight stream gives what a save holds, bit for bit, on the ranks that want it, in buckets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import live_sharded as live
from tests.cluster import run_ranks
from tests.parity import ds_config
from tests.streams import compared, stream_live, stream_trained, stream_zero


Checkpoint = Callable[..., Path]


def assert_complete(of_ranks: list[dict[str, Any]], to: str) -> None:
    """Nothing differs, and who should get a tensor got it."""
    names = of_ranks[0]["names"]
    assert all(found["differing"] == [] and found["metadata"] for found in of_ranks)
    owned = [found["owned"] for found in of_ranks]
    if to == "owners":
        assert sorted(name for mine in owned for name in mine) == names
    else:
        assert owned == [names if to == "all" or rank == 0 else [] for rank in range(len(owned))]


@pytest.mark.parametrize("to", ["rank0", "all", "owners"])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("bucket_bytes", [1000, 2**20])
def test_zero_3(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, to: str, world_size: int, bucket_bytes: int
) -> None:
    names = ["llama", "qwen3_moe", "qwen3", "llama4"]  # fused experts, tied weights, rows in another order
    checkpoints = [zoo_checkpoint(name) for name in names]
    found = run_ranks(world_size, Stream(bucket_bytes), names, checkpoints, tmp_path, to)
    for of_ranks in zip(*found, strict=True):
        assert_complete(list(of_ranks), to)


class Stream:
    """`stream_zero` with options."""

    __name__ = "stream_zero"

    def __init__(self, bucket_bytes: int, **options: Any) -> None:
        self._options = {"bucket_bytes": bucket_bytes, **options}

    def __call__(self, *args: Any) -> Any:
        return stream_zero(*args, **self._options)
