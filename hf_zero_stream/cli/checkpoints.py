"""Checks of checkpoints for commands that run `from_pretrained` on them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..engine.places import place_of
from ..errors import CheckpointError, UnsupportedError
from ..sources.base import is_url
from ..sources.local import is_on_network
from . import frame


@contextmanager
def loadable(
    path: str, revision: str | None, *, trust_remote_code: bool, dequantize: bool
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The place of a checkpoint that `from_pretrained` can load, and arguments for that; errors inside become ours."""
    with frame.quiet(), place_of(path, revision) as place:
        refuse_unloadable(place)
        from .models import load_arguments, transformers_errors  # only now: this imports transformers and DeepSpeed

        with transformers_errors(path):
            yield place, load_arguments(place, trust_remote_code, dequantize)


def refuse_unloadable(place: str) -> None:
    """Raise an error of ours if `from_pretrained` could not load what is in a folder, or only by running a pickle."""
    if is_url(place):
        return
    if os.path.isfile(place):
        raise CheckpointError(f"{place}: expected the checkpoint's folder, which has a config.json; found a file.")
    from ..checkpoint.formats import contents_of, format_of
    from ..registry import FolderFormat

    found = format_of(place)
    if isinstance(found, FolderFormat):
        if found.refusal:
            raise UnsupportedError(f"{place}: {found.refusal}")
    elif not found.is_always_map:
        contents_of(place)  # raises for what is no map of bytes


def share_reads_advice(place: str = "", nodes: int = 1) -> str:
    """A sentence on `share_reads` where ranks on `nodes` nodes do not read `place` from one page cache; else ""."""
    reasons = {
        f"there are {nodes} nodes": nodes > 1,
        "the checkpoint is on another machine": bool(place) and (is_url(place) or is_on_network(place)),
    }
    because = " and ".join(reason for reason, holds in reasons.items() if holds)
    if not because:
        return ""
    return (
        f"Without ZeRO-3 (stages 0 to 2, DDP) ask for share_reads=True, because {because}: then each rank reads its "
        "part of the checkpoint, not all of it."
    )
