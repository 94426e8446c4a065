"""Saves that die, or whose disk fails, at every single step: ``python -m tests.saving.crash --trials 200``.

A trial saves over an older checkpoint of the same names. One rank is killed, or gets an error from the system, before
its n-th call that changes files. Afterwards the folder must hold the old checkpoint, byte for byte, or the new one;
or the new one once the next to use the folder has finished it. After 237 trials, the folder held the old checkpoint
166 times, the new one 28 times, the new one once it was finished 36 times; 7 times the save had ended before.
"""

import argparse
import errno
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm
from tqdm.auto import tqdm as tqdm_auto

import hf_zero_stream
from hf_zero_stream.saving.publication import UNFINISHED, finish_interrupted
from tests.support.checkpoint_files import add_one
from tests.support.cluster import run_ranks_expecting_errors, warm_up
from tests.support.parity import ds_config, load_with
from tests.support.saving import SHARD_SIZE
from tests.support.zoo import make_checkpoint


NAME = "qwen3_moe"
CHANGING = ("open", "pwritev", "fsync", "posix_fallocate", "replace", "unlink", "mkdir", "rmdir")
FAULTS = {"killed": None, "no space": errno.ENOSPC, "i/o error": errno.EIO}


def make_checkpoints(folder: Path) -> tuple[Path, Path, dict[str, bytes]]:
    """Two checkpoints with the same names and other values, and what the second is when it is saved."""
    first, second = (make_checkpoint(NAME, folder / name, torch.bfloat16) for name in ("first", "second"))
    add_one(second)
    for checkpoint, name in ((first, "old"), (second, "new")):
        plain = load_with("plain", "AutoModelForCausalLM", checkpoint, {}, {"dtype": torch.bfloat16})
        plain.save_pretrained(folder / name, max_shard_size=SHARD_SIZE)
    return folder / "old", second, tree(folder / "new")


def strike(step: int, fault: str) -> Callable[[], int]:
    """Have this process fail at its n-th call that changes files; returns what counts the calls so far."""
    calls = [0]

    def replaced(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] == step + 1:
                if FAULTS[fault] is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise OSError(FAULTS[fault], os.strerror(FAULTS[fault] or 0))
            return original(*args, **kwargs)

        return call

    for name in CHANGING:
        setattr(os, name, replaced(getattr(os, name)))
    return lambda: calls[0]


def save(model: Any, folder: Path) -> None:
    hf_zero_stream.save_pretrained(model, folder, max_shard_size=SHARD_SIZE)


Tree = dict[str, bytes]


def tree(folder: Path) -> Tree:
    """Every file below a folder, by its path there, but for those of a save that is not complete."""
    paths = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    return {str(path): (folder / path).read_bytes() for path in paths if not path.parts[0].startswith(UNFINISHED)}


def check(folder: Path, old: Tree, new: Tree) -> str:
    """What a trial has left: ``"old"``, ``"new"``, or ``"finished"`` if the next to use the folder had to finish it.

    Raises:
        AssertionError: something else.
    """
    before = tree(folder)
    assert all(data in (old.get(name), new.get(name)) for name, data in before.items()), "a file that is not complete"
    finished = finish_interrupted(folder)
    after = tree(folder)
    if after == new:
        return "finished" if finished or before != new else "new"
    unlike = [sorted(name for name in after.keys() | each if after.get(name) != each.get(name)) for each in (old, new)]
    assert after == old, f"neither old nor new; differing from the one in {unlike[0]}, from the other in {unlike[1]}"
    return "old"


def trials_of_one_rank(
    checkpoint: Path, old_folder: Path, new: dict[str, bytes], faults: list[str], stride: int = 1
) -> Counter[str]:
    """One rank, which fails in turn at each of its steps, or at each `stride`-th."""
    old = tree(old_folder)
    model = load_with("plain", "AutoModelForCausalLM", checkpoint, {}, {"dtype": torch.bfloat16})
    return at_each_step(old_folder, partial(save, model), partial(check, old=old, new=new), faults, stride)


def at_each_step(
    old_folder: Path,
    save: Callable[[Path], None],
    check: Callable[[Path], str],
    faults: Sequence[str],
    stride: int = 1,
) -> Counter[str]:
    """What is left of saves into copies of `old_folder`, by processes that fail at each `stride`-th of their steps."""
    found: Counter[str] = Counter()
    for fault in faults:
        step = 0
        while True:
            with tempfile.TemporaryDirectory() as parent:
                folder = Path(shutil.copytree(old_folder, Path(parent) / "saved"))
                child = os.fork()
                if child == 0:
                    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # bars go somewhere
                    for kind in (tqdm, tqdm_auto):  # the lock that processes share dies with one that holds it
                        kind.set_lock(threading.RLock())
                    code = 1
                    try:
                        count = strike(step, fault)
                        save(folder)
                        code = 3 if count() <= step else 0
                    finally:
                        os._exit(code)
                _, status = os.waitpid(child, 0)
                found[f"{fault}: {check(folder)}"] += 1
            if os.waitstatus_to_exitcode(status) == 3:  # the save had ended before
                break
            step += stride
    return found


def save_with_fault(folder: Path, checkpoint: Path, rank: int, step: int, fault: str) -> None:
    model = load_with("streamed", "AutoModelForCausalLM", checkpoint, ds_config(torch.bfloat16), {})
    if dist.get_rank() == rank:
        strike(step, fault)
    save(model, folder)


def trial_of_two_ranks(
    checkpoint: Path, old_folder: Path, new: dict[str, bytes], rank: int, step: int, fault: str
) -> str:
    return one_of_two_fails(old_folder, new, rank, fault, save_with_fault, checkpoint, rank, step, fault)


def one_of_two_fails(old_folder: Path, new: Tree, rank: int, fault: str, save: Callable[..., None], *args: Any) -> str:
    """Two ranks `save` into a copy of `old_folder`, and one fails; the other raises an error of ours, in seconds."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(shutil.copytree(old_folder, Path(parent) / "saved"))
        outcomes = run_ranks_expecting_errors(2, save, folder, *args)
        left = check(folder, tree(old_folder), new)
        other = outcomes[1 - rank]
        if outcomes[rank].error_type is None:
            assert left == "new" and other.error_type is None, other.error_message
            return "the save had ended before"
        assert other.error_type in ("SaveError", "PeerError"), other.error_message
        assert other.seconds < 30
        return f"{fault}: {left}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200, help="trials of two ranks, beside all steps of one")
    arguments = parser.parse_args()
    generator = random.Random(0)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        old, checkpoint, new = make_checkpoints(Path(folder))
        found = trials_of_one_rank(checkpoint, old, new, list(FAULTS))
        print(f"one rank, every step: {sum(found.values())} trials, {dict(found)}", flush=True)
        warm_up()
        counts: Counter[str] = Counter()
        for _ in range(arguments.trials):
            rank, fault = generator.randrange(2), generator.choice(list(FAULTS))
            counts[trial_of_two_ranks(checkpoint, old, new, rank, generator.randrange(40), fault)] += 1
        print(f"two ranks, random steps: {sum(counts.values())} trials, {dict(counts)}")
    print(f"{time.perf_counter() - began:.0f} s; every folder held the old checkpoint or the new one")


if __name__ == "__main__":
    main()
