"""Run the body of a function of any kind in a context.

Each step of a generator runs in the context; the code that consumes it does not. A coroutine that waits stays in the
context, with the tasks and threads that it waits for.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AbstractContextManager
from typing import Any

from .errors import ConfigError


__all__ = ["decorated"]

Function = Callable[..., Any]
MakeContext = Callable[[], AbstractContextManager[Any]]


def decorated(what: Any, make_context: MakeContext, decorator: str) -> Any:
    """`what`, a function or method of any kind, such that each call or step of a generator runs in a new context.

    Raises :class:`ConfigError`, which names the `decorator`, if `what` is a class, or no function at all.
    """
    if isinstance(what, (staticmethod, classmethod)):
        return type(what)(decorated(what.__func__, make_context, decorator))
    if isinstance(what, type) or not callable(what):
        raise ConfigError(
            f"@{decorator}: expected a function or a method; got {what!r}. Of a class, decorate the methods."
        )
    # An object may be called like a function; inspect looks at functions, methods and functools.partial.
    body = what if inspect.isroutine(what) or isinstance(what, functools.partial) else type(what).__call__
    for is_suspended, _, decorate in _SUSPENDED:
        if is_suspended(body):
            return decorate(what, make_context)
    return _function(what, make_context)


def _function(function: Function, make_context: MakeContext) -> Function:
    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        with make_context():
            result = function(*args, **kwargs)
        # Another decorator may have made an `async def` look like a function: its body has not run yet.
        for _, is_result, decorate in _SUSPENDED:
            if is_result(result):
                return decorate(lambda: result, make_context)()
        return result

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


def _async_generator_function(function: Function, make_context: MakeContext) -> Function:
    @functools.wraps(function)
    async def inner(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        generator = function(*args, **kwargs)
        step, argument = generator.asend, None
        while True:
            try:
                with make_context():
                    value = await step(argument)
            except StopAsyncIteration:
                return
            try:
                step, argument = generator.asend, (yield value)
            except BaseException as error:
                step, argument = generator.athrow, error

    return inner


_SUSPENDED: tuple[tuple[Callable[[Any], bool], Callable[[Any], bool], Callable[..., Function]], ...] = (
    (inspect.iscoroutinefunction, inspect.iscoroutine, _coroutine_function),
    (inspect.isgeneratorfunction, inspect.isgenerator, _generator_function),
    (inspect.isasyncgenfunction, inspect.isasyncgen, _async_generator_function),
)
"""For each kind of function that is suspended: what knows it, what knows the result of a call, and its decorator."""
