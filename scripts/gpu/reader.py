"""Ceilings of the bus and the page cache, and our reader against them. Imports neither transformers nor DeepSpeed."""

from __future__ import annotations

import json
import os
import struct
import sys
import threading
import time
from collections.abc import Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from .setting import Setting, Step, gigabytes_per_second, timed


SHAPES = {"large": (4096, 8192), "moe": (320, 2048)}
"""Tensors of 64 MiB, and of 1.3 MB as experts have."""

FILES = 4
REQUESTS = ((2, 8), (8, 8), (8, 12), (16, 8))
"""MiB of a read, and threads."""


def facts(setting: Setting) -> tuple[dict[str, Any], bool]:
    import psutil

    memory = psutil.virtual_memory()
    found = {
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "GPU": torch.cuda.get_device_name(0),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
        "CPUs": len(os.sched_getaffinity(0)),
        "GiB in all, available": [memory.total >> 30, memory.available >> 30],
        "kernel": os.uname().release,
    }
    return found, True


def bus(setting: Setting) -> tuple[dict[str, Any], bool]:
    """GB/s of copies, the best of three, and of making pinned memory."""
    nbytes = int(min(2**30, setting.gigabytes * 2**27))
    pinned, pin_s = timed(lambda: torch.empty(nbytes, dtype=torch.uint8, pin_memory=True))
    plain, there = torch.ones(nbytes, dtype=torch.uint8), torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    copies = {
        "to the device, pinned": lambda: there.copy_(pinned, non_blocking=True),
        "to the device, pageable": lambda: there.copy_(plain),
        "to the host, pinned": lambda: pinned.copy_(there, non_blocking=True),
        "to the host, pageable": lambda: plain.copy_(there),
        "on the device": lambda: there.clone(),
    }
    rates = {
        name: gigabytes_per_second(nbytes, min(timed(copy)[1] for _ in range(3))) for name, copy in copies.items()
    }
    return {**rates, "pinning": gigabytes_per_second(nbytes, pin_s), **_registering(nbytes // 4)}, True


def _registering(nbytes: int) -> dict[str, float]:
    """GB/s of pinning memory that is there already, in huge pages: what ``pin_memory`` of torch does not do."""
    from hf_zero_stream.sources.page_cache import MADV_HUGEPAGE, MADV_POPULATE_WRITE, advise

    memory = torch.empty(nbytes + 2**21, dtype=torch.uint8)
    address = -(-memory.data_ptr() // 2**21) * 2**21
    advise(address, nbytes, MADV_HUGEPAGE)
    populate_s = timed(lambda: advise(address, nbytes, MADV_POPULATE_WRITE))[1]
    runtime = torch.cuda.cudart()
    code, register_s = timed(lambda: int(runtime.cudaHostRegister(address, nbytes, 0)))
    runtime.cudaHostUnregister(address)
    if code:
        return {"cudaHostRegister": float("nan")}
    found = {"populating": populate_s, "cudaHostRegister": register_s}
    return {name: gigabytes_per_second(nbytes, seconds) for name, seconds in found.items()}


def files(setting: Setting) -> tuple[dict[str, Any], bool]:
    """Write the files of the steps below."""
    block = torch.randn(2**24).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()
    found = {}
    for kind, shape in SHAPES.items():
        count = max(1, int(min(6.0, setting.gigabytes) * 1e9 / FILES // (2 * prod(shape))))
        began = time.perf_counter()
        writers = [
            threading.Thread(target=_write, args=(_path(setting, kind, n), shape, count, block)) for n in range(4)
        ]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        found[kind] = gigabytes_per_second(FILES * count * 2 * prod(shape), time.perf_counter() - began)
    return {"GB/s written": found}, True


def _path(setting: Setting, kind: str, number: int) -> Path:
    return setting.folder / f"{kind}{number}.safetensors"


def _write(path: Path, shape: tuple[int, ...], count: int, block: bytes) -> None:
    nbytes = 2 * prod(shape)
    header = {
        f"{path.stem}.{i}": {"dtype": "BF16", "shape": shape, "data_offsets": [i * nbytes, (i + 1) * nbytes]}
        for i in range(count)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        left = count * nbytes
        while left:
            left -= file.write(block[: min(left, len(block))])


def copy_files(
    paths: list[Path], targets: list[torch.Tensor], request_bytes: int, threads: int, read_only: bool = False
) -> None:
    """Copy whole files into tensors of bytes through pinned buffers, two a thread: the least that a load must do."""
    handles = [os.open(path, os.O_RDONLY) for path in paths]
    pending = iter(
        [
            (handle, at, target[at : at + request_bytes])
            for handle, target in zip(handles, targets, strict=True)
            for at in range(0, target.numel(), request_bytes)
        ]
    )
    lock = threading.Lock()

    def work() -> None:
        stream = torch.cuda.Stream()
        buffers = [torch.empty(request_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        events = [torch.cuda.Event() for _ in range(2)]
        turn = 0
        while True:
            with lock:
                request = next(pending, None)
            if request is None:
                break
            handle, at, target = request
            events[turn].synchronize()
            view, done = memoryview(buffers[turn].numpy())[: target.numel()], 0
            while done < len(view):
                done += os.preadv(handle, [view[done:]], at + done)
            if read_only:
                continue
            with torch.cuda.stream(stream):
                target.copy_(buffers[turn][: target.numel()], non_blocking=True)
                events[turn].record(stream)
            turn = 1 - turn
        stream.synchronize()

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for handle in handles:
        os.close(handle)


def loops(setting: Setting) -> tuple[dict[str, Any], bool]:
    """GB/s of loops that do nothing but read and copy, and of the same that only read."""
    paths = [_path(setting, "large", number) for number in range(FILES)]
    sizes = [path.stat().st_size for path in paths]
    targets = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
    copy_files(paths, targets, 2**21, 8)  # fills the page cache
    found = {}
    for mib, threads in (*REQUESTS, (16, 16)):
        copied = min(timed(lambda: copy_files(paths, targets, mib << 20, threads))[1] for _ in range(2))
        read = timed(lambda: copy_files(paths, targets, mib << 20, threads, read_only=True))[1]
        found[f"{mib} MiB, {threads} threads"] = [gigabytes_per_second(sum(sizes), each) for each in (copied, read)]
    return found, True


def reader(setting: Setting) -> tuple[dict[str, Any], bool]:
    """Our reader at the same sizes: GB/s, seconds of the processor, what its streams reserve, and its bits."""
    from hf_zero_stream.checkpoint.formats import read_map
    from hf_zero_stream.engine.execute import execute_reads
    from hf_zero_stream.planning.plan import Target, plan_batch
    from hf_zero_stream.sources.local import LocalFiles

    found, all_right = {}, True
    for kind, dtype in (("large", torch.bfloat16), ("moe", torch.bfloat16), ("moe", torch.float32)):
        index = read_map([_path(setting, kind, number) for number in range(FILES)])
        lazy = {name: item[...] for name, item in index.slices(lambda _: torch.empty(0)).items()}
        some = dict([*lazy.items()][: max(1, len(lazy) // (1 if dtype == torch.bfloat16 else 4))])
        for mib, threads in REQUESTS:
            views = [
                (Target(name, dtype, prod(view.shape), 0, prod(view.shape)), view.view_of_node)
                for name, view in some.items()
            ]
            plan, _ = plan_batch(views, request_bytes=mib << 20, seek_bytes=4096)
            targets = [torch.empty(target.numel, dtype=dtype, device="cuda") for target, _ in views]
            source, cpu_s = LocalFiles(index.shards), time.process_time()
            work = partial(execute_reads, plan, targets, source, threads=threads)
            spent, seconds = min((timed(work) for _ in range(2)), key=lambda found: found[1])
            cpu_s = (time.process_time() - cpu_s) / 2
            source.close()
            wrong = [
                target.name
                for (target, _), mine in [*zip(views, targets, strict=True)][:: max(1, len(views) // 5)]
                if not torch.equal(mine.cpu(), _plain(index, target.name).to(dtype))
            ]
            all_right &= not wrong
            found[f"{kind} to {dtype}, {mib} MiB, {threads} threads"] = {
                "GB/s": gigabytes_per_second(plan.cost.bytes_read, seconds),
                "CPU s": round(cpu_s, 2),
                "threads s": {timer: round(s, 2) for timer, s in spent.thread_seconds.items()},
                "reserved MiB": (torch.cuda.memory_reserved() - torch.cuda.memory_allocated()) >> 20,
                **({"wrong": wrong[:4]} if wrong else {}),
            }
            targets.clear()
            torch.cuda.empty_cache()
        for number in range(FILES):
            if (kind, dtype) != ("moe", torch.bfloat16):
                _path(setting, kind, number).unlink()
    return found, all_right


def _plain(index: Any, name: str) -> torch.Tensor:
    """The values of a tensor, read by nothing of ours."""
    entry = index.entries[name]
    with open(index.shards[entry.shard].path, "rb") as file:
        file.seek(entry.start)
        return torch.frombuffer(bytearray(file.read(entry.stop - entry.start)), dtype=torch.bfloat16)


STEPS: Mapping[str, Step] = {"facts": facts, "bus": bus, "files": files, "loops": loops, "reader": reader}
