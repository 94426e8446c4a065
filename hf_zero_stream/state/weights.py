"""Whose the weights are that lie in a folder of training states: no resume reads them, and no save may lose them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ..loading.arguments import MODEL_FILES
from .record import FILE, StateRecord


def mark_as_older(folder: Path, names: Sequence[str]) -> None:
    """Have these files of weights be no newer than the record of the state, which is written next.

    Ranks have written them, whose clocks may differ. A file keeps its time when it is renamed.
    """
    for name in names:
        os.utime(folder / name)


def has_other_weights(folder: Path, name: str) -> bool:
    """Whether a model's files are in `folder` that were not saved with its newest state, which has this `name`.

    So it is for files that somebody has written since then, or has copied.
    """
    if not any((folder / each).exists() for each in MODEL_FILES):
        return False
    record = folder / name / FILE
    if not record.is_file():
        return True
    saved, written = StateRecord.read(record).weights, record.stat().st_mtime_ns
    try:
        return not saved or any((folder / each).stat().st_mtime_ns > written for each in saved)
    except FileNotFoundError:
        return True
