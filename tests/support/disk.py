"""A faulty or slow disk below `LocalFiles`: reads of a shard's bytes go through a function of the test's.

Only here is `os.preadv` replaced. It stands for the tests of `LocalFiles` itself, which must see the system's own
errors and short reads, and for tests with real processes, where all layers above the disk are what is tested. Tests of
what lies above a source use `tests/support/memory_files.py`.
"""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any


Call = Callable[..., Any]
"""Called with the real function, and then with its arguments."""


def replace_reads(read: Call) -> None:
    """Call `read` for each read of this process from now on."""
    os.preadv = partial(read, os.preadv)


@contextmanager
def disk(read: Call, write: Call | None = None) -> Iterator[None]:
    """Inside, `read` is called for each read, and `write` for each write of a shard."""
    real = os.preadv, os.pwritev
    replace_reads(read)
    if write is not None:
        os.pwritev = partial(write, os.pwritev)
    try:
        yield
    finally:
        os.preadv, os.pwritev = real


def failing(number: int, times: float = math.inf) -> Call:
    """Fails with error `number` so many times, and calls the real function from then on."""
    left = [times]

    def call(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if left[0] > 0:
            left[0] -= 1
            raise OSError(number, os.strerror(number))
        return real(*args, **kwargs)

    return call
