"""Compare streaming with stock loading, and both with the limits of plain reading.

python -m benchmarks.bench --worlds 1,2 --cache warm,cold --repeats 5 --json results.json --plot results.png

See benchmarks/README.md for what is measured and how.
"""

import argparse
import json
import sys
from datetime import date
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console

from benchmarks import fio, machine
from benchmarks.arms import ARMS, Task, available_arms
from benchmarks.checkpoints import KINDS, Checkpoint, cached_checkpoint
from benchmarks.figures import Run, same_bits, seconds_of, summarise
from benchmarks.launch import ArmFailed, run
from benchmarks.tables import print_tables, save_plot


CACHE_STATES = ("warm", "cold")


def run_all(checkpoint: Checkpoint, settings: argparse.Namespace, console: Console) -> tuple[list[Run], list[float]]:
    """Every arm at every world size and cache state, `repeats` times, each time in another order.

    An arm finds memory in the state in which the one before has left it, so that must not always be the same one.
    Returns the runs, and in how many seconds fio reads the files: once for each repeat, where there are cold reads.
    """
    runs: list[Run] = []
    fio_seconds: list[float] = []
    with_fio = "cold" in settings.cache and fio.is_installed()
    for repeat in range(settings.repeats):
        for world_size in settings.worlds:
            for cache in settings.cache:
                order = Random(f"{repeat} {world_size} {cache}")
                for arm in order.sample(settings.arms, len(settings.arms)):
                    runs.append(_run_one(checkpoint, settings, arm, world_size, cache, repeat))
                    console.print(_progress_line(runs[-1]), style="dim", markup=False, highlight=False)
        if with_fio:
            fio_seconds.append(fio.fio_seconds(checkpoint.shards))
    return sorted(runs, key=lambda run: settings.arms.index(run["arm"])), fio_seconds


def _run_one(
    checkpoint: Checkpoint, settings: argparse.Namespace, arm: str, world_size: int, cache: str, repeat: int
) -> Run:
    task = Task(
        arm, cache, str(checkpoint.folder), checkpoint.auto_class, settings.cast, touches_memory=not settings.untouched
    )
    entry: Run = {"arm": arm, "world_size": world_size, "cache": cache, "repeat": repeat}
    try:
        return {**entry, "ranks": run(task.to_json(), world_size, settings.timeout)}
    except ArmFailed as error:
        return {**entry, "error": str(error)}


def _progress_line(entry: Run) -> str:
    result = f"{seconds_of(entry):.2f} s" if "ranks" in entry else entry["error"]
    ranks = f"{entry['world_size']} rank{'s' * (entry['world_size'] > 1)}"
    return f"{entry['repeat'] + 1}: {entry['arm']}, {ranks}, {entry['cache']}: {result}"


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    installed = available_arms()
    parser = argparse.ArgumentParser(description="Compare streaming with stock loading and with plain reading.")
    parser.add_argument("--checkpoint", choices=KINDS, default="moe")
    parser.add_argument("--gigabytes", type=float, default=3.4, help="size of the checkpoint, in units of 10^9 bytes")
    parser.add_argument("--cast", action="store_true", help="write the checkpoint in fp32 and load it into bf16")
    parser.add_argument("--arms", type=_list_of(ARMS), default=installed, help=f"default: {','.join(installed)}")
    parser.add_argument("--worlds", type=lambda text: [int(part) for part in text.split(",")], default=[2])
    parser.add_argument("--cache", type=_list_of(CACHE_STATES), default=list(CACHE_STATES), help="default: warm,cold")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--untouched", action="store_true", help="time loads without using memory beforehand")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one run, with its imports")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run and the summary")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw a bar chart (needs matplotlib)")
    return parser.parse_args(arguments)


def _list_of(known: Any) -> Any:
    def parse(text: str) -> list[str]:
        parts = text.split(",")
        unknown = [part for part in parts if part not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}; got {', '.join(unknown)}")
        return parts

    return parse


def main(arguments: list[str] | None = None) -> int:
    settings = _parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 119)
    checkpoint = cached_checkpoint(settings.checkpoint, settings.gigabytes, fp32=settings.cast)
    what = f"{settings.checkpoint}, {checkpoint.nbytes / 1e9:.2f} GB in {len(checkpoint.shards)} shards"
    what += ", fp32 to bf16" if settings.cast else ", bf16"
    what += ", memory not touched before" if settings.untouched else ""
    described = machine.describe(checkpoint.folder)
    console.print(f"{what}\n{machine.in_words(described)}", markup=False, highlight=False)

    runs, fio_seconds = run_all(checkpoint, settings, console)
    summary = summarise(runs)
    equal = same_bits(runs)
    print_tables(summary, console)
    if fio_seconds:
        console.print(fio.in_words(fio_seconds, checkpoint.nbytes), markup=False, highlight=False)
    elif "cold" in settings.cache:
        console.print(fio.MISSING, markup=False, highlight=False)
    if equal is not None:
        console.print("stock and ours hold the same bits" if equal else "stock and ours hold DIFFERENT bits")
    if settings.json:
        results = {
            "date": date.today().isoformat(),
            "machine": described,
            "checkpoint": {
                "kind": checkpoint.kind,
                "nbytes": checkpoint.nbytes,
                "shards": len(checkpoint.shards),
                "dtype": checkpoint.dtype,
            },
            "repeats": settings.repeats,
            "touches_memory": not settings.untouched,
            "same_bits": equal,
            "fio_seconds": fio_seconds,
            "summary": summary,
            "runs": runs,
        }
        settings.json.write_text(json.dumps(results, indent=2) + "\n")
    if settings.plot:
        save_plot(summary, what, settings.plot)
    return 1 if equal is False or any("error" in run for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
