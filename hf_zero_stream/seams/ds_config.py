"""Hides transformers' DeepSpeed config from a thread, and adds a model's own config for as long as the model lives.

All of transformers, model files included, finds the config by one module attribute: a weak reference to the config
object that was made last. Older ones are not found again once it is gone. That is right for a config that a user makes
once, and wrong for one that ``from_pretrained(ds_config=...)`` makes. So while a model has a config of its own, or a
thread hides ZeRO-3, a :class:`_ConfigReference` replaces the weak reference.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from transformers.integrations import HfDeepSpeedConfig
from transformers.integrations import deepspeed as transformers_deepspeed

from ..bindings.table import installed
from ..registry import PatchScope
from ..settings.config import StreamingConfig
from ..settings.scope import current_config, set_in_context


_lock = threading.RLock()  # reentrant: the garbage collector may run a finaliser inside that takes it again


def settings_in_force() -> StreamingConfig:
    """Our settings for a call that is given none: of the block around it, the environment, DeepSpeed's config."""
    return StreamingConfig.resolve(current_config(), active_config()[0])


def active_config(own: ModelsConfig | None = None) -> tuple[dict[str, Any], bool]:
    """`own`, or the DeepSpeed config that transformers finds, empty if there is none; and whether it is of ZeRO-3."""
    reference = transformers_deepspeed._hf_deepspeed_config_weak_ref
    config = own if own is not None or reference is None else reference()
    return ({}, False) if config is None else (config.config, config.is_zero3())


class ModelsConfig(HfDeepSpeedConfig):
    """The config of ``from_pretrained(ds_config=...)``: transformers finds it as long as the model keeps it alive.

    Among these and the user's configs the newest counts. ``unset_hf_deepspeed_config()`` unsets all of them, and a
    user's config still replaces the user's earlier one.
    """

    def __init__(self, config: Any) -> None:
        try:
            with _lock:
                _patch_setter(True)  # the constructor calls it
                super().__init__(config)
        except BaseException:
            self.withdraw()  # an error's traceback keeps this object alive
            raise

    def withdraw(self) -> None:
        """Take this config back, so that transformers no longer finds it."""
        _update_reference(keep=lambda config: config is not self)

    def __deepcopy__(self, memo: Any) -> ModelsConfig:
        """Return the same object: a copied model needs the config that transformers finds, not an equal one."""
        return self


def _set_config(config: Any) -> None:
    """Replace transformers' ``set_hf_deepspeed_config``, which every new config object calls."""
    # A user's config replaces the user's earlier one, but no model's.
    _update_reference(
        keep=lambda other: isinstance(config, ModelsConfig) or isinstance(other, ModelsConfig), new=config
    )


_hidden: ContextVar[bool] = ContextVar("hf_zero_stream_hides_zero3", default=False)


def is_enabled(original: Callable[[], bool]) -> bool:
    """``is_deepspeed_zero3_enabled``; axolotl puts functions in its place that look at no config, and say yes."""
    return not _hidden.get() and original()


@contextmanager
def zero3_hidden() -> Iterator[None]:
    """Inside, transformers and its models find no DeepSpeed config in this thread."""
    _update_reference(hiding=1)
    try:
        with set_in_context(_hidden, True), installed(PatchScope.LOAD):
            yield
    finally:
        _update_reference(hiding=-1)


@dataclass(frozen=True, eq=False)
class _ConfigReference:
    """Replaces transformers' weak reference: returns the newest config that is alive, but None to hiding threads."""

    entries: Sequence[Callable[[], Any]]  # weak references, the newest last
    hiding: int  # how many zero3_hidden() are active, in all threads

    def __call__(self) -> Any:
        if _hidden.get():
            return None
        configs = (entry() for entry in reversed(self.entries))
        return next((config for config in configs if config is not None), None)


def _update_reference(keep: Callable[[Any], bool] = lambda config: True, new: Any = None, hiding: int = 0) -> None:
    """Have transformers find the newest of the configs that it could find and `keep` keeps, or the `new` one."""
    with _lock:
        found = transformers_deepspeed._hf_deepspeed_config_weak_ref
        present = (
            found
            if isinstance(found, _ConfigReference)
            else _ConfigReference([] if found is None else [found], hiding=0)
        )
        entries = [entry for entry in present.entries if (config := entry()) is not None and keep(config)]
        if new is not None:
            entries.append(weakref.ref(new))
        # Not below 0: unset_hf_deepspeed_config() may have removed our reference, and its count, in between.
        hiding = max(0, present.hiding + hiding)
        needs_ours = hiding > 0 or any(isinstance(entry(), ModelsConfig) for entry in entries)
        # A plain weak reference where that gives the same.
        plain = entries[-1] if entries else None
        transformers_deepspeed._hf_deepspeed_config_weak_ref = (
            _ConfigReference(entries, hiding) if needs_ours else plain
        )
        _patch_setter(needs_ours)


_original_set: Callable[[Any], None] | None = None


def _patch_setter(wanted: bool) -> None:
    """Replace transformers' function, by which a new config would replace our reference; or put it back."""
    global _original_set
    found = transformers_deepspeed.set_hf_deepspeed_config
    if wanted and found is not _set_config:
        _original_set = found
        transformers_deepspeed.set_hf_deepspeed_config = _set_config
    elif not wanted and found is _set_config:
        transformers_deepspeed.set_hf_deepspeed_config = _original_set
