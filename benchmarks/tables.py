"""How results are shown: tables for the terminal, and a bar chart."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


Entry = dict[str, Any]
HEADINGS = (
    "of ours",
    "of raw",
    "seconds",
    "again",
    "range",
    "cpu s",
    "kept",
    "anonymous",
    "resident",
    "read()",
    "storage",
)


def print_tables(summary: list[Entry], console: Console) -> None:
    """Print one table for each world size and cache state."""
    for (world_size, cache), entries in _groups(summary).items():
        table = Table(title=f"{world_size} rank{'s' * (world_size > 1)}, page cache {cache}", title_justify="left")
        table.add_column("arm")
        for heading in HEADINGS:
            table.add_column(heading, justify="right", no_wrap=True)
        for entry in entries:
            table.add_row(entry["arm"], *_cells(entry))
        console.print(table)
    console.print(
        "seconds, cpu s: slowest rank and all its threads, of the first load of a process, with imports; medians over "
        "repeats. again: a second load. kept: partition, or tensors read. "
        "anonymous, resident: growth at the peak, resident with mapped files. read(): bytes through read calls. "
        "storage: bytes fetched from the device. MiB of the rank with most.",
        style="dim",
    )


def _cells(entry: Entry) -> list[str]:
    if not entry["runs"]:
        return ["-", "-", "failed", *[""] * (len(HEADINGS) - 3)]
    seconds = entry["seconds"]
    return [
        _factor(entry["ratio_to_ours"]),
        _factor(entry["ratio_to_raw"]),
        f"{seconds['median']:.2f}",
        "" if entry["seconds_again"] is None else f"{entry['seconds_again']:.2f}",
        f"{seconds['min']:.2f} - {seconds['max']:.2f}",
        f"{entry['cpu_seconds']['median']:.2f}",
        *(
            _mebibytes(entry[key])
            for key in (
                "owned_bytes",
                "anonymous_growth_bytes",
                "resident_growth_bytes",
                "rchar_bytes",
                "storage_read_bytes",
            )
        ),
    ]


def _factor(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}x" if value < 10 else f"{value:.1f}x"


def _mebibytes(values: list[int] | None) -> str:
    return "-" if values is None else f"{max(values) / 2**20:.0f}"


def _groups(summary: list[Entry]) -> dict[tuple[int, str], list[Entry]]:
    groups: dict[tuple[int, str], list[Entry]] = {}
    for entry in summary:
        groups.setdefault((entry["world_size"], entry["cache"]), []).append(entry)
    return groups


def save_plot(summary: list[Entry], title: str, path: Path) -> None:
    """Draw medians as bars and ranges as whiskers, on a logarithmic scale; one panel per world size and cache state.

    Raises:
        SystemExit: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit("--plot needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    groups = _groups([entry for entry in summary if entry["runs"]])
    figure, panels = pyplot.subplots(
        1, len(groups), figsize=(1 + 4 * len(groups), 4.2), sharey=True, squeeze=False, layout="constrained"
    )
    for panel, ((world_size, cache), entries) in zip(panels[0], groups.items()):
        medians = [entry["seconds"]["median"] for entry in entries]
        whiskers = [
            [entry["seconds"]["median"] - entry["seconds"]["min"] for entry in entries],
            [entry["seconds"]["max"] - entry["seconds"]["median"] for entry in entries],
        ]
        colours = ["tab:orange" if entry["arm"] == "ours" else "tab:gray" for entry in entries]
        bars = panel.bar([entry["arm"] for entry in entries], medians, yerr=whiskers, capsize=4, color=colours)
        panel.bar_label(bars, [f"{value:.2g} s" for value in medians], padding=3)
        panel.set_yscale("log")
        panel.margins(y=0.2)
        panel.set_title(f"{world_size} rank{'s' * (world_size > 1)}, cache {cache}")
        panel.tick_params(axis="x", rotation=30)
    panels[0][0].set_ylabel("seconds, slowest rank")
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
