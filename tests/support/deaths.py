"""Ranks that are killed, or look as if they were elsewhere, in loads; and what a survivor must not keep."""

import errno
import gc
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import transformers

import hf_zero_stream
from hf_zero_stream.destinations import exchange
from hf_zero_stream.ranks import presence
from hf_zero_stream.ranks.presence import Location
from tests.support.cluster import SOON_S, Outcome
from tests.support.disk import replace_reads
from tests.support.messages import error_of
from tests.support.parity import ds_config


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_in_first_read() -> None:
    replace_reads(lambda *args: kill_this_process())


def kill_in_second_all_gather() -> None:
    real, calls = exchange.all_gather, []

    def gather(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return real(*args, **kwargs) if len(calls) < 2 else kill_this_process()

    exchange.all_gather = gather


def kill_in_a_request() -> None:
    from hf_zero_stream.plugins.relay.relay import RelayedFiles

    RelayedFiles._ask = lambda *args: kill_this_process()  # type: ignore[method-assign]


def look_as_on_other_hosts() -> None:
    """A refused connection says nothing: a firewall may be in between."""
    here = Location.here
    Location.here = lambda *args: here(*args)._replace(network=f"of {os.getpid()}")  # type: ignore[method-assign]


def look_as_behind_firewalls() -> None:
    """Ranks cannot ask each other's kernels."""
    from hf_zero_stream.plugins.watch.lines import Line

    look_as_on_other_hosts()
    Line._dial = lambda self: None  # type: ignore[method-assign]


def look_as_without_power() -> None:
    """A host says nothing any more when its process is gone, so that connections to it time out, here at once."""
    from hf_zero_stream.plugins.watch.lines import Line

    look_as_on_other_hosts()
    error = Line._error
    Line._error = lambda self: errno.ETIMEDOUT if error(self) else 0  # type: ignore[method-assign]


def make_contact() -> None:
    with hf_zero_stream.streaming():
        pass
    dist.barrier()


def load(folder: Path, zero: dict[str, Any] | None, **settings: Any) -> Any:
    if zero is None:
        with hf_zero_stream.streaming(hf_zero_stream.StreamingConfig(share_reads=True, **settings)):
            return transformers.AutoModelForCausalLM.from_pretrained(folder)
    config = {**ds_config(**zero), "hf_zero_stream": settings}
    return hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(folder, ds_config=config)


def load_with_a_victim(
    folder: Path,
    victim: int,
    kill: Callable[[], None],
    prepare: Callable[[], None] | None,
    zero: dict[str, Any] | None,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """What a survivor's load raised, and what it left behind."""
    before = transformers.PreTrainedModel.from_pretrained
    if prepare is not None:
        prepare()
    make_contact()
    handles = count_handles()
    if dist.get_rank() == victim:
        kill()
    caught = error_of(lambda: load(folder, zero, **settings))
    gc.collect()  # errors and their tracebacks
    return {
        "caught": caught,
        "patched": transformers.PreTrainedModel.from_pretrained != before,
        "threads": [name for name in thread_names() if name.startswith("hf_zero_stream")],
        "shards open": [path for path in open_files() if path.endswith(".safetensors")],
        "handles": count_handles() - handles,
    }


def thread_names() -> set[str]:
    """All but that of the sleeping thread that every rank in contact has."""
    return {thread.name for thread in threading.enumerate()} - {"hf_zero_stream-listener"}


def count_handles() -> int:
    """All but those of the lines to other ranks, which open when these make contact."""
    assert presence._current is not None
    watch: Any = presence._current.watch
    lines = sum(line._socket is not None for _, line in watch._lines.values()) if watch else 0
    return len(os.listdir("/proc/self/fd")) - lines


def open_files() -> list[str]:
    found = []
    for handle in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{handle}"))
        except OSError:
            pass
    return found


def assert_survivors_name(victim: int, outcomes: list[Outcome]) -> None:
    """They name the victim, and keep nothing open."""
    assert outcomes[victim].error_type == "Died", outcomes[victim]
    for rank, outcome in enumerate(outcomes):
        if rank == victim:
            continue
        assert outcome.error_type is None, outcome.traceback
        kind, message = outcome.value["caught"]
        assert kind == "PeerError", outcome.value
        assert f"rank {victim} " in message
        assert not outcome.value["patched"]
        assert outcome.value["threads"] == [] and outcome.value["shards open"] == []
        assert outcome.value["handles"] <= 1
        assert outcome.seconds < SOON_S
