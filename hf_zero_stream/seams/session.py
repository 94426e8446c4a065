"""What the seams of one load share, and how a function becomes a seam."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from ..engine.load import Load
from ..errors import UnsupportedError
from ..patching import Replacement


__all__ = ["REPLACEMENTS", "Original", "Session", "missing_names", "replaces", "seam"]

Original = Callable[..., Any]
"""The function of transformers that a seam is called in place of."""

Function = TypeVar("Function", bound=Callable[..., Any])

REPLACEMENTS: dict[tuple[Any, str], Replacement] = {}
"""(owner, attribute) of transformers -> what is called in its place inside ``streaming()``."""

missing_names: list[str] = []
"""Attributes that every supported version of transformers has, and the installed one lacks."""


def replaces(owner: Any, name: str, *, since: str = "") -> Callable[[Function], Function]:
    """Call the decorated function in place of ``owner.name`` inside ``streaming()``, with the original first.

    `since` is the first version of transformers that has `name`, if not every supported one does.
    """

    def register(replacement: Function) -> Function:
        places = owner.__mro__ if isinstance(owner, type) else [owner]
        place = next((place for place in places if name in getattr(place, "__dict__", ())), None)
        if place is not None:
            REPLACEMENTS[place, name] = replacement
        elif not since:
            missing_names.append(f"{owner.__name__}.{name}")
        return replacement

    return register


def seam(owner: Any, name: str, *, since: str = "") -> Callable[[Function], Function]:
    """As :func:`replaces`, but only while this thread streams a load, whose session is the first argument."""

    def register(replacement: Function) -> Function:
        replaces(owner, name, since=since)(functools.partial(_if_streaming, replacement))
        return replacement

    return register


def _if_streaming(replacement: Callable[..., Any], original: Original, /, *args: Any, **kwargs: Any) -> Any:
    session = _session.get()
    if session is None or session.stock_reason:
        return original(*args, **kwargs)
    return replacement(session, original, *args, **kwargs)


@dataclass(eq=False)
class Session:
    """What the seams of one streaming ``from_pretrained`` share. Active inside ``with session:``, in this thread.

    Attributes:
        instead_of_placing: see :meth:`run_until_placing`.
        inside: the session whose model is being built, if that model's ``__init__`` makes this ``from_pretrained``.
            Then this session's model stays lazy, and is placed as a part of the other.
        strict: raise if the checkpoint does not fit the model exactly.
        has_nested: whether the model's ``__init__`` called ``from_pretrained``.
        stock_reason: why the load is left to stock; empty while it streams.
        building: whether transformers is building the model.
        model: the lazy model, once transformers loads its weights.
        placing: places the lazy model's values, once transformers knows which of them are missing.
        spares, chains: caches of :mod:`.keys`.
    """

    load: Load
    instead_of_placing: Callable[[torch.nn.Module, set[str], set[str]], Any] | None = None
    inside: Session | None = None
    strict: bool = False
    has_nested: bool = field(default=False, init=False)
    stock_reason: str = field(default="", init=False)
    building: bool = field(default=False, init=False)
    model: PreTrainedModel | None = field(default=None, init=False)
    placing: Callable[[], None] | None = field(default=None, init=False)
    spares: dict[int, tuple[Any, Any]] = field(default_factory=dict, init=False)
    chains: dict[int, Any] = field(default_factory=dict, init=False)

    def __enter__(self) -> Session:
        self._token = _session.set(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _session.reset(self._token)
        if self.inside is None:
            self.load.close()

    def run_until_placing(self, path: str, from_pretrained: Callable[[], object]) -> Any:
        """Call `from_pretrained` up to its lazy model, and return what :attr:`instead_of_placing` makes of that.

        It is called with the lazy model, the missing names and the tied names. Raises an UnsupportedError if the load
        of `path` does not stream.
        """
        try:
            with self:
                from_pretrained()
        except _Stopped as stopped:
            return stopped.result
        reason = self.stock_reason or "transformers loads it in another way"
        raise UnsupportedError(f"{path} cannot be streamed: {reason}.")

    def place(self, missing: set[str], tied: set[str]) -> None:
        """Place the model's values; or call :attr:`instead_of_placing`, and end ``from_pretrained`` here."""
        if self.instead_of_placing is not None:
            raise _Stopped(self.instead_of_placing(self.model, missing, tied))
        self.load.place(self.model, missing, tied)

    def nested(self, strict: bool) -> Session | None:
        """The session for a ``from_pretrained`` that is called while this session's model is built lazily.

        None if that call is left to transformers, which outside ZeRO-3 has an error for it.
        """
        lazy = self.load.destination.hides_zero3 or self.instead_of_placing is not None
        if not self.building or self.stock_reason or not (lazy or self.inside is not None):
            return None
        self.has_nested = True
        return Session(self.load, inside=self, strict=strict)

    @staticmethod
    def current() -> Session | None:
        return _session.get()


_session: ContextVar[Session | None] = ContextVar("hf_zero_stream_session", default=None)


class _Stopped(BaseException):
    """Carries a result out of a ``from_pretrained`` that was only called for its lazy model.

    An exception, because transformers has no hook that returns early, and its next steps (initialise, tie, dispatch to
    devices) need the values. A ``BaseException``, so that no ``except Exception`` of transformers or of a model's code
    catches it.
    """

    def __init__(self, result: Any) -> None:
        self.result = result
