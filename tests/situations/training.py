"""What each rank runs of a situation: some steps with a save, or a resume of it in new processes."""

import contextlib
import hashlib
import os
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hf_zero_stream
from tests.situations import by_trainer
from tests.situations.axes import Situation
from tests.situations.observed import optimizer_structure, values_of
from tests.situations.sessions import SESSIONS, Session, announce_home
from tests.support.checkpoint_files import tensors_of


def _scope(arm: str) -> Any:
    os.environ["HF_ZERO_STREAM_SHARE_READS"] = "1"  # outside ZeRO-3 too, loads are ours
    return hf_zero_stream.streaming() if arm == "ours" else contextlib.nullcontext()


def _save(session: Session, folder: Path, found: dict[str, Any]) -> None:
    found["at the save"] = _seen(session)  # before, as a save must change nothing
    found["stage"] = "save of the state"
    session.save(folder / "state")


def _seen(session: Session) -> dict[str, Any]:
    return {"values": values_of(session.model), "optimizer": optimizer_structure(session.optimizer)}


def first(situation: Situation, arm: str, folder: Path, checkpoints: Path) -> dict[str, Any]:
    """Two steps, a save, two more; the error is part of what is found."""
    found: dict[str, Any] = {"stage": "load"}
    with _errors(found), _scope(arm):
        torch.manual_seed(1)
        announce_home(situation, arm)
        if situation.wrapper == "trainer":
            return by_trainer.first(situation, folder, checkpoints, found)
        session = SESSIONS[situation.wrapper](situation, arm, checkpoints)
        found["stage"] = "training"
        if situation.habit == "dropout":
            torch.manual_seed(3)  # what loads draw is tested elsewhere
        losses = [session.step(0)]
        if situation.habit == "new_rate":
            for group in session.optimizer.param_groups:
                group["lr"] *= 0.5
        losses.append(session.step(1))
        _save(session, folder, found)
        if situation.weights != "none":
            found["stage"] = "save of weights"
            found["weights"] = _weights(session, folder / "weights", situation.weights)
        found["stage"] = "training after the save"
        losses += [session.step(step) for step in (2, 3)]
        if situation.follows == "saved_twice":
            if situation.wrapper == "accelerate":
                session.finish()  # before what it writes into is renamed
            if dist.get_rank() == 0 and situation.wrapper == "accelerate":  # which saves into new folders
                (folder / "state").rename(folder / "older")
            dist.barrier()
            _save(session, folder, found)
            losses += [session.step(step) for step in (4, 5)]
        if situation.follows == "same_process" and not (arm == "stock" and situation.wrapper == "loop"):
            found["stage"] = "load in the same process"
            found["extra"] = session.load(folder / "state")
            found["again"] = [session.step(step) for step in (2, 3)]
        session.finish()
        found["losses"] = losses
        found["stage"] = "done"
    return found


def resumed(situation: Situation, arm: str, folder: Path, checkpoints: Path) -> dict[str, Any]:
    """The last two steps, from what `first` has saved."""
    found: dict[str, Any] = {"stage": "load"}
    with _errors(found), _scope(arm):
        torch.manual_seed(2)  # scripts that seed nothing draw other new heads and rows
        announce_home(situation, arm)
        if situation.wrapper == "trainer":
            return by_trainer.resumed(situation, folder, checkpoints, found)
        session = SESSIONS[situation.wrapper](situation, arm, checkpoints)
        found["stage"] = "resume"
        found["extra"] = session.load(folder / "state")
        found["after the resume"] = _seen(session)
        found["stage"] = "training after the resume"
        found["losses"] = [session.step(step) for step in ((4, 5) if situation.follows == "saved_twice" else (2, 3))]
        found["stage"] = "done"
    return found


@contextlib.contextmanager
def _errors(found: dict[str, Any]) -> Any:
    """Put an error into what is found: the ranks' end is the same then."""
    try:
        yield
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
        found["kinds"] = [each.__name__ for each in type(error).__mro__]
        found["traceback"] = traceback.format_exc()[-6000:]


def _weights(session: Session, folder: Path, how: str) -> dict[str, Any] | None:
    """What was saved, as rank 0 reads it back: shape, dtype and digest of each name."""
    values = session.save_weights(folder, how)
    dist.barrier()
    if dist.get_rank():
        return None
    if values is None:
        values = read_weights(folder)
    return {name: described(value) for name, value in values.items()}


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    values = tensors_of(folder)
    for path in folder.glob("*.pt"):
        values |= torch.load(path, weights_only=False)
    return values


def described(value: torch.Tensor) -> tuple[Any, ...]:
    value = value.detach().contiguous()
    return tuple(value.shape), str(value.dtype), hashlib.sha1(value.reshape(-1).view(torch.uint8).numpy()).hexdigest()
