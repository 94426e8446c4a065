"""Ranks that come to a load seconds or minutes after each other, or not at all."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from tests.cluster import run_ranks, run_ranks_expecting_errors
from tests.fsdp2 import announce, count_lazy, load, make_accelerator
from tests.hosts import move_to_host


Checkpoint = Callable[..., Path]

# ------------------------------------------------------------------------------------------- deferred until prepare()


def defer_in_turn(folder: Path) -> tuple[int, float, int, int]:
    """Rank 1 comes when rank 0 has its lazy model; how many parameters are lazy, and what is read in the end."""
    announce()
    accelerator = make_accelerator()
    if dist.get_rank():
        dist.barrier()
    began = time.monotonic()
    model = load("llama", folder)
    seconds, lazy = time.monotonic() - began, count_lazy(model)
    if not dist.get_rank():
        dist.barrier()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    accelerator.prepare(model, optimizer)
    report = model.streaming_report
    return lazy, seconds, len(report.ranks), sum(rank.bytes_read for rank in report.ranks)


def test_a_deferral_waits_for_nobody(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    folder = zoo_checkpoint("llama")
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    for lazy, seconds, ranks, read in run_ranks(2, defer_in_turn, folder):
        assert lazy > 10 and seconds < 5 and ranks == 2 and read <= 1.1 * size


def prepare_copies(folders: list[Path]) -> None:
    announce()
    move_to_host("ab"[dist.get_rank()])
    accelerator = make_accelerator()
    model = load("llama", folders[dist.get_rank()])
    assert count_lazy(model)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))


def test_other_files_on_another_host_are_found_in_prepare(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Each rank has opened its own files alone, so this is the first time that they can compare them."""
    folder = zoo_checkpoint("llama")
    older = shutil.copytree(folder, tmp_path / "older" / folder.name)
    for file in older.glob("*.safetensors"):
        save_file({name: value + 1 for name, value in load_file(file).items()}, file, metadata={"format": "pt"})
    for outcome in run_ranks_expecting_errors(2, prepare_copies, [folder, older], timeout=60):
        assert outcome.error_type == "CheckpointError", outcome
        assert "has the same header as rank 0's and other values" in str(outcome.error_message)
