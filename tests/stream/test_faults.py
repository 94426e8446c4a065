"""A pass of a weight stream that cannot go on ends on all ranks, with one error, and the next one works."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_zero_stream.errors import ConfigError, HfZeroStreamError, StreamError, UnsupportedError
from tests.support.cluster import run_ranks, run_ranks_expecting_errors
from tests.support.loading import load_with
from tests.support.parity import ds_config
from tests.support.streams import taken


Checkpoint = Callable[..., Path]


def stream_of(checkpoint: Path) -> Any:
    import hf_zero_stream

    model = load_with("streamed", "AutoModelForCausalLM", checkpoint, ds_config(), {})
    return hf_zero_stream.weight_stream(model, bucket_bytes=2000)


def leave_early(checkpoint: Path, leaver: int, raises: bool) -> list[str]:
    """One rank leaves the loop in the second bucket; afterwards a pass of all ranks is complete."""
    stream = stream_of(checkpoint)
    found = []
    try:
        for number, _ in enumerate(stream):
            if number == 1 and dist.get_rank() == leaver:
                if raises:
                    raise KeyError("an engine's error")
                break
        found.append("left")
    except (KeyError, StreamError) as error:
        found.append(f"{type(error).__name__}: {error}")
    tensors = taken(stream)
    return [*found, str(len(tensors)), str(len(stream.metadata))]


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("leaver", [0, 1])
def test_a_loop_that_ends_early(cluster: None, zoo_checkpoint: Checkpoint, leaver: int, raises: bool) -> None:
    found = run_ranks(2, leave_early, zoo_checkpoint("llama"), leaver, raises)
    left, other = found[leaver], found[1 - leaver]
    assert left[0] == ('KeyError: "an engine\'s error"' if raises else "left")
    assert other[0].startswith("StreamError: ") and f"ended before its last bucket on rank {leaver}" in other[0]
    assert found[0][1] == found[0][2] and found[1][1] == "0"


@contextmanager
def unreadable(stream: Any, number: int) -> Iterator[None]:
    """The value of one parameter cannot be read."""
    import hf_zero_stream.stream.buckets as buckets

    original, count = buckets.begin_exchange, [0]

    def begin(*args: Any) -> Any:
        count[0] += 1
        end = original(*args)

        def fail() -> None:
            end()
            raise OSError("a disk's error")

        return fail if count[0] == number else end

    buckets.begin_exchange = begin
    try:
        yield
    finally:
        buckets.begin_exchange = original


def fail_in_an_exchange(checkpoint: Path, faulty: int) -> list[Any]:
    stream = stream_of(checkpoint)
    message = ""
    start = time.perf_counter()
    with unreadable(stream, 2 if dist.get_rank() == faulty else -1):
        try:
            taken(stream)
        except (HfZeroStreamError, OSError) as error:
            message = f"{type(error).__name__}: {error}"
    return [message, time.perf_counter() - start, len(taken(stream))]


@pytest.mark.parametrize("faulty", [0, 1])
def test_an_error_of_one_rank(cluster: None, zoo_checkpoint: Checkpoint, faulty: int) -> None:
    found = run_ranks(2, fail_in_an_exchange, zoo_checkpoint("llama"), faulty)
    assert all("a disk's error" in message for message, *_ in found)
    assert f"rank {faulty}" in found[1 - faulty][0]
    assert all(seconds < 10 for _, seconds, _ in found)
    assert found[0][2], "the next pass gives all tensors"


def die_in_a_pass(checkpoint: Path, victim: int) -> None:
    stream = stream_of(checkpoint)
    for number, _ in enumerate(stream):
        if number == 1 and dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_dies(cluster: None, zoo_checkpoint: Checkpoint, victim: int) -> None:
    start = time.perf_counter()
    outcomes = run_ranks_expecting_errors(3, die_in_a_pass, zoo_checkpoint("llama"), victim, timeout=60)
    assert time.perf_counter() - start < 40  # loads and start-up are in it
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert outcome.error_type == "PeerError" and f"rank {victim}" in str(outcome.error_message)
            assert outcome.seconds < 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"to": "rank1"}, "to: expected one of rank0, all, owners; got 'rank1'"),
        ({"only": "frozen"}, "only: expected one of all, trainable; got 'frozen'"),
        ({"layout": "file"}, "layout: expected one of hub, model; got 'file'"),
        ({"bucket_bytes": 0}, "bucket_bytes: expected a size in bytes, at least 1; got 0"),
        ({"dtype": "int8"}, "dtype: expected a floating-point torch dtype"),
    ],
    ids=str,
)
def test_arguments(arguments: dict[str, Any], message: str) -> None:
    import hf_zero_stream
    from tests.support.zoo import build_model

    with pytest.raises(ConfigError, match=message):
        hf_zero_stream.weight_stream(build_model("llama"), **arguments)


def test_no_transformers_model() -> None:
    import hf_zero_stream

    with pytest.raises(UnsupportedError, match="expected a transformers model"):
        hf_zero_stream.weight_stream(torch.nn.Linear(2, 3))
