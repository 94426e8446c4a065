"""The session: data that the seams of one load share; and how a function becomes a seam."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import transformers
from transformers import PreTrainedModel
from transformers.utils import logging

from ..bindings.install import Replacement
from ..engine.load import Load
from ..errors import PACKAGE, VersionError


Original = Callable[..., Any]
"""The function of transformers that a seam is called in place of."""


def in_session(function: Callable[..., Any]) -> Replacement:
    """Have `function` called while this thread streams a load, with its session first; else the original."""

    @functools.wraps(function)
    def inside(original: Original, /, *args: Any, **kwargs: Any) -> Any:
        session = _session.get()
        if session is None or session.stock_reason:
            return original(*args, **kwargs)
        return function(session, original, *args, **kwargs)

    return inside


@contextmanager
def bars_hidden() -> Iterator[None]:
    """Inside, transformers and huggingface_hub show no progress bars."""
    had_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if had_bars:
            logging.enable_progress_bar()


@contextmanager
def without_threads() -> Iterator[None]:
    """Inside, transformers takes tensors one after the other: threads that get lazy ones only cost time."""
    before = os.environ.get(_NO_THREADS)
    os.environ[_NO_THREADS] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_THREADS]
        else:
            os.environ[_NO_THREADS] = before


_NO_THREADS = "HF_DEACTIVATE_ASYNC_LOAD"
"""transformers reads it at each load (``core_model_loading.convert_and_load_state_dict_in_model``)."""

LazyModel = tuple[PreTrainedModel, set[str], set[str]]
"""A model whose loaded tensors are lazy, the names that its checkpoint lacks, and the tied names among them."""


class QuantisedLoad(Protocol):
    """The part of a plug-in in a load with a quantization config. All ranks call the same methods, in this order."""

    def quantizer(self, original: Original, config: Any, quantization_config: Any, *args: Any, **kwargs: Any) -> Any:
        """``get_hf_quantizer``: the quantizer, the config of the model, and the device map."""
        ...

    def leave_to_stock(self, files: Any, load_config: Any) -> None:
        """Set the session's `stock_reason` if transformers shall load the weights, which `files` have, its own way."""
        ...

    def converting(self, hf_quantizer: Any) -> AbstractContextManager[None]:
        """Return a context in which transformers converts lazy tensors by the quantizer."""
        ...

    def pack(self, model: PreTrainedModel, dtype: torch.dtype | None, loading_info: Any) -> None:
        """Turn weights of the lazy `model`, whose values would have `dtype`, into what it shall hold of them."""
        ...


@dataclass(eq=False)
class Session:
    """Data that the seams of one streaming ``from_pretrained`` share. Active inside ``with session:``, in this thread.

    Attributes:
        is_dry: ``from_pretrained`` is called for its lazy model only; :class:`Stopped` ends it there.
        inside: the session whose model is being built, if that model's ``__init__`` makes this ``from_pretrained``.
            Then this session's model stays lazy, and is placed as a part of the other.
        is_quiet: transformers shall not report what the checkpoint lacks: the caller looks at it.
        optional: names that the checkpoint need not have, whatever `strict` says.
        rename: what a name in the checkpoint's files is, before transformers' own renames; None: itself.
        has_nested: whether the model's ``__init__`` called ``from_pretrained``.
        stock_reason: why the load is left to stock; empty while it streams.
        quantised: what a plug-in does for a checkpoint, or a call, with a quantization config; None: there is none.
        knows_config: whether transformers has read the config, and builds the model next.
        while_building: contexts that are left when the model has been built.
        model: the lazy model, once it has been built and transformers loads its weights.
        called: the names of the model's methods that transformers has called, of those that are ours by then.
        lacks: whether its checkpoint lacks parameters or buffers, which transformers initialises.
    """

    load: Load
    is_dry: bool = False
    inside: Session | None = None
    strict: bool = False
    is_quiet: bool = False
    optional: Collection[str] = ()
    rename: Callable[[str], str] | None = None
    has_nested: bool = field(default=False, init=False)
    stock_reason: str = field(default="", init=False)
    quantised: QuantisedLoad | None = field(default=None, init=False)
    knows_config: bool = field(default=False, init=False)
    while_building: ExitStack = field(default_factory=ExitStack, init=False)
    model: PreTrainedModel | None = field(default=None, init=False)
    called: set[str] = field(default_factory=set, init=False)
    lacks: bool = field(default=False, init=False)

    def __enter__(self) -> Session:
        self._token = _session.set(self)
        return self

    def __exit__(self, *exception: object) -> None:
        self.while_building.close()
        _session.reset(self._token)

    def refuse_incomplete(self) -> None:
        """Raise a VersionError if transformers has returned the model without calling what gives it its values."""
        called = {*self.called, *(("_load_pretrained_model",) if self.model is not None else ())}
        needed = ["_load_pretrained_model", "_move_missing_keys_from_meta_to_device"]
        if self.lacks:
            needed.append("_initialize_weights")
        if uncalled := [f"modeling_utils.PreTrainedModel.{name}" for name in needed if name not in called]:
            raise VersionError(
                f"transformers {transformers.__version__} has loaded a model without calling {', '.join(uncalled)}, "
                f"by which {PACKAGE} gives it its values: this version is not known, or another package has put "
                f"functions of its own in their place. Load without streaming(), or install a newer {PACKAGE}."
            )

    @property
    def is_building(self) -> bool:
        return self.knows_config and self.model is None

    @staticmethod
    def current() -> Session | None:
        return _session.get()


_session: ContextVar[Session | None] = ContextVar("hf_zero_stream_session", default=None)


class Stopped(BaseException):
    """Carries the lazy model out of a ``from_pretrained`` that is called for nothing else.

    An exception, because transformers has no hook that returns early, and its next steps (initialise, tie, dispatch to
    devices) need the values. A ``BaseException``, so that no ``except Exception`` of transformers or of a model's code
    catches it.
    """

    def __init__(self, lazy_model: LazyModel) -> None:
        self.lazy_model = lazy_model
