"""Cuts this package's frames from tracebacks, and shows an error that another rank has had as one line.

Between a script and transformers lie frames of ours, two for each function that is replaced, and an error is raised
below more of them. On many ranks they would bury the sentence that says what to do. With our logger at level DEBUG
nothing is cut.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, TypeVar, cast

from ..errors import PACKAGE, HfZeroStreamError


logger = logging.getLogger(PACKAGE)

Function = TypeVar("Function", bound=Callable[..., Any])

_OURS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")


def shorten(error: BaseException) -> None:
    """Cut the frames of this package from an `error` that leaves it, and from all that the error was raised from.

    So is the frame that calls this, if it goes on with a mere ``raise``.
    """
    if logger.isEnabledFor(logging.DEBUG):
        return
    for each in _chain(error):
        each.__traceback__ = _without_ours(each.__traceback__)
    if _is_of_another_rank(error) and getattr(sys.excepthook, "func", None) is not _show:
        # Only now: the script must find Python's own hook, and may have put another in its place.
        sys.excepthook = functools.partial(_show, sys.excepthook)


def shortening(function: Function) -> Function:
    """Decorate a function that scripts call, whose errors are to be shortened."""

    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            shorten(error)
            raise

    return cast(Function, inner)


def callers_line() -> str:
    """The line, ``file:number``, that has called this package, perhaps by transformers."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not _is_ours(frame) and _module_of(frame) != "transformers":
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _show(
    shown_by: Callable[..., Any], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Show an uncaught error as `shown_by` does; of one that another rank has had, its sentence alone."""
    if _is_of_another_rank(error):
        error.__cause__, error.__context__, trace = None, None, None
    shown_by(kind, error.with_traceback(trace), trace)


def _is_of_another_rank(error: BaseException) -> bool:
    return isinstance(error, HfZeroStreamError) and error.is_of_another_rank


def _chain(error: BaseException) -> Iterator[BaseException]:
    found, waiting = set[int](), [error]
    while waiting:
        each = waiting.pop()
        if id(each) not in found:
            found.add(id(each))
            yield each
            waiting += [other for other in (each.__cause__, each.__context__) if other is not None]


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    kept, is_cut = [], False
    while trace is not None:
        # Of ours, and what those go through to others of ours.
        is_cut = _is_ours(trace.tb_frame) or (is_cut and _module_of(trace.tb_frame) == "contextlib")
        if not is_cut:
            kept.append(trace)
        trace = trace.tb_next
    for each in reversed(kept):
        trace = TracebackType(trace, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return trace


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_OURS)


def _module_of(frame: FrameType) -> str:
    """The module, or the package that it is in."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
