"""``streaming()``: the context inside which loads, saves and training states are ours."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TypeVar

from . import scope
from .config import StreamingConfig
from .errors import ConfigError
from .loading import integration
from .ranks.presence import make_contact
from .saving import calls, hooks
from .state import hooks as state


__all__ = ["enter_for_process", "streaming"]

Function = TypeVar("Function")


class streaming:  # noqa: N801 - used like a function
    """Inside, every ``from_pretrained`` under ZeRO-3 streams its checkpoint straight into partitions.

    When saving, ``model.save_pretrained``, the Trainer's ``save_model`` and accelerate's ways to save a ZeRO model
    write each rank's own bytes, and gather nothing (see :func:`hf_zero_stream.save_pretrained`). Without ZeRO-3
    several ranks share the reading if all of them make the call (see :attr:`StreamingConfig.share_reads`); with one
    rank calls are exactly transformers' own. Where accelerate is going to shard the model by FSDP2, its parameters
    are read in ``accelerator.prepare()``, each rank's own shards; the block may have been left by then.

    A context manager and a decorator of any function or method; may be nested and re-entered, and always restores
    transformers. The body of an ``async def`` is inside as long as it runs, with the tasks and threads that it awaits.
    The body of a generator is inside; what consumes the generator is not.

    Args:
        config: our settings; default: those of the ``streaming(config)`` around it, else from the environment and from
            the section ``"hf_zero_stream"`` of the DeepSpeed config (see :meth:`StreamingConfig.resolve`).

    Example:
        >>> with hf_zero_stream.streaming():
        ...     model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-30B-A3B", dtype="auto")
    """

    def __init__(self, config: StreamingConfig | None = None) -> None:
        if config is not None and not isinstance(config, StreamingConfig):
            raise ConfigError(
                f"streaming(config): expected a StreamingConfig; got {config!r}. A decorator is written @streaming()."
            )
        self.config = config
        self._open: list[scope.Block] = []

    def __enter__(self) -> streaming:
        make_contact()
        _patch()
        self._open.append(scope.enter(self.config))
        return self

    def __exit__(self, *exception: object) -> None:
        scope.leave(self._open)
        for patches in reversed(_PATCHES):
            patches.__exit__()

    def __call__(self, function: Function) -> Function:
        inside: Function = scope.decorated(function, lambda: streaming(self.config), "streaming()")
        return inside


def enter_for_process() -> None:
    """Begin a ``streaming()`` block for all threads, which nothing ends; later calls patch what came since.

    Its settings are those of the environment and of the DeepSpeed config.
    """
    make_contact()
    if scope.enter_for_process():
        _patch()
    else:
        _patch_what_came_late()


def _patch() -> None:
    with ExitStack() as entered:
        for patches in _PATCHES:
            entered.enter_context(patches)
        _patch_what_came_late()
        entered.pop_all()


def _patch_what_came_late() -> None:
    """Patch the Trainer and DeepSpeed's engine if they have been imported."""
    hooks.replace_trainer()
    state.replace_imported()


_PATCHES = (integration.patches, calls.patches, hooks.patches, state.patches)
