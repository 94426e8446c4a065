"""Draw the pictures of README.md: who reads what, from `plan`; and memory over time, from a run of the demo.

    python -m benchmarks.pictures                       # docs/who-reads.svg: seconds
    python -m benchmarks.pictures --memory demo.html    # docs/memory.svg, out of a page of the demo's

Which these write, of 3.4 GB:

    python -m benchmarks.moe_checkpoint moe --gigabytes 3.4 --layers 8 --experts 128
    hf-zero-stream demo --on cpu --checkpoint moe --html demo.html
"""

import argparse
import re
from collections.abc import Sequence
from io import StringIO
from itertools import groupby
from pathlib import Path

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.figure import Figure

import hf_zero_stream
from benchmarks.fits import MODELS
from benchmarks.scale import CACHE
from benchmarks.sparse_checkpoint import make_sparse_checkpoint
from hf_zero_stream.planning.plan import LoadPlan
from hf_zero_stream.plugins.forecast.picture import _spans


DOCS = Path(__file__).resolve().parents[1] / "docs"
MODEL, RANKS = "Qwen/Qwen3-30B-A3B", 8
GIB, COLUMN = 2**30, 2**25


def stripes(plans: Sequence[LoadPlan], shard: int) -> dict[int, list[tuple[float, float]]]:
    """By rank: (begin, width) in GiB of what it reads of a shard, in columns of 32 MiB, each of one rank."""
    owners = np.full(-(-plans[0].shards[shard].size_bytes // COLUMN), -1)
    for rank, plan in enumerate(plans):
        for start, stop in _spans(plan, shard, near=0):
            owners[round(start / COLUMN) : round(stop / COLUMN)] = rank
    found: dict[int, list[tuple[float, float]]] = {}
    at = 0
    for rank, columns in groupby(owners.tolist()):
        count = len(list(columns))
        if rank >= 0:
            found.setdefault(rank, []).append((at * COLUMN / GIB, count * COLUMN / GIB))
        at += count
    return found


def who_reads() -> Figure:
    """Of each shard, which rank reads which bytes under ZeRO-3: stock's and ours."""
    folder = str(make_sparse_checkpoint(CACHE / "qwen3-30b-a3b-bf16", MODELS[MODEL]()))
    plans = [hf_zero_stream.plan(folder, world_size=RANKS, rank=rank).load for rank in range(RANKS)]
    sizes = [shard.size_bytes / GIB for shard in plans[0].shards]
    colours = [colormaps["turbo"]((rank + 0.5) / RANKS) for rank in range(RANKS)]
    each = max(plan.cost.bytes_read for plan in plans) / GIB
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    stock, ours = figure.subplots(1, 2, sharex=True, sharey=True)
    for number, size in enumerate(sizes):
        stock.barh(number, size, 0.8, color=colours[0])
        for rank, spans in stripes(plans, number).items():
            ours.broken_barh(spans, (number - 0.4, 0.8), facecolors=colours[rank])
    stock.set_title(f"stock: rank 0 reads {sum(sizes):.0f} GiB, and sends it all to every rank")
    ours.set_title(f"hf_zero_stream: each rank reads its own {each:.1f} GiB")
    for axes in (stock, ours):
        axes.title.set_fontsize(9)
        axes.set_xlabel("GiB of the file")
        axes.spines[["top", "right"]].set_visible(False)
    stock.set_yticks(range(len(sizes)), [Path(shard.path).name for shard in plans[0].shards], fontsize=7)
    stock.invert_yaxis()
    handles = [stock.barh(0, 0, color=colour, label=f"rank {rank}") for rank, colour in enumerate(colours)]
    figure.legend(handles=handles, loc="outside lower center", ncols=RANKS, frameon=False, fontsize=8)
    return figure


def as_svg(figure: Figure) -> str:
    """The same text each time, with words that can be searched."""
    file = StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": MODEL}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the pictures of README.md.")
    parser.add_argument("--memory", type=Path, metavar="PAGE", help="of the demo")
    options = parser.parse_args()
    if options.memory:
        (svg,) = re.findall(r"<svg.*?</svg>", options.memory.read_text(), re.DOTALL)
        svg = re.sub(r"\s*<dc:date>.*?</dc:date>", "", svg)
        (DOCS / "memory.svg").write_text(f'<?xml version="1.0" encoding="utf-8"?>\n{svg}\n')
        return
    (DOCS / "who-reads.svg").write_text(as_svg(who_reads()))


if __name__ == "__main__":
    main()
