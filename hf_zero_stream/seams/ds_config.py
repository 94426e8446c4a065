"""The DeepSpeed config that transformers knows of: hiding it from a thread, and adding a model's own for a while.

All of transformers, model files included, asks one weak reference for it. The object that was made last has replaced
all others there, for good: when it is gone, those that live still are not found any more. That is right for a config
which a user makes once, and wrong for one that ``from_pretrained(ds_config=...)`` makes on the way. So from the first
of those on, the reference is one of ours (:class:`_NewestAlive`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from transformers.integrations import HfDeepSpeedConfig
from transformers.integrations import deepspeed as transformers_deepspeed


__all__ = ["ModelsConfig", "other_config", "zero3_config", "zero3_hidden"]

_Reference = Callable[[], Any]
"""A weak reference, or what stands in for one."""

_lock = threading.RLock()  # a finalizer may run inside


def zero3_config(own: ModelsConfig | None = None) -> dict[str, Any] | None:
    """`own`, or the DeepSpeed config that transformers finds, if it is one of ZeRO-3; else None."""
    config = own if own is not None else _found()
    return config.config if config is not None and config.is_zero3() else None


def other_config(own: ModelsConfig | None = None) -> dict[str, Any]:
    """`own`, or the DeepSpeed config that transformers finds, of whatever stage; empty if there is none."""
    config = own if own is not None else _found()
    return {} if config is None else config.config


def _found() -> Any:
    reference = transformers_deepspeed._hf_deepspeed_config_weak_ref
    return None if reference is None else reference()


# ------------------------------------------------------------------------------------------------ a model's own config


class ModelsConfig(HfDeepSpeedConfig):
    """The config of ``from_pretrained(ds_config=...)``: transformers finds it as long as the model keeps it alive.

    Of several, and of those that users make, the newest that is alive counts. ``unset_hf_deepspeed_config()`` unsets
    all of them, and a user's config replaces the user's one before, as always.
    """

    def __init__(self, config: Any) -> None:
        _watch_new_configs()
        try:
            super().__init__(config)
        except BaseException:
            self.withdraw()  # an error's traceback keeps this object alive
            raise

    def withdraw(self) -> None:
        """Have transformers find what it finds without this config."""
        with _lock:
            _set_entries(tuple(entry for entry in _alive_entries() if entry() is not self))

    def __deepcopy__(self, memo: Any) -> ModelsConfig:
        """A copied model needs the config that is known, and not one that is merely equal."""
        return self


class _NewestAlive:
    """Stands in for transformers' weak reference: gives the newest config that is alive.

    Args:
        entries: weak references, the newest last.
    """

    def __init__(self, entries: tuple[_Reference, ...]) -> None:
        self.entries = entries

    def __call__(self) -> Any:
        configs = (entry() for entry in reversed(self.entries))
        return next((config for config in configs if config is not None), None)


_original_set = transformers_deepspeed.set_hf_deepspeed_config


def _watch_new_configs() -> None:
    """From now on, until no model's config is alive, a new config does not make transformers forget those."""
    global _original_set
    with _lock:
        if transformers_deepspeed.set_hf_deepspeed_config is not _set_config:
            _original_set = transformers_deepspeed.set_hf_deepspeed_config
            transformers_deepspeed.set_hf_deepspeed_config = _set_config


def _set_config(config: Any) -> None:
    """In place of transformers' ``set_hf_deepspeed_config``, which every new config object calls."""
    with _lock:
        entries = _alive_entries()
        if not isinstance(config, ModelsConfig):
            # It replaces what the user has set before, but no model's.
            entries = tuple(entry for entry in entries if isinstance(entry(), ModelsConfig))
        _set_entries((*entries, weakref.ref(config)))


def _alive_entries() -> tuple[_Reference, ...]:
    """References to the configs that are alive, the newest last."""
    reference = transformers_deepspeed._hf_deepspeed_config_weak_ref
    if isinstance(reference, _HidingReference):
        reference = reference.original
    entries = reference.entries if isinstance(reference, _NewestAlive) else () if reference is None else (reference,)
    return tuple(entry for entry in entries if entry() is not None)


def _set_entries(entries: tuple[_Reference, ...]) -> None:
    if any(isinstance(entry(), ModelsConfig) for entry in entries):
        reference: _Reference | None = _NewestAlive(entries)
    else:  # all is as if we had never been there
        reference = entries[-1] if entries else None
        if transformers_deepspeed.set_hf_deepspeed_config is _set_config:
            transformers_deepspeed.set_hf_deepspeed_config = _original_set
    present = transformers_deepspeed._hf_deepspeed_config_weak_ref
    if isinstance(present, _HidingReference):
        present.original = reference
    else:
        transformers_deepspeed._hf_deepspeed_config_weak_ref = reference


# ------------------------------------------------------------------------------------------------ hiding ZeRO-3

_hidden: ContextVar[bool] = ContextVar("hf_zero_stream_hides_zero3", default=False)


@contextmanager
def zero3_hidden() -> Iterator[None]:
    """transformers, its models included, finds no ZeRO-3 in this thread."""
    token = _hidden.set(True)
    with _lock:
        reference = transformers_deepspeed._hf_deepspeed_config_weak_ref
        if not isinstance(reference, _HidingReference):
            transformers_deepspeed._hf_deepspeed_config_weak_ref = _HidingReference(reference)
        transformers_deepspeed._hf_deepspeed_config_weak_ref.users += 1
    try:
        yield
    finally:
        _hidden.reset(token)
        with _lock:
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

    def __init__(self, original: _Reference | None) -> None:
        self.original = original
        self.users = 0

    def __call__(self) -> Any:
        return None if _hidden.get() or self.original is None else self.original()
