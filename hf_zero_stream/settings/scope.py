"""The ``streaming()`` blocks around the running code, their settings, and the decorator that runs functions in one.

A context variable holds the blocks, and each block knows whether it is open. The variable alone cannot tell. A block
may be left in another context than it was entered in: the garbage collector closes an unfinished generator wherever
it runs. And a task keeps a copy of the context that it was made in, also when the block has been left there.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from ..errors import ConfigError
from .config import StreamingConfig


Function = Callable[..., Any]
MakeContext = Callable[[], AbstractContextManager[Any]]


class Closable(Protocol):
    def close(self) -> None: ...


Resource = TypeVar("Resource", bound=Closable)
Value = TypeVar("Value")


@dataclass(eq=False)
class Block:
    """One ``with streaming(config)``; its resources are closed when it is left."""

    config: StreamingConfig | None
    is_open: bool = True
    resources: dict[type, Any] = field(default_factory=dict)


_blocks: ContextVar[tuple[Block, ...]] = ContextVar("hf_zero_stream_blocks", default=())
_process_blocks: list[Block] = []
"""The block of the whole process, around all others, if there is one; every thread is in it."""


def active_configs() -> tuple[StreamingConfig | None, ...]:
    """The settings of the open blocks around the running code, the innermost last."""
    return tuple(block.config for block in (*_process_blocks, *_open_blocks()))


def current_config() -> StreamingConfig | None:
    """The settings of the innermost open block; None without one, or if it has none of its own."""
    return (active_configs() or (None,))[-1]


def enter(config: StreamingConfig | None) -> Block:
    """Begin a block; without a `config` it has that of the block around it."""
    block = Block(current_config() if config is None else config)
    _blocks.set((*_open_blocks(), block))
    return block


def enter_for_process(config: StreamingConfig | None = None) -> bool:
    """Begin a block for all threads, which nothing ends; returns False if there is one already."""
    if _process_blocks:
        return False
    _process_blocks.append(Block(config))
    return True


def leave(entered: list[Block]) -> None:
    """End the innermost block of `entered` in this context, else the last in any; remove it from `entered`."""
    if not entered:
        raise RuntimeError("streaming() is left more often than it was entered.")
    block = next((block for block in reversed(_blocks.get()) if block in entered), entered[-1])
    entered.remove(block)
    block.is_open = False
    _blocks.set(_open_blocks())
    while block.resources:
        block.resources.popitem()[1].close()


def resource(kind: type[Resource]) -> Resource:
    """The innermost open block's object of this kind, made at first use; there must be such a block."""
    resources = (*_process_blocks, *_open_blocks())[-1].resources
    if kind not in resources:
        resources[kind] = kind()
    return resources[kind]


def resource_around(kind: type[Resource]) -> Resource | None:
    """The object of this kind that the innermost open block with one has; None if none has."""
    blocks = reversed((*_process_blocks, *_open_blocks()))
    return next((block.resources[kind] for block in blocks if kind in block.resources), None)


@contextmanager
def inside() -> Iterator[None]:
    """A block without settings of its own, in the running code alone."""
    entered = [enter(None)]
    try:
        yield
    finally:
        leave(entered)


@contextmanager
def set_in_context(variable: ContextVar[Any], value: Value) -> Iterator[Value]:
    """Set a context variable, inside and in the running code alone."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


def _open_blocks() -> tuple[Block, ...]:
    return tuple(block for block in _blocks.get() if block.is_open)


def decorated(what: Any, make_context: MakeContext, decorator: str) -> Any:
    """`what`, a function or method of any kind, such that each call or step of a generator runs in a new context.

    The code that consumes a generator does not. A coroutine that waits stays in the context, with the tasks and
    threads that it waits for. Raises :class:`ConfigError`, which names the `decorator`, if `what` is a class, no
    function at all, or an async generator.
    """
    if isinstance(what, (staticmethod, classmethod)):
        return type(what)(decorated(what.__func__, make_context, decorator))
    if isinstance(what, type) or not callable(what):
        raise ConfigError(
            f"@{decorator}: expected a function or a method; got {what!r}. Of a class, decorate the methods."
        )
    # An object may be called like a function; inspect looks at functions, methods and functools.partial.
    body = what if inspect.isroutine(what) or isinstance(what, functools.partial) else type(what).__call__
    if inspect.isasyncgenfunction(body):
        raise ConfigError(
            f"@{decorator}: expected a function, a coroutine or a generator; got {what!r}, an async generator. Write "
            f"`with {decorator}:` around the loads and saves in it."
        )
    if inspect.iscoroutinefunction(body):
        return _coroutine_function(what, make_context)
    return (_generator_function if inspect.isgeneratorfunction(body) else _function)(what, make_context)


def _function(function: Function, make_context: MakeContext) -> Function:
    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        with make_context():
            result = function(*args, **kwargs)
        # Another decorator may have made a coroutine, or a generator, look like a function: its body has not run yet.
        if inspect.iscoroutine(result):
            return _coroutine_function(lambda: result, make_context)()
        return _generator_function(lambda: result, make_context)() if inspect.isgenerator(result) else result

    return inner


def _coroutine_function(function: Function, make_context: MakeContext) -> Function:
    @functools.wraps(function)
    async def inner(*args: Any, **kwargs: Any) -> Any:
        with make_context():
            return await function(*args, **kwargs)

    return inner


def _generator_function(function: Function, make_context: MakeContext) -> Function:
    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        generator = function(*args, **kwargs)
        step, argument = generator.send, None
        while True:
            try:
                with make_context():
                    value = step(argument)
            except StopIteration as stop:
                return stop.value
            try:
                step, argument = generator.send, (yield value)
            except BaseException as error:  # a GeneratorExit too: who closes this one closes that one
                step, argument = generator.throw, error

    return inner
