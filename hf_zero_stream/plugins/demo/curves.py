"""Draws the picture of ``demo``: memory over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from ...plugin_api import svg_of


_MIB = 2**20

Points = Sequence[Sequence[float]]
"""Points: (seconds since the beginning of the load, growth of anonymous memory in bytes)."""


def memory_as_svg(curves: Mapping[str, Sequence[Points]], partition_bytes: int) -> str:
    """Host memory of loads over time as an element of a page.

    Args:
        curves: by the name of the load, one curve for each rank.
        partition_bytes: what a rank keeps, a dashed line.
    """
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.subplots()
    for (name, of_ranks), colour in zip(curves.items(), ("tab:red", "tab:blue"), strict=True):
        for rank, curve in enumerate(of_ranks):
            times = [when for when, _ in curve if when >= 0]
            growths = [growth / _MIB for when, growth in curve if when >= 0]
            axes.plot(times, growths, color=colour, linestyle=("-", ":")[rank % 2], label=f"{name}, rank {rank}")
            axes.plot(times[-1:], growths[-1:], color=colour, marker="o", markersize=4)
    axes.axhline(partition_bytes / _MIB, color="grey", linestyle="--", linewidth=1, label="what a rank keeps")
    axes.set(xlabel="seconds of from_pretrained", ylabel="host memory, MiB", xlim=(0, None), ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
    return svg_of(figure)
