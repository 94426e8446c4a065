"""What the seams of one load share."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel


if TYPE_CHECKING:
    from ..loading.load import Load


__all__ = ["Session", "Stopped"]


class Session:
    """One ``from_pretrained`` that streams: what its seams share. Active inside ``with session:``, in this thread.

    Args:
        load: carries the load out.
        instead_of_placing: called with the lazy model, and the names that are missing or tied, instead of reading;
            :class:`Stopped` brings out what it returns.
        inside: the session whose model is being built, where that model's ``__init__`` calls ``from_pretrained``. Then
            the model of this one stays lazy, and is placed as a part of the other.
        strict: raise if the checkpoint does not fit the model exactly.
    """

    def __init__(
        self,
        load: Load,
        *,
        instead_of_placing: Callable[[torch.nn.Module, set[str], set[str]], Any] | None = None,
        inside: Session | None = None,
        strict: bool = False,
    ) -> None:
        self.load = load
        self.instead_of_placing = instead_of_placing
        self.inside = inside
        self.strict = strict
        self.has_nested = False
        """Whether the model's ``__init__`` called ``from_pretrained``."""
        self.stock_reason = ""
        """Why the load is left to stock; empty while it streams."""
        self.building = False
        self.model: PreTrainedModel | None = None
        self.placing: Callable[[], None] | None = None
        self.spares: dict[int, tuple[Any, Any]] = {}
        self.chains: dict[int, Any] = {}

    def __enter__(self) -> Session:
        self._token = _session.set(self)
        return self

    def __exit__(self, *exception: object) -> None:
        _session.reset(self._token)
        if self.inside is None:
            self.load.close()

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

    @staticmethod
    def streaming() -> Session | None:
        """The session of this thread, unless its load was left to stock."""
        session = _session.get()
        return session if session is not None and not session.stock_reason else None


_session: ContextVar[Session | None] = ContextVar("hf_zero_stream_session", default=None)


class Stopped(BaseException):
    """Ends a ``from_pretrained`` that was only called for its lazy model, and brings out a result.

    transformers has no other way out in the middle: after this point it would ask for values. A ``BaseException``, so
    that no ``except Exception`` on the way, of transformers or of a model's own code, takes it for a failure.
    """

    def __init__(self, result: Any) -> None:
        self.result = result
