"""One situation tried: ours beside stock, each trained, saved, and resumed in new processes; and what differs."""

import math
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.situations.axes import Situation
from tests.situations.drawn import Drawn
from tests.situations.training import first, resumed
from tests.support.cluster import Outcome, RankTimeout, run_ranks_expecting_errors


TIMEOUT_S = 45.0
"""Less than ranks wait for each other, and much more than the steps of a situation take."""

LOOSE = {"fp32": 1e-4, "bf16": 5e-3}
"""How much losses may differ, relatively, where another number of ranks adds in another order."""


@dataclass(frozen=True)
class Finding:
    """One difference from stock.

    Attributes:
        kind: of what; a simpler situation that has the same kind is the same finding.
        text: the difference itself.
    """

    kind: str
    text: str


@dataclass(frozen=True)
class Trial:
    """What was found of a situation, and what stock itself could not do there.

    Attributes:
        stock_failed: what stock itself does not do: its error, or what its resume does not bring back.
        ours_there: what ours did where stock failed.
        refused: our error for what is documented as refused.
    """

    findings: tuple[Finding, ...] = ()
    stock_failed: str = ""
    ours_there: str = ""
    refused: str = ""


def trial(situation: Situation, folder: Path, checkpoints: Path) -> Trial:
    """Try a situation in `folder`, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    stock, ours = folder / "stock", folder / "ours"
    reference = _run(situation, first, "stock", stock, checkpoints)
    if _error(reference):
        failed = f"{reference[0].get('stage')}: {_error(reference)}"
        return _alone(situation, failed, _run(situation, first, "ours", ours, checkpoints), ours, checkpoints)
    found = _run(situation, first, "ours", ours, checkpoints)
    refusal = _refusal(situation, found, ours)
    if refusal:
        return Trial(refused=refusal)
    if _refused_alone(found, ours):
        failed = _stock_fails_to_resume(situation, reference, stock, checkpoints)
        if failed:
            return Trial(stock_failed=failed, ours_there=_error(found), refused=_error(found).partition("\n")[0])
    findings = _errors_of("first", found) or [
        *_of_losses("losses", found, [rank["losses"] for rank in reference]),
        *_of_weights(found[0].get("weights"), reference[0].get("weights")),
        *_of_same_process(situation, found, reference),
    ]
    if findings or situation.follows == "same_process":
        return Trial(findings=tuple(findings))
    again = _run(situation, resumed, "ours", ours, checkpoints, situation.resumed_world_size)
    refusal = _refusal(situation, again, ours / "none")
    if refusal:
        return Trial(refused=refusal)
    problems = _of_resume(situation, again, found, _tail(situation, reference))
    if not problems:
        return Trial()
    # What stock does not restore either, or not there, is no finding of ours.
    if situation.wrapper == "loop":
        return Trial(findings=tuple(problems))
    if any(ours.rglob("training_state*.json")) and situation.resumed_world_size != situation.world_size:
        return Trial(findings=tuple(problems))
    # In their format there is what they save: what they do not restore with as many ranks as before is not in it.
    failed = _stock_fails_to_resume(situation, reference, stock, checkpoints)
    return _beside_a_failure(failed, problems) if failed else Trial(findings=tuple(problems))


def _stock_fails_to_resume(
    situation: Situation, reference: list[dict[str, Any]], folder: Path, checkpoints: Path
) -> str:
    """What stock does not bring back with as many ranks as before, or nothing."""
    tail = [rank["losses"][-2:] for rank in reference]
    if situation.follows == "same_process":
        again = [{"losses": rank["again"]} for rank in reference]
        theirs = _of_losses("losses after a load in the same process", again, tail)
    else:
        theirs = _of_resume(situation, _run(situation, resumed, "stock", folder, checkpoints), reference, tail)
    return f"resume: {theirs[0].text}" if theirs else ""


def _alone(situation: Situation, failed: str, found: list[dict[str, Any]], folder: Path, checkpoints: Path) -> Trial:
    """What ours does where stock has no run to compare with: its resume is compared with what it had itself."""
    errors = _errors_of("first", found)
    if not errors and situation.follows != "same_process":
        world_size = situation.resumed_world_size
        again = _run(situation, resumed, "ours", folder, checkpoints, world_size)
        errors = _of_resume(situation, again, found, _tail(situation, found))
    return _beside_a_failure(failed, errors)


def _beside_a_failure(failed: str, problems: list[Finding]) -> Trial:
    """An error is what stock has, too, or more than its other values; a resume with other values is a finding."""
    silent = tuple(finding for finding in problems if ": error at " not in finding.kind)
    there = "; ".join(f"{finding.kind}: {finding.text.partition(chr(10))[0]}" for finding in problems)
    return Trial(findings=silent, stock_failed=failed, ours_there=there or "trains, saves and resumes")


def _tail(situation: Situation, ranks: list[dict[str, Any]]) -> list[Any]:
    """The losses that a resume must have, for each of its ranks."""
    tail = [rank["losses"][-2:] for rank in ranks]
    return tail if situation.resumed_world_size == len(ranks) else [tail[0]] * situation.resumed_world_size


def _run(
    situation: Situation,
    part: Callable[..., Any],
    arm: str,
    folder: Path,
    checkpoints: Path,
    world_size: int | None = None,
) -> list[dict[str, Any]]:
    world_size = world_size or situation.world_size
    arguments = (situation, arm, folder, checkpoints)
    try:
        outcomes = run_ranks_expecting_errors(world_size, part, *arguments, timeout=TIMEOUT_S)
    except RankTimeout as timeout:
        outcomes = timeout.outcomes
    return [_found(outcome) for outcome in outcomes]


def _found(outcome: Outcome) -> dict[str, Any]:
    if outcome.error_type is None:
        found: dict[str, Any] = outcome.value
        return found
    where = f"{outcome.error_type}: {outcome.error_message}"
    return {"stage": "somewhere", "error": where, "kinds": [outcome.error_type], "traceback": outcome.traceback}


def _error(ranks: list[dict[str, Any]]) -> str:
    return next((rank["error"] for rank in ranks if "error" in rank), "")


def _refusal(situation: Situation, ranks: list[dict[str, Any]], folder: Path) -> str:
    """Our function's refusal: on all ranks, with nothing written; calls of others go on in their own way.

    Unless they have none: DeepSpeed and accelerate resume no optimizer on another number of ranks.
    """
    asked = (
        situation.is_ours
        or situation.weights in ("ours", "ours_shards", "stream")
        or len(ranks) != situation.world_size
    )
    return _error(ranks).partition("\n")[0] if asked and _refused_alone(ranks, folder) else ""


def _refused_alone(ranks: list[dict[str, Any]], folder: Path) -> bool:
    """Whether all ranks have the error of what is documented as refused, and nothing was written."""
    left = list(folder.rglob("training_state*.json")) if folder.exists() else []
    return not left and all("UnsupportedError" in rank.get("kinds", ()) for rank in ranks)


def _errors_of(run: str, ranks: list[dict[str, Any]]) -> list[Finding]:
    # A rank whose connection was closed tells less than the one that closed it.
    order = sorted(enumerate(ranks), key=lambda each: "closed by peer" in each[1].get("error", ""))
    for number, rank in order:
        if "error" in rank:
            kind = f"{run}: error at {rank['stage']}: {rank['kinds'][0]}"
            return [Finding(kind, f"rank {number}: {rank['error']}\n{rank.get('traceback', '')}")]
    return []


def _of_losses(what: str, ranks: list[dict[str, Any]], expected: list[Any], tolerance: float = 0.0) -> list[Finding]:
    def is_same(mine: float, theirs: float) -> bool:
        return math.isclose(mine, theirs, rel_tol=tolerance) or (math.isnan(mine) and math.isnan(theirs))

    for number, (rank, losses) in enumerate(zip(ranks, expected, strict=True)):
        if len(rank["losses"]) != len(losses) or not all(map(is_same, rank["losses"], losses)):
            return [Finding(what, f"rank {number}: {rank['losses']}, stock: {losses}")]
    return []


def _of_weights(ours: dict[str, Any] | None, theirs: dict[str, Any] | None) -> list[Finding]:
    """Names that stock's whole state dict has and a save leaves out must be those of tied tensors."""
    if theirs is None or ours is None:
        return [] if ours == theirs else [Finding("weights", f"ours: {ours and 'some'}, stock: {theirs and 'some'}")]
    # Stock's load under ZeRO-3 does not note which renames it used: its save then writes BERT's names of 2018.
    theirs = {re.sub(r"gamma$", "weight", re.sub(r"beta$", "bias", name)): value for name, value in theirs.items()}
    different = [name for name in ours if ours[name] != theirs.get(name)]
    digests = set(ours.values())
    left_out = [name for name in theirs if name not in ours and theirs[name] not in digests]
    if not different and not left_out:
        return []
    shown = [f"{name}: {ours[name][:2]}, stock: {theirs.get(name, ())[:2]}" for name in different[:2]]
    return [Finding("weights", "; ".join([*shown, *(f"{name} is left out" for name in left_out[:2])]))]


