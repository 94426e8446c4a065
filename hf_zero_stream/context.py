"""``streaming()``: the context inside which loads, saves and training states are ours."""

from __future__ import annotations

import threading
from typing import TypeVar

from . import scope
from .config import StreamingConfig, check_environment
from .errors import ConfigError
from .imports import Watch
from .patching import Patches
from .seams import entrances


__all__ = ["enter_for_process", "streaming"]

Function = TypeVar("Function")


class streaming:  # noqa: N801 - used like a function
    """Inside, every ``from_pretrained`` under ZeRO-3 streams its checkpoint straight into partitions.

    Saves stream too: ``model.save_pretrained``, the Trainer's ``save_model`` and accelerate's ways to save a ZeRO
    model. Each rank writes its own bytes, and nothing is gathered (see :func:`hf_zero_stream.save_pretrained`).
    Without ZeRO-3 several ranks share the reading if all of them make the call (see
    :attr:`StreamingConfig.share_reads`); with one rank, calls are exactly transformers' own. If accelerate is going to
    shard the model by FSDP2, each rank reads its shards later, in ``accelerator.prepare()``, also outside the block.

    It is a context manager, and a decorator of any function or method. It may be nested and re-entered, and always
    restores transformers. The body of an ``async def`` is inside as long as it runs, with the tasks and threads that
    it awaits. The body of a generator is inside; the code that consumes the generator is not.

    Args:
        config: our settings; default: those of the ``streaming(config)`` around it, else from the environment and from
            the section ``"hf_zero_stream"`` of the DeepSpeed config (see :meth:`StreamingConfig.resolve`).

    Raises:
        ConfigError: `config`, or a setting in the environment, has a value that is not allowed.

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
        if self.config is None and scope.current_config() is None:
            check_environment()
        _replaced.__enter__()
        self._open.append(scope.enter(self.config))
        return self

    def __exit__(self, *exception: object) -> None:
        scope.leave(self._open)
        _replaced.__exit__()

    def __call__(self, function: Function) -> Function:
        inside: Function = scope.decorated(function, lambda: streaming(self.config), "streaming()")
        return inside


def enter_for_process() -> None:
    """Begin a ``streaming()`` block for all threads, which nothing ends; later calls patch what came since.

    Its settings are those of the environment and of the DeepSpeed config.
    """
    check_environment()
    if scope.enter_for_process():
        _replaced.__enter__()
    else:
        _replaced.renew()


class _Replaced:
    """What is replaced in other libraries while a thread is inside: the entrances; once they are used, everything."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finaliser may leave from inside the garbage collector
        self._users = 0
        self._entered: list[Patches] = []
        self._is_open = False
        self._watch = Watch(entrances.WATCHED, lambda module: entrances.patch_imported())

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._watch.__enter__()
            try:
                self._add(entrances.patches)
                self.renew()
            except BaseException:
                self.__exit__()
                raise

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                self._watch.__exit__()
            while not self._users and self._entered:
                self._entered.pop().__exit__()

    def renew(self) -> None:
        """Replace also in modules that have been imported since, if they are inside already."""
        entrances.patch_imported()
        if self._is_open or entrances.must_open():
            self.open()

    def open(self) -> None:
        """Replace everything, for as long as a thread is inside."""
        with self._lock:
            if not self._users:
                return
            from .loading import integration
            from .ranks.presence import make_contact
            from .saving import hooks
            from .state import hooks as state

            make_contact()
            for patches in (integration.patches, hooks.patches, state.patches):
                self._add(patches)
            hooks.replace_trainer()
            state.replace_imported()
            self._is_open = True

    def _add(self, patches: Patches) -> None:
        if patches not in self._entered:
            patches.__enter__()
            self._entered.append(patches)


_replaced = _Replaced()
entrances.on_opening(_replaced.open)
