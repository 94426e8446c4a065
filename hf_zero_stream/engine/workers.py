"""Several threads that share out a sequence of work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar


__all__ = ["share_out"]

Item = TypeVar("Item")


def share_out(items: Iterable[Item], work: Callable[[Iterator[Item]], None], threads: int) -> None:
    """Run ``work(iterator)`` in `threads` threads, one of them the caller's; each item comes out of one iterator.

    Once one has failed, the other iterators end. No thread runs on when this returns or raises, also on Ctrl-C.

    Raises:
        BaseException: the first error of any thread.
    """
    pending, lock, failed = iter(items), threading.Lock(), threading.Event()
    errors: list[BaseException] = []

    def next_items() -> Iterator[Item]:
        while not failed.is_set():
            with lock:
                try:
                    item = next(pending)
                except StopIteration:
                    return
            yield item

    def run() -> None:
        try:
            work(next_items())
        except BaseException as error:
            errors.append(error)
            failed.set()

    helpers = [threading.Thread(target=run, name=f"hf_zero_stream-{number}") for number in range(1, threads)]
    for thread in helpers:
        thread.start()
    try:
        run()
    finally:
        for thread in helpers:
            thread.join()
    if errors:
        raise errors[0]
