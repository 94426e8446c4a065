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


__all__ = ["REPLACEMENTS", "Session", "missing_names", "replaces", "seam"]

Function = TypeVar("Function", bound=Callable[..., Any])

REPLACEMENTS: dict[tuple[Any, str], Replacement] = {}
"""(owner, attribute) of transformers -> what is called in its place inside ``streaming()``."""

missing_names: list[str] = []
"""What the installed transformers lacks, of the attributes that every supported version has."""


def replaces(owner: Any, name: str, *, since: str = "") -> Callable[[Function], Function]:
    """Have the decorated function called in place of ``owner.name`` inside ``streaming()``, with the original first.

    If not every supported version of transformers has `name`, `since` is the first that has it; without it, there is
    nothing to replace.
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
    """As :func:`replaces`, but only while a load of this thread streams; its session is the first argument."""

    def register(replacement: Function) -> Function:
        replaces(owner, name, since=since)(functools.partial(_if_streaming, replacement))
        return replacement

    return register


def _if_streaming(replacement: Callable[..., Any], original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    session = _session.get()
    if session is None or session.stock_reason:
        return original(*args, **kwargs)
    return replacement(session, original, *args, **kwargs)


@dataclass(eq=False)
class Session:
    """One ``from_pretrained`` that streams: what its seams share. Active inside ``with session:``, in this thread.

    Attributes:
        load: carries the load out.
        instead_of_placing: see :meth:`run_until_placing`.
        inside: the session whose model is being built, where that model's ``__init__`` calls ``from_pretrained``. Then
            the model of this one stays lazy, and is placed as a part of the other.
        strict: raise if the checkpoint does not fit the model exactly.
        has_nested: whether the model's ``__init__`` called ``from_pretrained``.
        stock_reason: why the load is left to stock; empty while it streams.
        building: whether the model is being built.
        model: the lazy model, once transformers loads its weights.
        placing: places the lazy model's values, once transformers knows which of them are missing.
        spares, chains: what :mod:`.keys` uses again from key to key.
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
        """Call `from_pretrained` as far as its lazy model, and return what :attr:`instead_of_placing` makes of it.

        That is called with the lazy model, with the names that are missing, and with those that are tied.

        Raises:
            UnsupportedError: the load of `path` is one that does not stream.
        """
        try:
            with self:
                from_pretrained()
        except _Stopped as stopped:
            return stopped.result
        reason = self.stock_reason or "transformers loads it in another way"
        raise UnsupportedError(f"{path} cannot be streamed: {reason}.")

    def place(self, missing: set[str], tied: set[str]) -> None:
        """Place the model's values, or do what is done instead of that and end ``from_pretrained`` here."""
        if self.instead_of_placing is not None:
            raise _Stopped(self.instead_of_placing(self.model, missing, tied))
        self.load.place(self.model, missing, tied)

    def nested(self, strict: bool) -> Session | None:
        """A session for a ``from_pretrained`` that is called now, if that happens while the model is built lazily.

        None where it is left to transformers, which outside ZeRO-3 has an error for it.
        """
        lazy = self.load.destination.hides_zero3 or self.instead_of_placing is not None
        if not self.building or self.stock_reason or not (lazy or self.inside is not None):
            return None
        self.has_nested = True
        return Session(self.load, inside=self, strict=strict)

    @staticmethod
    def current() -> Session | None:
        """The session of this thread."""
        return _session.get()


_session: ContextVar[Session | None] = ContextVar("hf_zero_stream_session", default=None)


class _Stopped(BaseException):
    """Carries a result out of a ``from_pretrained`` that was only called for its lazy model.

    An exception, because what transformers would do next (initialise, tie, dispatch to devices) needs the values, and
    it has no hook that returns early. A ``BaseException``, so that no ``except Exception`` between here and the
    caller, in transformers or in a model's own code, takes it for a failure.
    """

    def __init__(self, result: Any) -> None:
        self.result = result
