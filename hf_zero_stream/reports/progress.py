"""The progress bar of a load: one per node, in bytes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.utils import are_progress_bars_disabled
from tqdm.auto import tqdm

from ..ranks.launchers import announced_local_rank


__all__ = ["ProgressBar", "progress_bar"]


class ProgressBar:
    """A bar that any thread may advance; without a bar of tqdm's it does nothing."""

    def __init__(self, bar: tqdm | None) -> None:
        self._bar = bar
        self._lock = threading.Lock()

    def update(self, nbytes: int) -> None:
        if self._bar is not None:
            # tqdm's counter is a plain `+=`, which loses updates when threads meet.
            with self._lock:
                self._bar.update(nbytes)


@contextmanager
def progress_bar(total_bytes: int, description: str, enabled: bool) -> Iterator[ProgressBar]:
    """Show a bar inside, and close it at the end, also after an error.

    There is none if `enabled` is false, on every process but the local main one (as the launcher numbers them), and
    wherever the bars of huggingface_hub or transformers are disabled or transformers' verbosity is above WARNING.
    """
    # transformers.utils.logging.disable_progress_bar() disables huggingface_hub's bars too, and its verbosity is the
    # level of its logger: so transformers, which takes seconds to import, is not asked.
    quiet = are_progress_bars_disabled() or logging.getLogger("transformers").getEffectiveLevel() > logging.WARNING
    if quiet or not enabled or announced_local_rank() != 0:
        yield ProgressBar(None)
        return
    with tqdm(total=total_bytes, desc=description, unit="B", unit_scale=True, unit_divisor=1024) as bar:
        yield ProgressBar(bar)
