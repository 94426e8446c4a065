"""Draws the picture of ``plan --plot``: which rank reads what of which shard, and memory by phase."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import product
from operator import add
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure

from ..footprint.memory import DISK, HOST, MemoryFootprint
from ..loading.dry_load import Forecast
from ..planning.plan import LoadPlan


_MOST_SHARDS = 40
_PIXELS = 2000
"""Reads are drawn as one if the gap between them is below the largest shard's size divided by this."""
_GIB = 2**30


def draw(path: Path, forecasts: Sequence[Forecast], device: str) -> None:
    """Write the picture in the format that the ending of `path` names; memory is that of the first forecast."""
    plans = [forecast.load for forecast in forecasts]
    height = 4 + 0.25 * min(_MOST_SHARDS, len(plans[0].shards))
    figure = Figure(figsize=(13, height), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    _draw_reads(left, plans)
    _draw_memory(right, forecasts[0].memory, device)
    figure.savefig(path, dpi=120)


def _draw_reads(axes: Any, plans: Sequence[LoadPlan]) -> None:
    shards = plans[0].shards[:_MOST_SHARDS]
    near = max(shard.size_bytes for shard in shards) // _PIXELS
    lane = 0.8 / len(plans)
    for number, shard in enumerate(shards):
        top = number - 0.4
        axes.broken_barh([(0, shard.size_bytes)], (top, 0.8), facecolors="0.92", edgecolor="0.6", linewidth=0.5)
        for place, plan in enumerate(plans):
            spans = [(start, stop - start) for start, stop in _spans(plan, number, near)]
            colour = colormaps["turbo"]((place + 0.5) / len(plans))
            label = f"rank {plan.rank}" if number == 0 else None
            axes.broken_barh(spans, (top + place * lane, lane), facecolors=colour, label=label)
    axes.set_yticks(range(len(shards)), [os.path.basename(shard.path) for shard in shards], fontsize=7)
    axes.invert_yaxis()
    left_out = len(plans[0].shards) - len(shards)
    axes.set_xlabel("byte in the file" + (f" ({left_out} more shards not shown)" if left_out else ""))
    axes.set_title(f"Who reads what, {len(plans)} of {plans[0].world_size} ranks")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=4, fontsize=7)


def _spans(plan: LoadPlan, shard: int, near: int) -> list[tuple[int, int]]:
    """Byte ranges of a shard that a rank reads, neighbours joined."""
    spans: list[tuple[int, int]] = []
    for start, stop in sorted((read.start, read.stop) for read in plan if read.shard == shard):
        if spans and start - spans[-1][1] <= near:
            spans[-1] = (spans[-1][0], max(spans[-1][1], stop))
        else:
            spans.append((start, stop))
    return spans


def _draw_memory(axes: Any, footprint: MemoryFootprint, device: str) -> None:
    peaks = {"load": footprint.load_peak}
    if footprint.engine == "deepspeed":
        peaks["deepspeed.\ninitialize"] = footprint.start_peak
    phases = [*peaks, "training", "step"]
    peaks["step"] = footprint.step_peak
    parts: dict[str, Mapping[str, Mapping[str, int]]] = {
        "peak": peaks,
        "partitions": {"training": footprint.partitions},
        "fp32 copies": {"training": footprint.master},
        "gradients": {"training": footprint.gradients},
        "reduce bucket": {"training": footprint.reduce_bucket},
        "optimizer states": {"training": footprint.optimizer_states},
        "largest gather": {"training": {device: footprint.largest_gather}},
    }
    places = list(dict.fromkeys((device, HOST, DISK)))
    width = 0.8 / len(places)
    bars = list(product(range(len(phases)), range(len(places))))
    middles = [phase - 0.4 + (lane + 0.5) * width for phase, lane in bars]
    tops = [0.0] * len(bars)
    for part, at in parts.items():
        heights = [at.get(phases[phase], {}).get(places[lane], 0) / _GIB for phase, lane in bars]
        if any(heights):
            colour = "0.55" if part == "peak" else f"C{len(axes.containers)}"
            axes.bar(middles, heights, width * 0.9, bottom=tops, color=colour, label=part)
            tops = list(map(add, tops, heights))
    for middle, top, (_, lane) in zip(middles, tops, bars, strict=True):
        if top:
            axes.text(middle, top, places[lane], ha="center", va="bottom", fontsize=7)
    axes.set_xticks(range(len(phases)), phases)
    axes.set_xlim(-0.5, len(phases) - 0.5)
    axes.set_ylabel("GiB of one rank, computed")
    axes.set_title("Memory by phase")
    axes.legend(fontsize=7)
