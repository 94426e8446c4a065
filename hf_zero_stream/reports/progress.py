"""The progress bar of a load or of a save, in bytes: one per node, or one in a log file."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import torch.distributed as dist
from huggingface_hub.utils import are_progress_bars_disabled
from tqdm.auto import tqdm

from ..settings.launcher import announced_local_rank


LOG_SECONDS = 10
"""In a log file, the least time between two lines of a bar."""


class _LogLines:
    """A text stream that writes each state of a bar as a line of its own, in place of the one before."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> None:
        if state := text.strip("\r\n "):
            self._file.write(f"{state}\n")

    def flush(self) -> None:
        self._file.flush()


def _log_options() -> dict[str, Any]:
    """What tqdm needs where stderr is neither a terminal nor a notebook's: a few lines, and no carriage returns."""
    in_notebook = any(base.__module__ == "tqdm.notebook" for base in tqdm.__mro__)
    if in_notebook or sys.stderr.isatty():
        return {}
    return {"file": _LogLines(sys.stderr), "mininterval": LOG_SECONDS, "ascii": True, "ncols": 80}


def _has_rank_0_elsewhere() -> bool:
    return dist.is_available() and dist.is_initialized() and int(dist.get_rank()) > 0


@contextmanager
def progress_bar(total_bytes: int, description: str, enabled: bool) -> Iterator[Callable[[int], None]]:
    """Show a bar inside, and close it at the end, also after an error; gives what any thread may advance it with.

    In a log file the bar is a line at the beginning, one every ten seconds, and one at the end, all by rank 0: nodes
    often share the file. Elsewhere the local main process of each node shows it (as the launcher numbers them). It is
    shown only if `enabled` is true, and not if the bars of huggingface_hub or transformers are disabled, or
    transformers' verbosity is above WARNING.
    """
    # transformers.utils.logging.disable_progress_bar() disables huggingface_hub's bars too, and its verbosity is the
    # level of its logger: so transformers, which takes seconds to import, is not asked.
    quiet = are_progress_bars_disabled() or logging.getLogger("transformers").getEffectiveLevel() > logging.WARNING
    in_log = _log_options()
    hidden = quiet or not enabled or announced_local_rank() != 0 or (bool(in_log) and _has_rank_0_elsewhere())
    lock = threading.Lock()
    with tqdm(
        total=total_bytes,
        desc=description,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        disable=hidden,
        **in_log,
    ) as bar:

        def advance(nbytes: int) -> None:
            with lock:  # tqdm's counter is a plain `+=`, which loses updates when threads meet
                bar.update(nbytes)

        yield advance
