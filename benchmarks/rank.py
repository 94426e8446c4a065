"""The body of one rank: set up, meet the others, load, and write the figures down. Started by `benchmarks.launch`."""

import mmap
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from benchmarks.arms import ARMS, MODEL_ARMS, Task, Work, digest, owned_bytes
from benchmarks.launch import write_figures
from hf_zero_stream.holdings.introspection import is_streamed
from hf_zero_stream.reports.measures import AnonymousMemory
from hf_zero_stream.sources.page_cache import drop_from_cache, fill_cache


T = TypeVar("T")


def measure(task: Task) -> dict[str, Any]:
    """The first load of this process, with all ranks; returns this rank's figures: seconds and bytes.

    And in how many seconds a second load was done, for which nothing is imported any more.
    """
    work = ARMS[task.arm](task)
    loaded, figures = timed_load(work, task.shards, task.cache, touches_memory=task.touches_memory)
    figures["owned_bytes"] = owned_bytes(loaded)
    if task.arm in MODEL_ARMS:
        figures["digest"] = digest(loaded)
    if is_streamed(loaded):
        figures["report"] = asdict(loaded.streaming_report.ranks[dist.get_rank()])
        del loaded
        figures["seconds_again"], _ = seconds_of(work)
    return figures


def seconds_of(work: Callable[[], T]) -> tuple[float, T]:
    """How long `work` takes on this rank, once all ranks have come; and what it returns."""
    dist.barrier()
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def timed_load(
    work: Work, shards: Sequence[Path], cache: str, *, touches_memory: bool = True
) -> tuple[Any, dict[str, Any]]:
    """Call `work` on all ranks at once, with `shards` in the page cache or not; what it returns, and figures."""
    dist.barrier()
    if dist.get_rank() == 0:
        (drop_from_cache if cache == "cold" else fill_cache)(list(shards))
    dist.barrier()
    if touches_memory:
        _touch_memory(2 * sum(path.stat().st_size for path in shards) // dist.get_world_size())
    modules_before = len(sys.modules)
    hwm_reset = _reset_peak_resident()
    resident_before = _status_bytes("VmRSS")
    io_before = _io()
    memory = AnonymousMemory()
    with memory:
        dist.barrier()
        start, cpu_start = time.perf_counter(), time.process_time()
        loaded = work()
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    io_after = _io()
    return loaded, {
        "rank": dist.get_rank(),
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "anonymous_growth_bytes": memory.growth_peak,
        "resident_growth_bytes": _status_bytes("VmHWM") - resident_before if hwm_reset else None,
        "rchar_bytes": io_after["rchar"] - io_before["rchar"],
        "storage_read_bytes": io_after["read_bytes"] - io_before["read_bytes"],
        "modules_imported": len(sys.modules) - modules_before,
    }


def _touch_memory(nbytes: int) -> None:
    """Use memory and give it back, so that every arm finds free pages in the same state.

    The host of a virtual machine takes back pages that were free for some seconds. Their next first use can cost more
    than reading the checkpoint, and would be charged to the arms whose ranks take longest to start. In huge pages,
    since those are what a host takes: a small page that was free may never have been given back.
    """
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    with mmap.mmap(-1, min(nbytes, available // (2 * dist.get_world_size())), flags=mmap.MAP_PRIVATE) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        torch.frombuffer(memory, dtype=torch.uint8).fill_(1)


def _reset_peak_resident() -> bool:
    """Make VmHWM start again from the present; False where the kernel does not allow it."""
    try:
        Path("/proc/self/clear_refs").write_text("5\n")
    except OSError:
        return False
    return True


def _status_bytes(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"^{field}:\s*(\d+) kB$", status, re.MULTILINE)[1]) * 1024  # type: ignore[index]


def _io() -> dict[str, int]:
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


def main() -> None:
    task, result_file = Task.from_json(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    if task.arm in MODEL_ARMS:
        import deepspeed

        deepspeed.init_distributed("gloo")
    else:
        dist.init_process_group("gloo")
    write_figures(result_file, measure(task))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
