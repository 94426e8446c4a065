"""What the seams of one load share, and how ZeRO-3 is hidden from transformers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel
from transformers.integrations import deepspeed as transformers_deepspeed


if TYPE_CHECKING:
    from ..load import Load


__all__ = ["Session", "Stopped", "other_config", "zero3_config", "zero3_hidden"]


class Session:
    """One ``from_pretrained`` that streams: what its seams share. Active inside ``with session:``, in this thread.

    Args:
        load: carries the load out.
        instead_of_placing: called with the lazy model, and the names that are missing or tied, instead of reading;
            :class:`Stopped` brings out what it returns.
    """

    def __init__(
        self, load: Load, *, instead_of_placing: Callable[[torch.nn.Module, set[str], set[str]], Any] | None = None
    ) -> None:
        self.load = load
        self.instead_of_placing = instead_of_placing
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
        self.load.close()

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
    """Ends a ``from_pretrained`` that was only called for its lazy model."""

    def __init__(self, result: Any) -> None:
        self.result = result


def zero3_config() -> dict[str, Any] | None:
    """The DeepSpeed config in which transformers finds ZeRO-3, or None if it does not."""
    return transformers_deepspeed.deepspeed_config() if transformers_deepspeed.is_deepspeed_zero3_enabled() else None


def other_config() -> dict[str, Any]:
    """The DeepSpeed config of another stage that is alive; empty if there is none."""
    return transformers_deepspeed.deepspeed_config() or {}


# ------------------------------------------------------------------------------------------------ hiding ZeRO-3

_hidden: ContextVar[bool] = ContextVar("hf_zero_stream_hides_zero3", default=False)
_hiding_lock = threading.Lock()


@contextmanager
def zero3_hidden() -> Iterator[None]:
    """transformers, its models included, finds no ZeRO-3 in this thread."""
    token = _hidden.set(True)
    with _hiding_lock:
        reference = transformers_deepspeed._hf_deepspeed_config_weak_ref
        if not isinstance(reference, _HidingReference):
            transformers_deepspeed._hf_deepspeed_config_weak_ref = _HidingReference(reference)
        transformers_deepspeed._hf_deepspeed_config_weak_ref.users += 1
    try:
        yield
    finally:
        _hidden.reset(token)
        with _hiding_lock:
            reference = transformers_deepspeed._hf_deepspeed_config_weak_ref
            if isinstance(reference, _HidingReference):
                reference.users -= 1
                if reference.users == 0:
                    transformers_deepspeed._hf_deepspeed_config_weak_ref = reference.original


class _HidingReference:
    """Stands in for the weak reference to the DeepSpeed config through which transformers detects ZeRO-3.

    All of transformers, model files included, asks this one reference; to a thread that hides ZeRO-3 it answers that
    there is no config.
    """

    def __init__(self, original: Callable[[], Any] | None) -> None:
        self.original = original
        self.users = 0

    def __call__(self) -> Any:
        return None if _hidden.get() or self.original is None else self.original()
