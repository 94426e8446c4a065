"""Saves of training states that die, or whose disk fails, at every single step: ``python -m tests.state.crash``.

As :mod:`.crash`, for ``save_state``, waited for and in the background: afterwards a resume must find the older state
or the newer one, each with its weights, byte for byte. 318 trials at every second step of one rank left 234 older
states and 84 newer ones, 36 of which the next to use the folder had to finish.
"""

import argparse
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import set_seed

import hf_zero_stream
from tests.saving.crash import FAULTS, at_each_step, check, one_of_two_fails, strike, tree
from tests.support.cluster import run_ranks, warm_up
from tests.support.training_state import all_in_one_group, engine_of, plain_training, state_config, train, train_plain
from tests.support.zoo import make_checkpoint


NAME = "llama"
SETTINGS = {"max_shard_size": "100KB"}
WAYS: dict[str, dict[str, Any]] = {
    "waited": {},
    "background": {"asynchronous": True},
    "beside a step": {"asynchronous": True, "snapshot_bytes": 2**17},  # which the step fills, and then writes itself
    "background, all copied": {"asynchronous": True, "snapshot_bytes": "all"},
}


def save(trained: Any, folder: Path, *, step: Callable[[], object] = lambda: None, **arguments: Any) -> None:
    """Save, and make a `step` before the files are there, if the save is asynchronous."""
    set_seed(0)  # random numbers are part of a state
    saved: Any = hf_zero_stream.save_state(trained, folder, **arguments, **SETTINGS)
    if isinstance(saved, hf_zero_stream.PendingSave):
        step()
        saved.wait()


def trials_of_one_rank(parent: Path, way: str, faults: list[str], stride: int = 1) -> Counter[str]:
    """One rank, which fails in turn at each of its steps, or at each `stride`-th."""
    model, optimizer, scheduler = plain_training(make_checkpoint(NAME, parent / "model", torch.float32), None)
    arguments = {"optimizer": optimizer, "scheduler": scheduler}
    old_folder, new_folder = parent / "old", parent / "new"
    train_plain(model, optimizer, scheduler, (0,))
    save(model, old_folder, **arguments)
    train_plain(model, optimizer, scheduler, (1,))
    save(model, Path(shutil.copytree(old_folder, new_folder)), **arguments)
    old, new = tree(old_folder), tree(new_folder)
    assert (old["latest"], new["latest"]) == (b"global_step1", b"global_step2")
    checking = partial(check, old=old, new=new)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    beside = {"step": optimizer.step} if way == "beside a step" else {}
    return at_each_step(old_folder, partial(save, model, **arguments, **WAYS[way], **beside), checking, faults, stride)


def train_and_save(checkpoint: Path, old: Path, new: Path) -> None:
    """The older state, and the newer one in a copy of its folder."""
    engine = engine_of(checkpoint, state_config(3), all_in_one_group)
    train(engine, (0,))
    save(engine, old)
    if dist.get_rank() == 0:
        shutil.copytree(old, new)
    hf_zero_stream.load_state(engine, old)
    train(engine, (1,))
    save(engine, new)


def save_with_fault(
    folder: Path, checkpoint: Path, old: Path, rank: int, step: int, fault: str, arguments: dict[str, Any]
) -> None:
    engine = engine_of(checkpoint, state_config(3), all_in_one_group)
    hf_zero_stream.load_state(engine, old)
    train(engine, (1,))
    if dist.get_rank() == rank:
        strike(step, fault)
    save(engine, folder, **arguments)


def make_states(parent: Path) -> Path:
    """A model, and by two ranks an older and a newer state; returns the folder with all three."""
    checkpoint = make_checkpoint(NAME, parent / "model", torch.float32)
    run_ranks(2, train_and_save, checkpoint, parent / "old", parent / "new")
    return parent


def trial_of_two_ranks(states: Path, rank: int, step: int, fault: str, way: str) -> str:
    arguments = (states / "model", states / "old", rank, step, fault, WAYS[way])
    return f"{way}, " + one_of_two_fails(
        states / "old", tree(states / "new"), rank, fault, save_with_fault, *arguments
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=60, help="trials of two ranks, beside all steps of one")
    parser.add_argument("--stride", type=int, default=1, help="of the steps of one rank, only each of these")
    arguments = parser.parse_args()
    generator = random.Random(0)
    began = time.perf_counter()
    for way in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            found = trials_of_one_rank(Path(folder), way, list(FAULTS), arguments.stride)
        print(f"one rank, {way}: {sum(found.values())} trials, {dict(found)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        warm_up()
        states = make_states(Path(folder))
        counts: Counter[str] = Counter()
        for number in range(arguments.trials):
            rank, fault = generator.randrange(2), generator.choice(list(FAULTS))
            counts[
                trial_of_two_ranks(states, rank, generator.randrange(80), fault, list(WAYS)[number % len(WAYS)])
            ] += 1
    print(f"two ranks, random steps: {sum(counts.values())} trials, {dict(counts)}")
    print(f"{time.perf_counter() - began:.0f} s; every folder held the older state or the newer one")


if __name__ == "__main__":
    main()
