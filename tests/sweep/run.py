"""The sweep: make tiny checkpoints, compare on ranks in batches, collect rows."""

import itertools
import json
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.cluster import RankFailure, run_ranks
from tests.sweep.compare import run_batch
from tests.sweep.destinations import Destination


BATCH = 20
LIMIT_S = 90.0

Case = dict[str, Any]
Row = dict[str, Any]
Run = tuple[str, str, str]
"""A job, the name of a destination, and a dtype of `tests.sweep.compare.DTYPES` or two."""


@dataclass
class Sweep:
    """What a sweep found.

    Attributes:
        cases: the checkpoints by id (a model type, or type:class).
        cannot_build: id -> why no checkpoint could be made.
        rows: (job, destination, dtype) -> id -> the row, merged over ranks.
        seconds: wall-clock time of each stage.
    """

    cases: dict[str, Case] = field(default_factory=dict)
    cannot_build: dict[str, str] = field(default_factory=dict)
    rows: dict[Run, dict[str, Row]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def outcome(self, run: Run, case_id: str) -> str:
        """``"equal"``, ``"different"``, ``"failed"``, ``"refused"`` as by stock, or ``""`` if it was not run."""
        row = self.rows.get(run, {}).get(case_id)
        if row is None:
            return ""
        if "error" in row or "refused" in row:
            return "failed" if "error" in row else "refused"
        return "different" if row["differences"] else "equal"

    def to_dict(self) -> dict[str, Any]:
        rows = {" ".join(run): value for run, value in self.rows.items()}
        return {"cases": self.cases, "cannot_build": self.cannot_build, "rows": rows, "seconds": self.seconds}


class _Isolated:
    """Runs jobs over cases so that each case gets a row, whatever another case does to its ranks."""

    def __init__(self, folder: Path, jobs: int, say: Callable[[str], None]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix="rows-", dir=folder))
        self.jobs = jobs
        self.say = say
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def run(
        self, job: str, cases: Sequence[Case], destination: Destination, dtype: str, batch: int = BATCH
    ) -> dict[str, Row]:
        """The row of each case by its id; batches side by side, `self.jobs` at a time."""
        batches = [list(cases[start : start + batch]) for start in range(0, len(cases), batch)]
        rows: dict[str, Row] = {}
        with ThreadPoolExecutor(self.jobs) as pool:
            for done in pool.map(lambda part: self._run_batch(job, part, destination, dtype), batches):
                rows |= done
        return rows

    def _run_batch(self, job: str, cases: list[Case], destination: Destination, dtype: str) -> dict[str, Row]:
        rows: dict[str, Row] = {}
        world_size = destination.world_size
        while cases:
            with self._lock:
                log = self.folder / f"batch-{next(self._numbers)}"
            failure = ""
            try:
                time_limit = 60 + LIMIT_S * len(cases)
                run_ranks(world_size, run_batch, job, cases, log, LIMIT_S, destination, dtype, timeout=time_limit)
            except RankFailure as error:
                stacks = [Path(f"{log}.{rank}.stacks") for rank in range(world_size)]
                failure = "\n".join([str(error), *(path.read_text() for path in stacks if path.exists())])
            done = self._rows_of(log, cases, world_size, failure)
            if not done:
                raise RuntimeError(f"no row came out of a batch: {failure}")
            for case_id, row in done.items():
                what = row.get("error") or "; ".join(row.get("differences", ()))
                if what:
                    self.say(f"{job} {destination.name} {dtype}: {case_id}: {what.splitlines()[0][:160]}")
            rows |= done
            cases = [case for case in cases if case["id"] not in done]
        return rows

    @staticmethod
    def _rows_of(log: Path, cases: list[Case], world_size: int, failure: str) -> dict[str, Row]:
        """The rows that a batch came to, up to and with the case that ended it."""
        rows: dict[str, Row] = {}
        per_rank = [_read_rows(Path(f"{log}.{rank}")) for rank in range(world_size)]
        for case in cases:
            found = [rank_rows[case["id"]] for rank_rows in per_rank if case["id"] in rank_rows]
            complete = len(found) == world_size
            if not complete and not failure:
                break
            rows[case["id"]] = _merged(found, complete, failure)
            if not complete or (failure and "error" in rows[case["id"]]):
                break
        return rows


def _read_rows(path: Path) -> dict[str, Row]:
    if not path.exists():
        return {}
    # The last line may have been cut short by the end of its process.
    return {
        row["id"]: row for row in (json.loads(line) for line in path.read_text().splitlines(True) if line[-1] == "\n")
    }


