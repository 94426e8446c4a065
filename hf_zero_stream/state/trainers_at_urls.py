"""Checkpoints of the Trainer behind URLs: its ``output_dir`` is one (see :mod:`..saving.mirrors`)."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from ..bindings.install import override_methods
from ..errors import UnsupportedError
from ..ranks.coordinator import meeting
from ..ranks.rendezvous import LOAD, SAVE
from ..saving.mirrors import fetched, mirrored, url_of
from ..saving.pending import after_pending, finish_pending
from ..saving.places import places_at
from ..seams.wrappers import checkpoint_number, trainer_state_in
from ..sources.base import is_url


_LAST = trainer_state_in(Path()).name
"""The Trainer writes it last into a checkpoint, and it is sent last: a checkpoint that has it is complete."""


def save(save_checkpoint: Callable[[], Any], trainer: Any) -> Any:
    """Have a Trainer save a checkpoint below its ``output_dir``, and remove older ones as it would (all ranks)."""
    if trainer.hp_search_backend is not None:
        raise UnsupportedError("hyperparameter_search: its trials are not saved below a URL. Give a local output_dir.")
    url, state = trainer.args.output_dir.rstrip("/"), trainer.state
    with (
        mirrored(url, last=_LAST) as mirror,
        override_methods(trainer, _get_output_dir=lambda trial=None: str(mirror)),
    ):
        result = save_checkpoint()
        with meeting(SAVE, "the name of the best checkpoint") as coordinator:
            best = coordinator.broadcast(lambda: state.best_model_checkpoint)
            state.best_model_checkpoint = best and (url_of(best) or best)
            if coordinator.is_main and best != state.best_model_checkpoint:
                state.save_to_json(str(mirror / f"checkpoint-{state.global_step}" / _LAST))
    with meeting(SAVE, "older checkpoints") as coordinator:
        rotate = partial(_rotate, url, trainer.args.save_total_limit, state.best_model_checkpoint)
        coordinator.run_on_main(partial(after_pending, rotate))
    return result


def fetched_checkpoint(url: str, stack: ExitStack) -> str:
    """A mirror of the checkpoint at `url`, until `stack` closes; and one of the best, which it names (all ranks).

    The Trainer forgets a best checkpoint that is no folder.
    """
    mirror = stack.enter_context(fetched(url))
    if (path := mirror / _LAST).is_file():
        state = json.loads(path.read_bytes())
        if is_url(best := state.get("best_model_checkpoint")):
            place = mirror if best == url.rstrip("/") else stack.enter_context(fetched(best))
            if any(place.iterdir()):
                path.write_text(json.dumps({**state, "best_model_checkpoint": str(place)}), encoding="utf-8")
    return str(mirror)


def newest(url: str) -> str:
    """The newest complete checkpoint below `url` (all ranks)."""
    finish_pending()
    with meeting(LOAD) as coordinator:
        found: list[str] = coordinator.broadcast(lambda: _complete(url.rstrip("/")))
    if not found:
        raise ValueError(f"No valid checkpoint found in output directory ({url})")  # transformers' words
    return found[-1]


def _complete(url: str) -> list[str]:
    """The URLs of complete checkpoints, in the order of their steps."""
    places = places_at(url)
    folders = (name.rstrip("/") for name in places.names(url) if name.endswith("/"))
    numbers = sorted((number, name) for name in folders if (number := checkpoint_number(name)) is not None)
    return [f"{url}/{name}" for _, name in numbers if _LAST in places.names(f"{url}/{name}")]


def _rotate(url: str, limit: int | None, best: str | None) -> None:
    """Remove the oldest checkpoints of ours, as ``rotate_checkpoints`` of transformers does in a folder."""
    if not limit or limit < 0:
        return
    places = places_at(url)
    there = [checkpoint for checkpoint in _complete(url) if places.has_save(checkpoint)]
    protected = {*there[-1:], *({best} & {*there})}
    kept = max(limit, len(protected))
    for checkpoint in [each for each in there if each not in protected][: max(0, len(there) - kept)]:
        places.remove(checkpoint, _LAST)
