"""The progress bar of a load or of a save: one per node, in bytes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from huggingface_hub.utils import are_progress_bars_disabled
from tqdm.auto import tqdm

from ..ranks.topology import announced_local_rank


__all__ = ["progress_bar"]


@contextmanager
def progress_bar(total_bytes: int, description: str, enabled: bool) -> Iterator[Callable[[int], None]]:
    """Show a bar inside, and close it at the end, also after an error; gives what any thread may advance it with.

    It is not shown if `enabled` is false, on every process but the local main one (as the launcher numbers them), and
    wherever the bars of huggingface_hub or transformers are disabled or transformers' verbosity is above WARNING.
    """
    # transformers.utils.logging.disable_progress_bar() disables huggingface_hub's bars too, and its verbosity is the
    # level of its logger: so transformers, which takes seconds to import, is not asked.
    quiet = are_progress_bars_disabled() or logging.getLogger("transformers").getEffectiveLevel() > logging.WARNING
    hidden = quiet or not enabled or announced_local_rank() != 0
    lock = threading.Lock()
    with tqdm(
        total=total_bytes, desc=description, unit="B", unit_scale=True, unit_divisor=1024, disable=hidden
    ) as bar:

        def advance(nbytes: int) -> None:
            with lock:  # tqdm's counter is a plain `+=`, which loses updates when threads meet
                bar.update(nbytes)

        yield advance
