"""`@streaming()` on functions of every kind, and blocks that are left elsewhere than they were entered."""

import asyncio
import contextvars
import functools
import gc
import inspect
import threading
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from hf_zero_stream import StreamingConfig, streaming
from hf_zero_stream.bindings.table import installed
from hf_zero_stream.errors import ConfigError
from hf_zero_stream.holdings.introspection import is_streamed
from hf_zero_stream.registry import PatchScope
from hf_zero_stream.settings import scope
from tests.support.cluster import run_ranks
from tests.support.parity import ds_config
from tests.support.zoo import Checkpoint


def streams() -> bool:
    """Whether a load here and now would stream."""
    return bool(scope.active_configs()) and bool(installed(PatchScope.BLOCK))


def is_as_before() -> bool:
    gc.collect()
    return not installed(PatchScope.BLOCK) and scope.active_configs() == ()


@pytest.fixture(autouse=True)
def all_is_as_before() -> Iterator[None]:
    yield
    assert is_as_before()


# ------------------------------------------------------------------------------------------------------- real loads


def load(folder: Path, model_class: Any = transformers.LlamaForCausalLM) -> Any:
    return model_class.from_pretrained(folder, ds_config=ds_config())


@streaming()
async def load_async(folder: Path) -> Any:
    await asyncio.sleep(0)
    return load(folder)


@streaming()
async def load_in_a_thread(folder: Path) -> Any:
    return await asyncio.to_thread(load, folder)


@streaming()
def load_each(folder: Path) -> Iterator[Any]:
    for _ in range(2):
        yield load(folder)


def load_while_it_is_left(folder: Path) -> Any:
    """As `asyncio.wait_for(asyncio.to_thread(load), ...)` does that runs out of time: the thread goes on."""
    loads, left = threading.Event(), threading.Event()
    found: list[Any] = []

    class Slow(transformers.LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            loads.set()
            assert left.wait(60)

    with streaming():
        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(lambda: found.append(load(folder, Slow)),))
        thread.start()
        assert loads.wait(60)
    left.set()
    thread.join()
    return found[0]


def load_in_all_ways(folder: Path) -> dict[str, Any]:
    models = {
        "async": asyncio.run(load_async(folder)),
        "thread": asyncio.run(load_in_a_thread(folder)),
        "generator": list(load_each(folder))[-1],
        "left": load_while_it_is_left(folder),
    }
    assert is_as_before()
    return {
        name: all(hasattr(param, "ds_tensor") for param in model.parameters()) and is_streamed(model)
        for name, model in models.items()
    }


def test_loads_stream(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    for found in run_ranks(2, load_in_all_ways, zoo_checkpoint("llama")):
        assert found == dict.fromkeys(("async", "thread", "generator", "left"), True)


# --------------------------------------------------------------------------------------------------------- functions


class Methods:
    @streaming()
    def method(self) -> bool:
        return streams()

    @streaming()
    @staticmethod
    def static() -> bool:
        return streams()

    @streaming()
    @classmethod
    def of_class(cls) -> bool:
        return streams()

    @streaming()
    @classmethod
    async def of_class_async(cls) -> bool:
        return streams()

    async def __call__(self) -> bool:
        return streams()


def test_functions_of_every_kind_stay_what_they_are() -> None:
    async def coroutine(flag: bool = True) -> bool:
        await asyncio.sleep(0)
        return streams() is flag

    def generator() -> Iterator[bool]:
        yield streams()

    @functools.wraps(coroutine)
    def not_async_itself() -> Any:
        return coroutine()

    decorate = streaming()
    assert Methods().method() and Methods.static() and Methods.of_class()
    for function in (coroutine, functools.partial(coroutine, True), Methods(), not_async_itself, lambda: coroutine()):
        assert asyncio.run(decorate(function)()), function
    assert asyncio.run(Methods.of_class_async())
    assert inspect.iscoroutinefunction(decorate(coroutine)) and decorate(coroutine).__name__ == "coroutine"
    assert inspect.isgeneratorfunction(decorate(generator))
    assert list(decorate(generator)()) == [True] and list(decorate(lambda: generator())()) == [True]


def test_misuse_is_an_error() -> None:
    for what in (Methods, 3, property(streams)):
        with pytest.raises(ConfigError, match="expected a function or a method"):
            streaming()(what)

    async def steps() -> AsyncIterator[bool]:
        yield streams()

    with pytest.raises(ConfigError, match="an async generator. Write `with streaming"):
        streaming()(steps)
    with pytest.raises(ConfigError, match=r"is written @streaming\(\)"):
        streaming(streams)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="more often than it was entered"):
        streaming().__exit__()


