"""Draws the picture of the demonstration: host memory over time, stock and streaming."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib


matplotlib.use("svg")

import matplotlib.pyplot as plt  # noqa: E402 - after the choice of what draws


MIB = 2**20
Curve = Sequence[Sequence[float]]
"""Points: (seconds since the beginning of the load, growth of anonymous memory in bytes)."""


def draw(stock: Sequence[Curve], streaming: Sequence[Curve], partition_bytes: int, path: Path) -> None:
    """Write an SVG with one line per loader and rank; `partition_bytes`: what a rank keeps, a dashed line."""
    plt.rcParams["svg.hashsalt"] = "demo"  # the same points give the same file
    figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
    for name, curves, colour in (("stock", stock, "tab:red"), ("streaming", streaming, "tab:blue")):
        for rank, curve in enumerate(curves):
            times = [when for when, _ in curve if when >= 0]
            growths = [growth / MIB for when, growth in curve if when >= 0]
            axes.plot(times, growths, color=colour, linestyle=("-", ":")[rank % 2], label=f"{name}, rank {rank}")
            axes.plot(times[-1:], growths[-1:], color=colour, marker="o", markersize=4)
    axes.axhline(partition_bytes / MIB, color="grey", linestyle="--", linewidth=1, label="what a rank keeps")
    axes.set(xlabel="seconds of from_pretrained", ylabel="host memory, MiB", xlim=(0, None), ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
