"""One rank meets a fault in the middle of a load: all ranks raise the same, and the next load succeeds."""

import contextlib
import errno
import gc
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from transformers.integrations import HfDeepSpeedConfig

import hf_zero_stream
from tests.support.cluster import SOON_S, run_ranks
from tests.support.deaths import count_handles, thread_names
from tests.support.disk import disk, failing, replace_reads
from tests.support.parity import ds_config
from tests.support.zoo import Checkpoint


Fault = Callable[[Path], Any]
"""A context in which the faulty rank loads from a folder of its own."""


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def in_a_read(folder: Path, happens: Callable[[], int | None], number: int = 2) -> Any:
    """`happens` at the read with this number; where it returns a number, the read does too."""
    lock, count = threading.Lock(), [0]

    def read(real: Callable[..., int], *args: Any) -> int:
        with lock:
            count[0] += 1
            at = count[0]
        found = happens() if at >= number else None
        return real(*args) if found is None else found

    return disk(read)


def raising(error: BaseException) -> Callable[[], None]:
    def happens() -> None:
        raise error

    return happens


def last_shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[-1]


def missing(folder: Path) -> Any:
    last_shard(folder).unlink()
    return in_a_read(folder, lambda: None)


def unreadable(folder: Path) -> Any:
    real = os.open

    def refuse(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path) == str(last_shard(folder)):
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, *args, **kwargs)

    return replaced(os, "open", refuse)


def io_error(folder: Path) -> Any:
    return in_a_read(folder, raising(OSError(errno.EIO, "Input/output error")))


def stale(folder: Path) -> Any:
    return in_a_read(folder, raising(OSError(errno.ESTALE, "Stale file handle")))


def short(folder: Path) -> Any:
    return in_a_read(folder, lambda: 0)


def truncated(folder: Path) -> Any:
    return in_a_read(folder, lambda: os.truncate(last_shard(folder), 64) or os.truncate(first_shard(folder), 64))


def first_shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


def swapped(folder: Path) -> Any:
    """Another file of the same bytes takes the shard's name, as when a checkpoint is downloaded again."""

    copy = shutil.copy2(last_shard(folder), folder / "new")

    def happens() -> None:
        with contextlib.suppress(FileNotFoundError):  # another read did it
            os.replace(copy, last_shard(folder))

    return in_a_read(folder, happens)


def rewritten(folder: Path) -> Any:
    return in_a_read(folder, lambda: os.utime(last_shard(folder), (0, time.monotonic())))


def no_memory(folder: Path) -> Any:
    """As torch's allocator on a CPU says it."""
    from hf_zero_stream.destinations.deepspeed import zero3

    def empty(size: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        if isinstance(size, int) and size > 1000:
            raise RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
                "to allocate 123456 bytes. Error code 12 (Cannot allocate memory)"
            )
        return torch.empty(size, *args, **kwargs)

    class Torch:
        def __getattr__(self, name: str) -> Any:
            return empty if name == "empty" else getattr(torch, name)

    return replaced(zero3, "torch", Torch())


def no_memory_while_reading(folder: Path) -> Any:
    return in_a_read(folder, raising(MemoryError()))


def interrupted(folder: Path) -> Any:
    return in_a_read(folder, raising(KeyboardInterrupt()))


