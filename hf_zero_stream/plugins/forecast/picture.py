"""Draws the picture of ``plan``: which rank reads what of which shard, and memory by phase and by rank."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import product
from operator import add
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.figure import Figure

from ...plugin_api import LoadPlan, svg_of
from .footprint import DISK, HOST, MemoryFootprint
from .plan import Forecast


_MOST_SHARDS, _MOST_READERS = 40, 8
_COLOURS = {
    "peak": "0.8",
    "partitions": "#4477aa",
    "buffers": "#66ccee",
    "fp32 copies": "#228833",
    "gradients": "#ccbb44",
    "reduce bucket": "#ee6677",
    "hpZ copies": "#aa3377",
    "optimizer states": "#bbbbbb",
    "swap buffers": "#999933",
    "largest gather": "#332288",
}
_PIXELS = 2000
"""Reads are drawn as one if the gap between them is below the largest shard's size divided by this."""
_MIB, _GIB = 2**20, 2**30


def draw(path: Path, forecasts: Sequence[Forecast], device: str, limits: Mapping[str, int]) -> None:
    """Write the picture in the format that the ending of `path` names.

    Args:
        forecasts: one for each rank that is shown; memory by phase is that of the first.
        limits: bytes that a rank may use, by place: "cpu" or `device`.
    """
    _figure(forecasts, device, limits).savefig(path, dpi=120)


def as_svg(forecasts: Sequence[Forecast], device: str, limits: Mapping[str, int]) -> str:
    """The picture of :func:`draw` as an element of a page."""
    return svg_of(_figure(forecasts, device, limits))


def _figure(forecasts: Sequence[Forecast], device: str, limits: Mapping[str, int]) -> Figure:
    ordered = sorted(forecasts, key=lambda forecast: forecast.load.rank)
    plans = [forecast.load for forecast in ordered[:: -(-len(ordered) // _MOST_READERS)]]
    heights = 4 + 0.25 * min(_MOST_SHARDS, len(plans[0].shards)), 1.5 + 0.25 * len(ordered)
    figure = Figure(figsize=(13, sum(heights)), layout="constrained")
    (reads, phases), of_ranks = figure.subplots(2, 2, width_ratios=(2, 1), height_ratios=heights)
    _draw_reads(reads, plans)
    _draw_phases(phases, forecasts[0].memory, device)
    for axes, place in zip(of_ranks, (HOST, device), strict=True):
        if axes is of_ranks[0] or place != HOST:
            _draw_ranks(axes, ordered, place, limits.get(place))
        else:
            axes.remove()
    return figure


def _draw_reads(axes: Any, plans: Sequence[LoadPlan]) -> None:
    shards = plans[0].shards[:_MOST_SHARDS]
    largest = max(shard.size_bytes for shard in shards)
    near, (unit, of_unit) = largest // _PIXELS, ("GiB", _GIB) if largest >= _GIB else ("MiB", _MIB)
    lane = 0.8 / len(plans)
    for number, shard in enumerate(shards):
        top = number - 0.4
        axes.broken_barh(
            [(0, shard.size_bytes / of_unit)], (top, 0.8), facecolors="0.92", edgecolor="0.6", linewidth=0.5
        )
        for place, plan in enumerate(plans):
            spans = [(start / of_unit, (stop - start) / of_unit) for start, stop in _spans(plan, number, near)]
            colour = colormaps["turbo"]((place + 0.5) / len(plans))
            label = f"rank {plan.rank}" if number == 0 else None
            axes.broken_barh(spans, (top + place * lane, lane), facecolors=colour, label=label)
    axes.set_yticks(range(len(shards)), [os.path.basename(shard.path) for shard in shards], fontsize=7)
    axes.invert_yaxis()
    left_out = len(plans[0].shards) - len(shards)
    axes.set_xlabel(f"{unit} of the file" + (f" ({left_out} more shards not shown)" if left_out else ""))
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


def _draw_phases(axes: Any, footprint: MemoryFootprint, device: str) -> None:
    peaks = _peaks(footprint)
    phases = [*peaks, "training"]
    parts = {"peak": peaks}
    held = {**_parts(footprint), "largest gather": {device: footprint.largest_gather}}
    parts |= {part: {"training": places} for part, places in held.items()}
    places = list(dict.fromkeys((device, HOST, DISK)))
    width = 0.8 / len(places)
    bars = list(product(range(len(phases)), range(len(places))))
    middles = [phase - 0.4 + (lane + 0.5) * width for phase, lane in bars]
    tops = [0.0] * len(bars)
    for part, at in parts.items():
        heights = [at.get(phases[phase], {}).get(places[lane], 0) / _GIB for phase, lane in bars]
        if any(heights):
            axes.bar(middles, heights, width * 0.9, bottom=tops, color=_COLOURS[part], label=part)
            tops = list(map(add, tops, heights))
    for middle, top, (_, lane) in zip(middles, tops, bars, strict=True):
        if top:
            axes.text(middle, top, places[lane], ha="center", va="bottom", fontsize=7)
    axes.set_xticks(range(len(phases)), phases)
    axes.set_xlim(-0.5, len(phases) - 0.5)
    axes.set_ylim(0, 1.1 * max(tops))  # with room for the places above the bars
    axes.set_ylabel("GiB of one rank, computed")
    axes.set_title("Memory by phase")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3, fontsize=7)


def _draw_ranks(axes: Any, forecasts: Sequence[Forecast], place: str, limit: int | None) -> None:
    """Draw the memory that each rank holds between steps, and behind it the highest peak."""
    names = [f"rank {forecast.load.rank}" for forecast in forecasts]
    peaks = [max(peak.get(place, 0) for peak in _peaks(forecast.memory).values()) for forecast in forecasts]
    axes.barh(names, [peak / _GIB for peak in peaks], color=_COLOURS["peak"], label="peak")
    ends = [0.0] * len(names)
    for part in _parts(forecasts[0].memory):
        widths = [_parts(forecast.memory)[part].get(place, 0) / _GIB for forecast in forecasts]
        if any(widths):
            axes.barh(names, widths, left=ends, color=_COLOURS[part], label=part)
            ends = list(map(add, ends, widths))
    if limit:
        axes.axvline(limit / _GIB, color="red", label="limit")
    axes.invert_yaxis()
    axes.set_xlabel("GiB")
    axes.set_title("Host memory of each rank" if place == HOST else f"Memory of each rank's device ({place})")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=7)  # beside the bars, of which there may be many


def _peaks(footprint: MemoryFootprint) -> dict[str, Mapping[str, int]]:
    start = {"deepspeed.\ninitialize": footprint.start_peak} if footprint.engine == "deepspeed" else {}
    return {"load": footprint.load_peak, **start, "step": footprint.step_peak}


def _parts(footprint: MemoryFootprint) -> dict[str, Mapping[str, int]]:
    """Return the memory that a rank holds between steps, in bytes by place."""
    return {
        "partitions": footprint.partitions,
        "buffers": footprint.buffers,
        "fp32 copies": footprint.master,
        "gradients": footprint.gradients,
        "reduce bucket": footprint.reduce_bucket,
        "hpZ copies": footprint.secondary,
        "optimizer states": footprint.optimizer_states,
        "swap buffers": {HOST: footprint.swap_buffers},
    }
