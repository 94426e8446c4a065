"""What people meet who try a tool on a tiny model: the first and the second `from_pretrained` of a process.

    python -m benchmarks.small                               # 1, 20 and 150 MB; ZeRO-3 on 1 and 2 ranks, plain on 1
    python -m benchmarks.small --megabytes 20 --repeats 9

Each row is a set of new processes, which import torch, transformers' Trainer and, for ZeRO-3, DeepSpeed, and meet,
before anything is timed. What this package imports is timed with the first load, and what transformers imports for the
model too; all of it is compiled to bytecode before, as installed packages are. The exit code is 1 if a median of ours
is above that of stock's load under ZeRO-3.
"""

import argparse
import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import machine
from benchmarks.checkpoints import KINDS, cached_checkpoint
from benchmarks.launch import run, write_figures
from hf_zero_stream.holdings.introspection import is_streamed


ARMS = {1: ("stock", "streaming()", "stock ZeRO-3", "ours ZeRO-3"), 2: ("stock ZeRO-3", "ours ZeRO-3")}
"""By the number of ranks. At one rank, and without ZeRO-3, ``streaming()`` leaves the load to stock."""

LOADS = 3
"""Loads in a process; from the second on, nothing is imported or compiled."""

CONFIG = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}


def measure(arm: str, folder: str) -> list[float]:
    """Seconds of each load in this process, of the slowest rank."""
    from transformers import AutoModelForCausalLM

    kept: Any = None
    if arm.endswith("ZeRO-3"):
        from transformers.integrations import HfDeepSpeedConfig

        kept = HfDeepSpeedConfig(CONFIG)
    seconds = []
    for _ in range(LOADS):
        dist.barrier()
        start = time.perf_counter()
        context: Any = nullcontext()
        if not arm.startswith("stock"):
            from hf_zero_stream import streaming

            context = streaming()
        with context:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        took = torch.tensor(time.perf_counter() - start)
        assert (arm == "ours ZeRO-3") == is_streamed(model)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        seconds.append(took.item())
        del model
    del kept
    return seconds


def rank_main(words: str, result: Path) -> None:
    arm, folder = json.loads(words)
    torch.set_num_threads(1)
    from transformers import Trainer  # noqa: F401 - as in a script that trains; it brings a thousand modules

    if arm.endswith("ZeRO-3"):
        import deepspeed

        deepspeed.init_distributed("gloo")
    else:
        dist.init_process_group("gloo")
    write_figures(result, measure(arm, folder))
    dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare the first loads of small models with stock's.")
    parser.add_argument("--megabytes", type=_numbers, default=[1.0, 20.0, 150.0])
    parser.add_argument("--checkpoint", choices=KINDS, default="dense")
    parser.add_argument("--repeats", type=int, default=5)
    settings = parser.parse_args(arguments)
    folders = {size: str(cached_checkpoint(settings.checkpoint, size / 1e3).folder) for size in settings.megabytes}
    print(machine.in_words(machine.describe(Path(next(iter(folders.values()))))), flush=True)
    arms = ARMS[1]
    print(f"\n| MB | ranks | load | {' | '.join(arms)} | of stock ZeRO-3 | of stock |")
    print(f"|--:|--:|---|{'--:|' * (len(arms) + 2)}", flush=True)
    slower = []
    _in_new_processes("ours ZeRO-3", next(iter(folders.values())), 1)  # writes the bytecode
    for ranks, of_ranks in ARMS.items():
        for size, folder in folders.items():
            found: dict[str, list[list[float]]] = {arm: [] for arm in of_ranks}
            for repeat in range(settings.repeats):
                # In another order each time: what an arm leaves behind meets all others.
                for arm in Random(f"{repeat} {size}").sample(of_ranks, len(of_ranks)):
                    found[arm].append(_in_new_processes(arm, folder, ranks))
            for number, which in ((0, "first"), (1, "second"), (2, "third")):
                seconds = {arm: median(one[number] for one in runs) for arm, runs in found.items()}
                cells = [f"{seconds[arm]:.3f} s" if arm in seconds else "" for arm in arms]
                for other in ("stock ZeRO-3", "stock"):
                    cells.append(f"{seconds['ours ZeRO-3'] / seconds[other]:.2f}" if other in seconds else "")
                print(f"| {size:g} | {ranks} | {which} | {' | '.join(cells)} |", flush=True)
                if seconds["ours ZeRO-3"] > seconds["stock ZeRO-3"]:
                    slower.append(f"{size:g} MB, {ranks} rank(s), {which} load: slower than stock under ZeRO-3")
    print("\n" + ("\n".join(slower) or "No load under ZeRO-3 is slower than stock's."))
    return int(bool(slower))


def _in_new_processes(arm: str, folder: str, ranks: int) -> list[float]:
    words = json.dumps([arm, folder])
    figures: list[Any] = run(words, ranks, 600, module="benchmarks.small", PYTHONDONTWRITEBYTECODE="")
    return figures[0]


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].startswith("["):
        rank_main(sys.argv[1], Path(sys.argv[2]))
    else:
        sys.exit(main())