def _merged(found: list[Row], complete: bool, failure: str) -> Row:
    """One row of every rank's: the first error, and every difference once."""
    row: Row = {}
    for part in found:
        row = {**part, **row}
    errors = [part for part in found if "error" in part]
    if errors:
        row |= {"error": errors[0]["error"], "traceback": errors[0]["traceback"]}
        returned = len(errors) < len(found)
        row["others"] = "return a model" if returned else "" if complete else "hang"
    elif not complete:
        row |= {"error": "the ranks died or hung", "traceback": failure[-6000:]}
    if any("differences" in part for part in found):
        row["differences"] = list(dict.fromkeys(what for part in found for what in part.get("differences", ())))
    return row


def make(
    ids: Sequence[str], dtypes: Sequence[str], folder: Path, jobs: int = 1, say: Callable[[str], None] = print
) -> tuple[dict[str, Case], dict[str, str]]:
    """Make the checkpoints of `ids` under `folder`, or take those that are there.

    Returns the cases by id, and why the others could not be made.
    """
    known_path = folder / f"made-{'-'.join(dtypes)}.json"
    known: dict[str, Row] = json.loads(known_path.read_text()) if known_path.exists() else {}
    known = {case_id: row for case_id, row in known.items() if "plans" in row}
    cases = {case_id: _case(case_id, dtypes, folder) for case_id in ids}
    new = [case for case_id, case in cases.items() if case_id not in known]
    rows = {**known, **_Isolated(folder, jobs, say).run("make", new, Destination("zero3x1"), "fp32")}
    known_path.write_text(json.dumps(rows))
    failed = {id: rows[id].get("cannot_build") or rows[id].get("error") for id in cases}
    made = {id: {**case, **rows[id]} for id, case in cases.items() if not failed[id]}
    return made, {id: why for id, why in failed.items() if why}


def _case(case_id: str, dtypes: Sequence[str], folder: Path) -> Case:
    model_type, _, class_name = case_id.partition(":")
    return {
        "id": case_id,
        "type": model_type,
        "class": class_name or None,
        "dtypes": list(dtypes),
        "folder": str(folder / case_id.replace(":", "-").replace("/", "-")),
    }


def sweep(
    ids: Sequence[str],
    folder: Path,
    *,
    destinations: Sequence[Destination] = (Destination("zero3x2"),),
    dtypes: Sequence[str] = ("fp32",),
    stock: bool = False,
    jobs: int = 1,
    batch: int = BATCH,
    say: Callable[[str], None] = print,
) -> Sweep:
    """Make checkpoints of `ids` and compare them.

    Args:
        ids: model types, each optionally with a class: ``"bert"``, ``"bert:BertModel"``.
        folder: where checkpoints are made, or found if an earlier sweep left them there.
        dtypes: names of `tests.sweep.compare.DTYPES`, or two of them: ``"fp32-bf16"`` loads fp32 files in bf16.
        stock: also see what stock does, in the first dtype, at every destination that gets all models.
        jobs: batches that run side by side.
        batch: models that share the start of their ranks.
        say: called with a line for each thing that is not as it should be.
    """
    result = Sweep()
    with _timed(result, "make"):
        in_files = list(dict.fromkeys(dtype.partition("-")[0] for dtype in dtypes))
        result.cases, result.cannot_build = make(ids, in_files, folder, jobs, say)
    isolated = _Isolated(folder, jobs, say)
    runs: list[tuple[str, Destination, str]] = [("ours", to, dtype) for to in destinations for dtype in dtypes]
    if stock:
        ours_alone = ("files", "drawn", "accelerate")
        compared = [destination for destination in destinations if destination.family not in ours_alone]
        runs += [("stock", destination, dtypes[0]) for destination in compared if destination.every == 1]
    for job, destination, dtype in runs:
        cases = [case for case in result.cases.values() if destination.takes(case)][:: destination.every]
        with _timed(result, f"{job} {destination.name} {dtype}"):
            result.rows[job, destination.name, dtype] = isolated.run(job, cases, destination, dtype, batch)
    return result


class _timed:  # noqa: N801 - used like a function
    def __init__(self, result: Sweep, stage: str) -> None:
        self.result, self.stage = result, stage

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self.result.seconds[self.stage] = round(time.perf_counter() - self.start, 1)
