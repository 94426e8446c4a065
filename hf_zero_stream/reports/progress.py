"""The progress bar of a load: one per node, in bytes."""

from __future__ import annotations

import threading
from types import TracebackType

from tqdm.auto import tqdm

from ..ranks.launchers import announced_local_rank


__all__ = ["ProgressBar", "progress_bar"]


class ProgressBar:
    """A context manager around a bar that any thread may advance; closes the bar at its end, also after an error."""

    def __init__(self, bar: tqdm | None) -> None:
        self._bar = bar
        self._lock = threading.Lock()

    def update(self, nbytes: int) -> None:
        """Advances the bar by `nbytes` bytes; does nothing if the bar is silent."""
        if self._bar is not None:
            # tqdm's counter is a plain `+=`, which loses updates when threads meet.
            with self._lock:
                self._bar.update(nbytes)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def progress_bar(total_bytes: int, description: str, enabled: bool) -> ProgressBar:
    """Makes the progress bar of a load.

    It is silent if `enabled` is false, on every process but the local main one (as the launcher numbers them), and
    wherever the bars of huggingface_hub or transformers are disabled or transformers' verbosity is above WARNING.

    Args:
        total_bytes: bytes that this process will read.
        description: text to the left of the bar.
        enabled: `StreamingConfig.progress`.

    Returns:
        A context manager with a thread-safe `update(nbytes)`.
    """
    if not (enabled and announced_local_rank() == 0 and _libraries_allow_bars()):
        return ProgressBar(None)
    return ProgressBar(tqdm(total=total_bytes, desc=description, unit="B", unit_scale=True, unit_divisor=1024))


def _libraries_allow_bars() -> bool:
    # transformers is slow to import, and a bar that is off for another reason does not need it.
    from huggingface_hub.utils import are_progress_bars_disabled
    from transformers.utils import logging

    return (
        not are_progress_bars_disabled()
        and logging.is_progress_bar_enabled()
        and logging.get_verbosity() <= logging.WARNING
    )
