"""What is said of each load, save and resume when it ends: a line in the log, and its report in the user's file."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from ..errors import PACKAGE
from ..settings.config import REPORT_VARIABLE, announced_local_rank
from ..settings.log import NOTICE
from ..settings.scope import set_in_context
from .load import LoadReport
from .measures import AnonymousMemory


logger = logging.getLogger(PACKAGE)


@dataclass
class Resuming:
    """This rank's figures of a resume, which is made of several loads; see :class:`..state.load.Resumed`."""

    seconds: float = 0.0
    bytes_read: int = 0
    anonymous_growth_peak: int = 0


_resuming: ContextVar[Resuming | None] = ContextVar("hf_zero_stream_resuming", default=None)


@contextmanager
def resuming() -> Iterator[Resuming]:
    """Inside, loads are parts of a resume: they are not told, and their bars have its name."""
    began = time.perf_counter()
    with AnonymousMemory() as memory, set_in_context(_resuming, Resuming()) as figures:
        yield figures
    figures.seconds, figures.anonymous_growth_peak = time.perf_counter() - began, memory.growth_peak


def note_read(nbytes: int) -> None:
    """Count what a load has read for the resume that it is a part of."""
    if (around := _resuming.get()) is not None:
        around.bytes_read += nbytes


def what_is_loaded() -> str:
    """The name that people read of what a load is filling."""
    return "weights" if _resuming.get() is None else "training state"


def tell_of_stock(model: Any, reason: str) -> None:
    """Give `model`, which stock has loaded inside ``streaming()``, a report that says so; the `reason` may be ""."""
    report = model.streaming_report = LoadReport(world_size=1, ranks=(), stock_reason=reason)
    if announced_local_rank() == 0:
        tell("load", report.summary(), report.to_dict, logging.INFO)


def tell(kind: str, line: str, report: Callable[[], Mapping[str, Any]], level: int = NOTICE) -> None:
    """Say what a "load", "save" or "resume" has done; on the main process of those that have made it.

    What `report` returns, which JSON can hold, is added to the file of `HF_ZERO_STREAM_REPORT` as one line. A file
    that cannot be written is a warning: the training goes on.
    """
    if _resuming.get() is not None:
        return
    logger.log(level, line)
    if path := os.environ.get(REPORT_VARIABLE):
        who = {"kind": kind, "time": time.time(), "host": socket.gethostname(), "process": os.getpid()}
        text = json.dumps({**who, **report()}) + "\n"
        try:
            with open(path, "ab", buffering=0) as file:  # one write at the end: other processes may do the same
                file.write(text.encode())
        except OSError as error:
            logger.warning(f"{REPORT_VARIABLE}: {path}: cannot be written: {error.strerror or error}.")
