"""From runs to figures: medians, ranges and ratios, as plain data."""

from collections.abc import Iterable
from statistics import median
from typing import Any


Run = dict[str, Any]
"""One run of one arm: arm, world_size, cache, repeat, and either ranks (their figures) or error."""


def seconds_of(run: Run) -> float:
    """A load takes as long as its slowest rank."""
    return max(rank["seconds"] for rank in run["ranks"])


def summarise(runs: Iterable[Run]) -> list[dict[str, Any]]:
    """One entry for each arm, world size and cache state, in the order in which they first ran.

    Ratios are medians over repeats of the ratio within a repeat, so that a machine that gets slower from one repeat to
    the next does not shift them.
    """
    groups: dict[tuple[int, str], dict[str, list[Run]]] = {}
    for run in runs:
        groups.setdefault((run["world_size"], run["cache"]), {}).setdefault(run["arm"], []).append(run)
    return [
        {"arm": arm, "world_size": world_size, "cache": cache, **_figures(arm_runs, arms)}
        for (world_size, cache), arms in groups.items()
        for arm, arm_runs in arms.items()
    ]


def _figures(runs: list[Run], arms: dict[str, list[Run]]) -> dict[str, Any]:
    done = [run for run in runs if "ranks" in run]
    if not done:
        return {"runs": 0, "error": runs[0]["error"]}
    seconds = [seconds_of(run) for run in done]
    cpu_seconds = [max(rank["cpu_seconds"] for rank in run["ranks"]) for run in done]
    ranks = [rank for run in done for rank in run["ranks"]]
    return {
        "runs": len(done),
        "failed_runs": len(runs) - len(done),
        "seconds": {"median": median(seconds), "min": min(seconds), "max": max(seconds)},
        "seconds_again": _again(done),
        "cpu_seconds": {"median": median(cpu_seconds), "min": min(cpu_seconds), "max": max(cpu_seconds)},
        "ratio_to_ours": _ratio(done, arms.get("ours", [])),
        "ratio_to_raw": _ratio(done, arms.get("raw", [])),
        "owned_bytes": _by_rank(ranks, "owned_bytes"),
        "anonymous_growth_bytes": _by_rank(ranks, "anonymous_growth_bytes"),
        "resident_growth_bytes": _by_rank(ranks, "resident_growth_bytes"),
        "rchar_bytes": _by_rank(ranks, "rchar_bytes"),
        "storage_read_bytes": _by_rank(ranks, "storage_read_bytes"),
    }


def _again(runs: list[Run]) -> float | None:
    """The median of second loads in the same processes."""
    seconds = [
        max(rank["seconds_again"] for rank in run["ranks"]) for run in runs if "seconds_again" in run["ranks"][0]
    ]
    return median(seconds) if seconds else None


def _ratio(runs: list[Run], others: list[Run]) -> float | None:
    other = {run["repeat"]: seconds_of(run) for run in others if "ranks" in run}
    ratios = [seconds_of(run) / other[run["repeat"]] for run in runs if run["repeat"] in other]
    return median(ratios) if ratios else None


def _by_rank(ranks: list[dict[str, Any]], key: str) -> list[float] | None:
    """The largest value of each rank over repeats, or None if it is not known."""
    values: dict[int, list[float]] = {}
    for rank in ranks:
        if rank[key] is None:
            return None
        values.setdefault(rank["rank"], []).append(rank[key])
    return [max(values[rank]) for rank in sorted(values)]


def same_bits(runs: Iterable[Run]) -> bool | None:
    """Whether all runs of arms that make a model ended with the same bits on every rank; None if only one did."""
    digests: dict[int, dict[str, set[tuple[str, ...]]]] = {}
    for run in runs:
        if "ranks" in run and "digest" in run["ranks"][0]:
            found = digests.setdefault(run["world_size"], {}).setdefault(run["arm"], set())
            found.add(tuple(rank["digest"] for rank in run["ranks"]))
    if not any(len(arms) > 1 for arms in digests.values()):
        return None
    return all(len(set().union(*arms.values())) == 1 for arms in digests.values())