def _of_same_process(situation: Situation, ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> list[Finding]:
    if situation.follows != "same_process":
        return []
    expected = [rank["losses"][-2:] for rank in theirs]
    again = [{"losses": rank["again"]} for rank in ours]
    found = _of_losses("losses after a load in the same process", again, expected)
    if found and all(rank.get("again") == mine["again"] for rank, mine in zip(theirs, ours, strict=True)):
        return []  # stock's load does not restore it either
    return found


def _of_resume(
    situation: Situation, again: list[dict[str, Any]], before: list[dict[str, Any]], tail: list[Any]
) -> list[Finding]:
    errors = _errors_of("resume", again)
    if errors:
        return errors
    same_ranks = len(again) == len(before)
    findings = _of_losses("losses after the resume", again, tail, 0.0 if same_ranks else LOOSE[situation.precision])
    for number, (rank, saved) in enumerate(zip(again, before, strict=False)):
        was, now = saved.get("at the save", {}), rank.get("after the resume", {})
        for what in ("values", "optimizer") if same_ranks else ("values",):
            if was.get(what) != now.get(what):
                text = f"rank {number}: {_difference(was.get(what), now.get(what))}"
                findings.append(Finding(f"{what} after the resume", text))
        if rank.get("extra") and rank["extra"] != {"position": 7, "mean": [1.5, 2.5]}:
            findings.append(Finding("what is registered", f"rank {number}: {rank['extra']}"))
    return findings


def _difference(was: Any, now: Any) -> str:
    if isinstance(was, dict) and isinstance(now, dict):
        names = [name for name in {**was, **now} if was.get(name) != now.get(name)]
        return "; ".join(f"{name}: {now.get(name)}, was {was.get(name)}" for name in names[:4])
    pairs = [f"{new}, was {old}" for old, new in zip(was or [], now or [], strict=False) if old != new]
    return "; ".join(pairs[:3])[:900] or f"{len(now or [])} entries, were {len(was or [])}"


def shrunk(situation: Drawn, kinds: set[str], try_one: Callable[[Any], Trial]) -> Drawn:
    """The simplest situation that still has a finding of these kinds, one axis at a time."""
    for candidate in situation.simpler():
        if kinds & {finding.kind for finding in try_one(candidate).findings}:
            return shrunk(candidate, kinds, try_one)
    return situation
