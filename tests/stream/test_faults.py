"""A pass of a weight stream that cannot go on ends on all ranks, with one error, and the next one works."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel

import hf_zero_stream
from hf_zero_stream.errors import ConfigError, HfZeroStreamError, StreamError, UnsupportedError
from tests.support.cluster import run_ranks, run_ranks_expecting_errors
from tests.support.live_sharded import plain_model
from tests.support.parity import ds_config, load_with
from tests.support.streams import taken
from tests.support.zoo import Checkpoint, build_model


def stream_of(checkpoint: Path) -> Any:
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


def hold_on(checkpoint: Path) -> list[Any]:
    """A pass that is held, and not left, as a traceback in a notebook holds one: whole passes go on beside it."""
    stream = stream_of(checkpoint)
    held = iter(stream)
    next(held)
    counts = [len(taken(stream)) for _ in range(2)]
    with pytest.raises(StreamError, match="Another pass of this weight stream has begun"):
        next(held)
    other = iter(hf_zero_stream.weight_stream(stream.model, "all", bucket_bytes=1000))
    counts.append(sum(len(bucket) for bucket, _ in zip(stream, other, strict=False)))
    other.close()
    return [*counts, len(taken(stream)), len(stream.metadata)]


def test_a_pass_that_is_held(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    *counts, number = run_ranks(2, hold_on, zoo_checkpoint("llama"), timeout=60)[0]
    assert counts == [number] * 4


def begin_again(checkpoint: Path) -> str:
    """Rank 1 begins another pass in the middle of one, and rank 0 goes on with it."""
    stream = stream_of(checkpoint)
    held = iter(stream)
    next(held)
    message = ""
    if dist.get_rank() == 0:
        with pytest.raises(StreamError) as caught:
            list(held)
        message = str(caught.value)
    assert len(taken(stream)) == (len(stream.metadata) if dist.get_rank() == 0 else 0)
    return message


def test_another_pass_of_one_rank(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    message, _ = run_ranks(2, begin_again, zoo_checkpoint("llama"), timeout=60)
    assert "ended before its last bucket on rank 1" in message


def in_threads(checkpoint: Path) -> list[int]:
    """Each pass begins in this thread, and ends in another one."""
    stream = stream_of(checkpoint)
    counts = []
    for _ in range(2):
        buckets = iter(stream)
        first = next(buckets)
        with ThreadPoolExecutor(1) as thread:
            rest = thread.submit(list, buckets).result()
        counts.append(sum(map(len, [first, *rest])))
    return [*counts, len(stream.metadata)]


def test_a_pass_in_two_threads(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    *counts, number = run_ranks(2, in_threads, zoo_checkpoint("llama"), timeout=60)[0]
    assert counts == [number] * 2


@contextmanager
def unreadable(stream: Any, number: int) -> Iterator[None]:
    """The value of one parameter cannot be read."""
    import hf_zero_stream.plugins.stream.buckets as buckets

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


@pytest.mark.plugin("watch")
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_dies(cluster: None, zoo_checkpoint: Checkpoint, victim: int) -> None:
    start = time.perf_counter()
    outcomes = run_ranks_expecting_errors(3, die_in_a_pass, zoo_checkpoint("llama"), victim, timeout=60)
    assert time.perf_counter() - start < 40  # loads and start-up are in it
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert outcome.error_type == "PeerError" and f"rank {victim}" in str(outcome.error_message)
            assert outcome.seconds < 20


def ask_otherwise(checkpoint: Path, name: str, values: list[Any]) -> None:
    model = load_with("streamed", "AutoModelForCausalLM", checkpoint, ds_config(), {})
    hf_zero_stream.weight_stream(model, **{name: values[dist.get_rank()]})


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "values"), [("bucket_bytes", [2000, 1000]), ("deltas", [False, True]), ("to", ["rank0", "all"])], ids=str
)
def test_other_arguments_on_a_rank(cluster: None, zoo_checkpoint: Checkpoint, name: str, values: list[Any]) -> None:
    """Its plan would be another one, or it would not come to a pass."""
    for outcome in run_ranks_expecting_errors(2, ask_otherwise, zoo_checkpoint("llama"), name, values):
        assert outcome.error_type == "ConfigError", outcome.traceback
        expected = (
            f"{name}: expected the same value on all ranks; got {values[1]} on rank 1, and {values[0]} on rank 0"
        )
        assert expected in str(outcome.error_message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"to": "rank1"}, "to: expected one of rank0, all, owners; got 'rank1'"),
        ({"only": "frozen"}, "only: expected one of all, trainable; got 'frozen'"),
        ({"layout": "file"}, "layout: expected one of hub, model; got 'file'"),
        ({"bucket_bytes": 0}, "bucket_bytes: expected a size in bytes, at least 1; got 0"),
        ({"dtype": "int8"}, "dtype: expected a floating-point dtype"),
        ({"dtype": torch.float8_e4m3fn}, "dtype: expected a dtype of at least 16 bits; got torch.float8_e4m3fn"),
    ],
    ids=str,
)
def test_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hf_zero_stream.weight_stream(build_model("llama"), **arguments)


def test_values_that_are_not_there() -> None:
    """Of a parameter or a buffer, from the beginning or from some pass on."""
    model = build_model("llama")
    stream = hf_zero_stream.weight_stream(model)
    assert taken(stream)
    model.lm_head.to("meta")
    with pytest.raises(UnsupportedError, match="lm_head.weight: expected values; found 1 .* on the meta device"):
        taken(stream)
    model = build_model("llama")
    model.register_buffer("scale", torch.ones(1, device="meta"))
    with pytest.raises(UnsupportedError, match="scale: expected values"):
        hf_zero_stream.weight_stream(model)


def stream_fsdp1(checkpoint: Path) -> None:
    model = FullyShardedDataParallel(plain_model(checkpoint), device_id=torch.device("cpu"))
    with pytest.raises(UnsupportedError, match="^weight_stream: expected .* Or give engines"):
        hf_zero_stream.weight_stream(model)


def test_fsdp1(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    run_ranks(1, stream_fsdp1, zoo_checkpoint("llama"))


def test_no_transformers_model() -> None:
    with pytest.raises(UnsupportedError, match="expected a transformers model"):
        hf_zero_stream.weight_stream(torch.nn.Linear(2, 3))
    both = torch.nn.ModuleDict({"policy": build_model("llama"), "value": build_model("llama")})
    with pytest.raises(UnsupportedError, match=r"Give it one of those that it holds: policy, value\.$"):
        hf_zero_stream.weight_stream(both)
