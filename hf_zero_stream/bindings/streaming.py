"""``streaming()``: the context inside which loads, saves and training states are ours."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from ..errors import PACKAGE, ConfigError
from ..settings import scope
from ..settings.config import (
    DISABLE,
    StreamingConfig,
    announced_local_rank,
    announces_local_rank,
    check_environment,
    is_disabled,
    with_settings,
)
from ..settings.log import NOTICE, follow_levels
from .install import PatchScope, shorten
from .table import REACHED, installed


Function = TypeVar("Function")

logger = logging.getLogger(PACKAGE)

_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables without which DeepSpeed asks MPI."""


def _signature() -> inspect.Signature:
    """The settings by their names, for whoever asks at run time what `streaming` takes."""
    config = inspect.Parameter("config", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
    return inspect.Signature([config, *inspect.signature(StreamingConfig).parameters.values()])


class streaming:  # noqa: N801 - used like a function
    """Stream the checkpoint of every ``from_pretrained`` under ZeRO-3 straight into partitions, inside the block.

    Saves stream too: ``model.save_pretrained``, the Trainer's ``save_model`` and accelerate's ways to save a ZeRO
    model. Each rank writes its own bytes, and nothing is gathered (see :func:`hf_zero_stream.save_pretrained`).
    Without ZeRO-3 several ranks share the reading if all of them make the call (see
    :attr:`StreamingConfig.share_reads`); with one rank, calls are exactly transformers' own. If accelerate is going to
    shard the model by FSDP2, or DeepSpeed's AutoTP cut it, each rank reads its part later, in
    ``accelerator.prepare()`` or ``deepspeed.initialize()``, also outside the block.

    Ranks make contact when they enter it, or as soon as there is a process group. So enter it early: a rank that comes
    to a load minutes later is waited for, and one that dies is named.

    It is a context manager, and a decorator of any function or method. It may be nested and re-entered, and always
    restores transformers. The body of an ``async def`` is inside as long as it runs, with the tasks and threads that
    it awaits. The body of a generator is inside; the code that consumes the generator is not.

    Args:
        config: our settings; default: those of the ``streaming(config)`` around it, else from the environment and from
            the section ``"hf_zero_stream"`` of the DeepSpeed config.
        settings: fields of :class:`StreamingConfig`, in place of those of `config` or of the defaults:
            ``streaming(verify="full")`` is ``streaming(StreamingConfig(verify="full"))``.

    Raises:
        ConfigError: a setting, given or in the environment, is not known or has a value that is not allowed.

    Examples:
        >>> with hf_zero_stream.streaming():
        ...     model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-30B-A3B", dtype="auto")
    """

    __signature__ = _signature()

    def __init__(self, config: StreamingConfig | None = None, **settings: Any) -> None:
        if config is not None and not isinstance(config, StreamingConfig):
            raise ConfigError(
                f"streaming(config): expected a StreamingConfig; got {config!r}. A decorator is written @streaming()."
            )
        self.config = with_settings(config, settings) if settings else config
        self._open: list[scope.Block] = []

    def __enter__(self) -> streaming:
        if is_off():
            return self
        follow_levels()
        if self.config is None and scope.current_config() is None:
            check_environment()
        _make_contact()
        installed(PatchScope.BLOCK).__enter__()
        self._open.append(scope.enter(self.config))
        return self

    def __exit__(self, kind: Any = None, error: BaseException | None = None, trace: Any = None) -> None:
        if not self._open and is_disabled():
            return
        if error is not None:
            shorten(error)
        scope.leave(self._open)
        installed(PatchScope.BLOCK).__exit__()

    def __call__(self, function: Function) -> Function:
        inside: Function = scope.decorated(function, lambda: streaming(self.config), "streaming()")
        return inside


def enter_for_process() -> None:
    """Begin a ``streaming()`` block for all threads, which nothing ends.

    Its settings are those of the environment and of the DeepSpeed config. It imports only modules of this package:
    functions of other libraries are replaced when those are imported.
    """
    if is_off():
        return
    follow_levels()
    check_environment()
    _make_contact()
    if scope.enter_for_process():
        installed(PatchScope.BLOCK).__enter__()


def is_off() -> bool:
    """Whether blocks leave everything to stock, which the first one says."""
    if is_disabled() and announced_local_rank() == 0:
        _say_off()
    return is_disabled()


@functools.cache  # once
def _say_off() -> None:
    follow_levels()
    logger.log(NOTICE, "%s is set: loads and saves are left to transformers, DeepSpeed and accelerate.", DISABLE)


def enter_with_ranks() -> None:
    """Begin the block of the process if it is one of several ranks, else as soon as it has a process group.

    A launcher's own process, or one that prepares data, never has.
    """
    if announces_local_rank() or _has_group():
        enter_for_process()
    else:
        installed(REACHED).__enter__()


def enter_with_group(original: Callable[..., Any], group: Any) -> None:
    """Replace the function by which torch notes its default process group, in a process that waits for one."""
    original(group)
    if group is not None:
        enter_for_process()


def discover_ranks(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """DeepSpeed's question to MPI, where a launcher's variables are missing; a ConfigError where it has no mpi4py."""
    try:
        return original(*args, **kwargs)
    except ModuleNotFoundError as error:
        if error.name != "mpi4py":
            raise
        missing = [name for name in _LAUNCHER_VARIABLES if name not in os.environ]
        raise ConfigError(
            "DeepSpeed trains on the ranks of a launcher, and none has started this process: "
            f"{', '.join(missing)} are not set. Start it with `torchrun --nproc-per-node N`, `accelerate launch` "
            "or `deepspeed`; one rank is enough. Under mpirun, install mpi4py."
        ) from None


def _has_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _make_contact() -> None:
    """Tell the other ranks where this one runs, if it has come to have any; and count steps from now on."""
    if "torch.optim.optimizer" in sys.modules:
        from . import history  # noqa: F401
    if "torch.distributed.distributed_c10d" in sys.modules:
        from ..ranks.presence import make_contact

        make_contact()
