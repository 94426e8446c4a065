"""Saves in the background from the memory of a training that goes on: the bytes are those of the call.

The writer is held at each file in turn, and steps are made meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist

import hf_zero_stream
from tests.support.cluster import run_ranks
from tests.support.held_writer import held_writer
from tests.support.training_state import all_in_one_group, engine_of, plain_training, state_config, train, train_plain
from tests.support.zoo import make_checkpoint


Checkpoint = Callable[..., Path]
Room = int | Literal["all"] | None

SHARDS = {"max_shard_size": "150KB"}
ROOMS: list[Room] = [None, 1, 2**20]


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its path there."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def save_at_each_file(
    target: Path, trained: Any, steps: Callable[[int], object], room: Room, **arguments: Any
) -> dict[str, Any]:
    """Save again and again, held at another file each time, and two steps later; each time a synchronous save, too."""
    copied, held_seconds, file = 0, 0.0, 0
    with held_writer() as writer:
        while True:
            hf_zero_stream.save_state(trained, target / f"waited {file}", **arguments, **SHARDS)
            writer.hold_at(file)
            pending = hf_zero_stream.save_state(
                trained,
                target / f"background {file}",
                asynchronous=True,
                snapshot_bytes=room,
                **arguments,
                **SHARDS,
            )
            was_held = writer.wait_until_held()
            steps(2 * file)
            steps(2 * file + 1)
            writer.let_go()
            report = pending.wait()
            mine = report.ranks[dist.get_rank() if dist.is_initialized() else 0]
            copied, held_seconds = max(copied, mine.bytes_copied), max(held_seconds, mine.seconds["held"])
            if not any(_of_ranks(was_held)):
                return {"files": file, "copied": copied, "held": held_seconds, "written": mine.bytes_written}
            file += 1


def _of_ranks(value: bool) -> list[bool]:
    """The values of all ranks: these may have different numbers of files to write into."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def same_trees(target: Path, files: int) -> None:
    for file in range(files + 1):
        waited, background = tree(target / f"waited {file}"), tree(target / f"background {file}")
        assert waited.keys() == background.keys()
        assert [name for name in waited if waited[name] != background[name]] == [], file
    assert tree(target / "waited 0") != tree(target / "waited 1"), "steps change what is saved"


def one_process(folder: Path, target: Path, room: Room) -> dict[str, Any]:
    model, optimizer, scheduler = plain_training(folder, None)
    arguments = {"optimizer": optimizer, "scheduler": scheduler}
    return save_at_each_file(
        target, model, lambda step: train_plain(model, optimizer, scheduler, (step,)), room, **arguments
    )


@pytest.mark.parametrize("room", ROOMS)
def test_one_process(tmp_path: Path, room: Room) -> None:
    """From the first step on, before which there are no moments."""
    found = one_process(make_checkpoint("llama", tmp_path / "model", torch.float32), tmp_path, room)
    same_trees(tmp_path, found["files"])
    assert found["files"] > 4 and found["held"] > 0
    if room is None:
        assert 0 < found["copied"] <= found["written"] // 8
    elif room == 1:
        assert found["copied"] == 0
    else:
        assert found["copied"] > found["written"] // 2


def of_engine(folder: Path, target: Path, config: dict[str, Any], room: Room) -> dict[str, Any]:
    engine = engine_of(folder, config, all_in_one_group)
    return save_at_each_file(target, engine, lambda step: train(engine, (step,)), room)


SUB_GROUPS = {"sub_group_size": 10_000}
ENGINES = {
    "stage 3": state_config(3, **SUB_GROUPS),
    "stage 2": state_config(2),
    "offload": state_config(3, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"}, **SUB_GROUPS),
}


@pytest.mark.parametrize("name", ENGINES)
def test_engines(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, name: str) -> None:
    """ZeRO-3 steps sub-group by sub-group; the values of stage 2 all change after the first step of a group."""
    for found in run_ranks(2, of_engine, zoo_checkpoint("llama"), tmp_path, ENGINES[name], None, timeout=60):
        assert found["files"] > 3 and 0 < found["copied"] <= found["written"] // 8
    same_trees(tmp_path, found["files"])


def of_fsdp(folder: Path, target: Path) -> dict[str, Any]:
    model, optimizer, scheduler = plain_training(folder, {"fsdp_size": 2})
    arguments = {"optimizer": optimizer, "scheduler": scheduler}
    return save_at_each_file(
        target, model, lambda step: train_plain(model, optimizer, scheduler, (step,)), None, **arguments
    )


def test_fsdp2(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    for found in run_ranks(2, of_fsdp, zoo_checkpoint("llama"), tmp_path, timeout=60):
        assert found["files"] > 3 and 0 < found["copied"] <= found["written"] // 8
    same_trees(tmp_path, found["files"])
