"""Several threads that work on one sequence."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextvars import copy_context
from typing import TypeVar

import torch


Item = TypeVar("Item")


def run_in_threads(items: Iterable[Item], work: Callable[[Iterator[Item]], None], threads: int) -> None:
    """Run ``work(iterator)`` in `threads` threads, one of them the caller's; each item comes out of one iterator.

    Once one has failed, the other iterators end, and the first error is raised. No thread runs on when this returns or
    raises, also on Ctrl-C. All have the caller's context variables and grad mode, which torch keeps for each thread.
    """
    pending, lock, failed = iter(items), threading.Lock(), threading.Event()
    errors: list[BaseException] = []
    with_grad = torch.is_grad_enabled()

    def next_items() -> Iterator[Item]:
        while not failed.is_set():
            with lock:
                try:
                    item = next(pending)
                except StopIteration:
                    return
            yield item

    def run(end: threading.Event) -> None:
        try:
            with torch.set_grad_enabled(with_grad):
                work(next_items())
        except BaseException as error:
            errors.append(error)
            failed.set()
        finally:
            end.set()

    begun: list[tuple[threading.Thread, threading.Event]] = []
    try:
        for number in range(1, threads):
            end = threading.Event()
            in_context = copy_context().run
            helper = threading.Thread(target=in_context, args=(run, end), name=f"hf_zero_stream-{number}")
            begun.append((helper, end))
            helper.start()
        run(threading.Event())  # nobody waits for the calling thread
        _wait(begun)
    except BaseException:  # Ctrl-C while starting or waiting, or no more threads to be had
        failed.set()
        _wait(begun)
        raise
    if errors:
        raise errors[0]


def _wait(begun: Iterable[tuple[threading.Thread, threading.Event]]) -> None:
    """Wait until all threads that were started have ended.

    ``join()`` alone, once interrupted by Ctrl-C, takes a thread for ended that runs on (CPython #89437).
    """
    for thread, end in begun:
        while not end.wait(0.1 if thread.ident is None else None):
            if thread.ident is None:
                break
        if end.is_set():
            thread.join()
