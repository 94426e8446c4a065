"""What a sweep found, in lines for the terminal."""

from collections import Counter

from tests.sweep.fixes import EXPECTED_REASONS, UNBUILT
from tests.sweep.run import Sweep


def counts(result: Sweep) -> str:
    """One line for each run."""
    lines = [f"built {len(result.cases)} model types; {len(result.cannot_build)} cannot be built"]
    for run, rows in result.rows.items():
        found = Counter(result.outcome(run, case_id) for case_id in rows)
        parts = ", ".join(f"{found[name]} {name}" for name in ("equal", "different", "failed"))
        refused = f", {found['refused']} refused as by stock" if found["refused"] else ""
        lines.append(f"{' '.join(run)}: {parts}{refused}")
    lines.append("seconds: " + ", ".join(f"{stage} {seconds:g}" for stage, seconds in result.seconds.items()))
    return "\n".join(lines)


def failures(result: Sweep) -> list[str]:
    """A line for each of our rows that is not equal, and for each type that is lost without a reason on record."""
    lines = [
        f"{case_id} cannot be built: {why.splitlines()[0][:300]}. See tests/sweep/fixes.py."
        for case_id, why in result.cannot_build.items()
        if case_id not in UNBUILT and not why.startswith(EXPECTED_REASONS)
    ]
    for (job, destination, dtype), rows in result.rows.items():
        for case_id, row in rows.items() if job == "ours" else ():
            what = row.get("error") or "; ".join(row["differences"][:3])
            if what:
                lines.append(f"{case_id} ({destination} {dtype}): {what.splitlines()[0][:300]}")
    return lines