def faulty_op(folder: Path) -> Any:
    from transformers.core_model_loading import MergeModulelist

    def convert(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("a custom op divides by zero")

    return replaced(MergeModulelist, "convert", convert)


def load(folder: Path, **settings: Any) -> Any:
    config = {**ds_config(), "hf_zero_stream": {"reader_threads": 2, "staging_bytes": 8 * 4096, **settings}}
    return hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(folder, ds_config=config)


def fail_then_load(folder: Path, own: Path, fault: Fault, read_from: str = "all") -> dict[str, Any]:
    """What the load with the fault raised, what it left behind, and whether another one succeeds."""
    with hf_zero_stream.streaming():  # first contact opens sockets, once
        pass
    before = transformers.PreTrainedModel.from_pretrained
    seen = shutil.copytree(folder, own / f"rank{dist.get_rank()}")
    began = time.monotonic()
    handles, error = count_handles(), None
    try:
        if dist.get_rank() == 1:
            with fault(seen):
                load(seen, read_from=read_from)
        else:
            load(seen, read_from=read_from)
    except BaseException as caught:
        error = (type(caught).__name__, str(caught))
    found = {
        "error": error,
        "seconds": time.monotonic() - began,
        "patched": transformers.PreTrainedModel.from_pretrained != before,
        "threads": sorted(thread_names() - {"MainThread", "tqdm_monitor"}),
    }
    gc.collect()
    found["handles"] = count_handles() - handles
    found["loaded"] = load(folder).streaming_report.world_size
    return found


FAULTS: dict[Fault, tuple[str, str]] = {
    missing: ("ReadError", "No such file"),
    unreadable: ("ReadError", "Permission denied"),
    io_error: ("ReadError", "Input/output error"),
    stale: ("ReadError", "Stale file handle"),
    short: ("ReadError", "the file ends here"),
    truncated: ("CheckpointError", "was truncated while it was being loaded"),
    swapped: ("CheckpointError", "was replaced while it was being loaded"),
    rewritten: ("CheckpointError", "was written to while it was being loaded"),
    no_memory: ("LoadError", "out of memory on rank 1"),
    no_memory_while_reading: ("LoadError", "out of memory on rank 1"),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_all_ranks_raise_alike_and_load_again(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, fault: Fault
) -> None:
    kind, text = FAULTS[fault]
    results = run_ranks(3, fail_then_load, zoo_checkpoint("qwen3_moe"), tmp_path, fault, timeout=60)
    for rank, result in enumerate(results):
        assert result["error"][0] == kind, result
        assert text in result["error"][1], result
        assert rank == 1 or "rank 1" in result["error"][1], result
        assert_clean(result)


@pytest.mark.plugin("relay")
def test_no_memory_where_another_rank_reads(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """The reader waits for all that it reads for to be done."""
    for result in run_ranks(3, fail_then_load, zoo_checkpoint("llama"), tmp_path, no_memory, "rank0", timeout=60):
        assert result["error"][0] == "LoadError" and "out of memory on rank 1" in result["error"][1], result
        assert_clean(result)


def assert_clean(result: dict[str, Any]) -> None:
    assert result["seconds"] < SOON_S
    assert not result["patched"] and result["threads"] == [] and result["handles"] <= 1
    assert result["loaded"] == 3


def test_a_custom_op_on_one_rank(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """transformers' error on the rank itself, whose LOAD REPORT has the op's; both are RuntimeErrors."""
    results = run_ranks(3, fail_then_load, zoo_checkpoint("qwen3_moe"), tmp_path, faulty_op)
    assert [result["error"][0] for result in results] == ["PeerError", "RuntimeError", "PeerError"]
    for result in results:
        assert "CONVERSION" in result["error"][1]
        assert_clean(result)


def test_memory_is_wanted_for_a_parameter(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    for result in run_ranks(3, fail_then_load, zoo_checkpoint("qwen3_moe"), tmp_path, no_memory):
        assert "iB for model.embed_tokens.weight on cpu" in result["error"][1], result["error"]


def test_ctrl_c_on_one_rank(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    results = run_ranks(3, fail_then_load, zoo_checkpoint("qwen3_moe"), tmp_path, interrupted)
    assert [result["error"][0] for result in results] == ["PeerError", "KeyboardInterrupt", "PeerError"]
    for result in results:
        assert "rank 1 failed" in result["error"][1] or result["error"][0] == "KeyboardInterrupt"
        assert_clean(result)


# --------------------------------------------------------------------------------------- the others need not read on


def stop_reading(folder: Path, own: Path) -> tuple[str, int]:
    """Rank 1 fails at once; the others, whose reads are slow, have seconds of them to go."""
    reads: list[int] = []

    def slow(real: Callable[..., int], *args: Any) -> int:
        reads.append(1)
        time.sleep(0.2)
        return real(*args)

    replace_reads(failing(errno.EINVAL) if dist.get_rank() == 1 else slow)
    try:
        load(folder)
    except OSError as error:
        return str(error), len(reads)
    raise AssertionError("the fault was not noticed")


def test_the_others_stop_reading(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    plain, failed, other = run_ranks(3, stop_reading, zoo_checkpoint("qwen3_moe"), tmp_path)
    for message, reads in (plain, other):
        assert message.startswith("rank 1: ") and "Invalid argument" in message
        assert reads < 20


# -------------------------------------------------------------------------------- before the class of a model is known


def load_from_nowhere(folder: Path) -> list[tuple[str, str]]:
    """An Auto class needs the config to know the model's class, so rank 1 fails before it comes to the load."""
    path = folder / "nowhere" if dist.get_rank() == 1 else folder
    caught = []

    def load_it(**kwargs: Any) -> None:
        with pytest.raises(Exception) as error, hf_zero_stream.streaming():  # noqa: PT011 - which, the test asks
            transformers.AutoModelForCausalLM.from_pretrained(path, **kwargs)
        caught.append((type(error.value).__name__, str(error.value)))
        with hf_zero_stream.streaming():
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, **kwargs)
        assert model.streaming_report.world_size == 2

    load_it(ds_config=ds_config())
    zero3 = HfDeepSpeedConfig(ds_config())  # noqa: F841 - transformers finds it as long as it lives
    load_it()
    return caught


def test_no_config_on_one_rank(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    rank_0, rank_1 = run_ranks(2, load_from_nowhere, zoo_checkpoint("qwen3_moe"), timeout=60)
    assert len(rank_0) == 2
    for (kind, message), (own_kind, own_message) in zip(rank_0, rank_1, strict=True):
        assert "nowhere" in own_message and own_kind != "PeerError"
        assert kind == "PeerError" and "rank 1" in message and "nowhere" in message