# -------------------------------------------------------------------------------------------------------- generators


@streaming()
def steps(log: list[Any]) -> Generator[Any, Any, str]:
    """Yields what it is sent, takes one ValueError, and notes for each step whether it streams."""
    try:
        received = None
        while received != "end":
            try:
                log.append(streams())
                received = yield received
            except ValueError as error:
                received = str(error)
        return "returned"
    finally:
        log.append(("finally", streams()))


def test_a_generator_streams_only_while_it_runs() -> None:
    log: list[Any] = []
    running = steps(log)
    assert next(running) is None and is_as_before()
    assert running.send("sent") == "sent" and is_as_before()
    assert running.throw(ValueError("thrown")) == "thrown" and is_as_before()
    with pytest.raises(StopIteration) as stopped:
        running.send("end")
    assert stopped.value.value == "returned"
    assert log == [True, True, True, ("finally", True)]


@pytest.mark.parametrize("end", ["close", "collect", "throw", "never begun"])
def test_a_generator_that_nobody_finishes(end: str) -> None:
    log: list[Any] = []
    running = steps(log)
    if end != "never begun":
        next(running)
    if end == "close":
        running.close()
    elif end == "throw":
        with pytest.raises(KeyError):
            running.throw(KeyError())
    del running
    assert is_as_before()
    assert log == ([] if end == "never begun" else [True, ("finally", True)])


# -------------------------------------------------------------------------------------------------------- coroutines


def test_a_coroutine_streams_while_it_waits_and_no_other_task_does() -> None:
    waits, go_on = asyncio.Event(), asyncio.Event()
    outlives: list[Any] = []

    @streaming()
    async def inside() -> list[bool]:
        async def child() -> bool:
            await go_on.wait()
            return streams()

        outlives.append(asyncio.create_task(child()))
        waits.set()
        await go_on.wait()
        return [streams(), *await asyncio.gather(asyncio.to_thread(streams), child())]

    async def main() -> None:
        task = asyncio.create_task(inside())
        await waits.wait()
        assert not scope.active_configs(), "this is another task"
        cancelled = asyncio.create_task(inside())
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        go_on.set()
        assert await task == [True, True, True]
        assert is_as_before()
        await asyncio.gather(*outlives)

    asyncio.run(main())


def test_a_task_that_outlives_the_block_has_left_it() -> None:
    """Also if somebody else streams by then, so that transformers is patched."""

    async def main() -> list[bool]:
        left = asyncio.Event()

        async def child() -> list[bool]:
            before = streams()
            await left.wait()
            return [before, bool(scope.active_configs())]

        with streaming():
            task = asyncio.create_task(child())
            await asyncio.sleep(0)
        left.set()
        with streaming():
            return await task

    assert asyncio.run(main()) == [True, False]


# -------------------------------------------------- blocks that are not left in order


FIRST, SECOND = StreamingConfig(reader_threads=1), StreamingConfig(reader_threads=2)


def test_a_generator_takes_only_its_own_block_with_it() -> None:
    def holds() -> Iterator[None]:
        with streaming(FIRST):
            yield

    running = holds()
    next(running)
    with streaming(SECOND):
        assert scope.active_configs() == (FIRST, SECOND)
        running.close()
        assert scope.active_configs() == (SECOND,) and streams()


def test_a_block_that_is_left_in_another_context() -> None:
    entered = streaming(FIRST)
    with streaming(SECOND):
        entered.__enter__()
        contextvars.copy_context().run(entered.__exit__, None, None, None)
        assert scope.active_configs() == (SECOND,)
        entered.__enter__()
        thread = threading.Thread(target=entered.__exit__)
        thread.start()
        thread.join()
        assert scope.active_configs() == (SECOND,)


def test_one_object_in_several_threads() -> None:
    shared, barrier = streaming(FIRST), threading.Barrier(4, timeout=60)
    found: list[Any] = []

    def run(number: int) -> None:
        with shared, streaming(StreamingConfig(reader_threads=10 + number)):
            barrier.wait()
            with shared:
                barrier.wait()
                found.append([config and config.reader_threads for config in scope.active_configs()])
            barrier.wait()
            assert streams()
        assert not scope.active_configs()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [[1, 10 + number, 1] for number in range(4)]
