"""Loads from a shared disk of known speed and latency: a FUSE file system that passes another folder on, slowly.

python -m benchmarks.slow_disk --gigabytes 1 --latency 10 --rate 400

Needs /dev/fuse, libfuse 3 and mfusepy (of the extra `test`). Each request of the kernel waits `--latency`, and all of
them together get `--rate`. The file system has a process of its own, and each load a new mount, so nothing is cached.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import cached_checkpoint
from benchmarks.launch import ROOT, run
from hf_zero_stream.holdings.introspection import is_streamed


REQUEST_BYTES = 2**20
"""Most that the kernel asks a FUSE file system for at once."""


ARMS = (
    ("a plain loop, 8 MiB at a time", -1),
    ("streamed, 4 threads", 4),
    ("streamed, as it chooses", 0),
)


@dataclass(frozen=True)
class Task:
    """One load: by a plain loop of one thread (`threads` -1), or streamed with so many threads (0: the default)."""

    threads: int
    folder: str
    auto_class: str


@contextmanager
def slow_folder(
    folder: Path, latency: float, rate: float, log: Path | None = None, *, keeps_cache: bool = False
) -> Iterator[Path]:
    """`folder` as it looks on a slow disk, while it is mounted.

    With `log`, that file has a line for each request of the kernel: the file's name, the first byte, the size.
    With `keeps_cache` the kernel keeps a file's pages when it is opened anew, as Lustre's and NFS's clients do.
    """
    with tempfile.TemporaryDirectory(prefix="slow-") as place:
        command = [sys.executable, "-m", "benchmarks.slow_disk", "--serve", str(folder), place]
        command += ["--latency", str(latency), "--rate", str(rate)]
        command += ([] if log is None else ["--log", str(log)]) + ["--keeps-cache"] * keeps_cache
        process = subprocess.Popen(command, cwd=ROOT)
        try:
            while not os.path.ismount(place):
                if process.poll() is not None:
                    raise SystemExit("The file system was not mounted: see above.")
                time.sleep(0.05)
            yield Path(place)
        finally:
            subprocess.run(["fusermount3", "-u", "-z", place], check=False)
            process.wait(timeout=30)


def serve(folder: str, place: str, latency: float, rate: float, log: Path | None, keeps_cache: bool) -> None:
    import mfusepy

    from tests.support.http_files import Behaviour

    link, lock = Behaviour(bytes_per_second=rate * 1e6), threading.Lock()

    class Slow(mfusepy.Operations):
        use_ns = True

        def init_with_config(self, connection: Any, config: Any) -> None:
            connection.max_read = REQUEST_BYTES
            connection.max_background = connection.congestion_threshold = 64

        def getattr(self, path: str, fh: Any = None) -> dict[str, Any]:
            try:
                status = os.lstat(folder + path)
            except OSError as error:
                raise mfusepy.FuseOSError(error.errno) from error
            names = ("st_mode", "st_size", "st_nlink", "st_uid", "st_gid")
            times = {"st_mtime": status.st_mtime_ns, "st_atime": status.st_atime_ns, "st_ctime": status.st_ctime_ns}
            return {name: getattr(status, name) for name in names} | times

        def readdir(self, path: str, fh: Any) -> list[str]:
            return [".", "..", *os.listdir(folder + path)]

        def open(self, path: str, flags: int) -> int:
            return os.open(folder + path, os.O_RDONLY)

        def release(self, path: str, fh: int) -> int:
            os.close(fh)
            return 0

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            time.sleep(latency / 1e3)
            link.pace(size)
            found = os.pread(fh, size, offset)
            if log is not None:
                with lock, open(log, "a") as lines:
                    lines.write(f"{os.path.basename(path)} {offset} {len(found)}\n")
            return found

    options = {"max_read": REQUEST_BYTES, "fsname": "slow", "subtype": "slow", "kernel_cache": keeps_cache}
    mfusepy.FUSE(Slow(), place, foreground=True, ro=True, max_threads=64, **options)


def load(task: Task) -> dict[str, Any]:
    """Load once; returns seconds and what of them was reading."""
    import torch
    import transformers

    import hf_zero_stream
    import hf_zero_stream.bindings.streaming
    import hf_zero_stream.destinations.deepspeed.partitioned
    import hf_zero_stream.engine.load
    import hf_zero_stream.loading.integration  # noqa: F401 - or the load would be timed with its import

    config = transformers.AutoConfig.from_pretrained(task.folder)
    getattr(transformers, config.architectures[0])
    ds_config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    settings = hf_zero_stream.StreamingConfig(reader_threads=max(0, task.threads), progress=False)

    def stream() -> Any:
        with hf_zero_stream.streaming(settings):
            auto_class = getattr(transformers, task.auto_class)
            return auto_class.from_pretrained(task.folder, dtype=torch.bfloat16, ds_config=ds_config)

    work: Callable[[], Any] = stream if task.threads >= 0 else lambda: plain_loop(Path(task.folder))
    began = time.perf_counter()
    loaded = work()
    seconds = time.perf_counter() - began
    figures = {"seconds": seconds, "reading": seconds}
    if is_streamed(loaded):
        (report,) = loaded.streaming_report.ranks
        figures["reading"] = sum(report.seconds.get(phase, 0.0) for phase in ("read", "convert", "copy"))
    return figures


def plain_loop(folder: Path) -> list[bytearray]:
    """All shards, one after the other, in requests of 8 MiB."""
    loaded = []
    for path in sorted(folder.glob("*.safetensors")):
        target = bytearray(path.stat().st_size)
        view, done = memoryview(target), 0
        file = os.open(path, os.O_RDONLY)
        while done < len(view):
            done += os.preadv(file, [view[done : done + 8 * 2**20]], done)
        os.close(file)
        loaded.append(target)
    return loaded


def main_of_rank() -> None:
    import deepspeed
    import torch

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    Path(sys.argv[2]).write_text(json.dumps(load(Task(**json.loads(sys.argv[1])))))
    torch.distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description="Load from a file system of known speed and latency.")
    parser.add_argument("--gigabytes", type=float, default=1)
    parser.add_argument("--rate", type=float, default=400, help="in units of 10^6 bytes per second")
    parser.add_argument("--latency", type=float, default=10, help="of each request of the kernel, in milliseconds")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--serve", nargs=2, metavar=("FOLDER", "PLACE"), help=argparse.SUPPRESS)
    parser.add_argument("--log", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--keeps-cache", action="store_true", help=argparse.SUPPRESS)
    settings = parser.parse_args()
    if settings.serve:
        serve(*settings.serve, settings.latency, settings.rate, settings.log, settings.keeps_cache)
        return
    checkpoint = cached_checkpoint("moe", settings.gigabytes)
    print(f"{settings.latency:g} ms, {settings.rate:g} MB/s, {checkpoint.nbytes / 1e9:.2f} GB")
    print("| | reading s | MB/s | of the link | in all s |\n|---|--:|--:|--:|--:|")
    for what, threads in ARMS:
        found = []
        for _ in range(settings.repeats):
            with slow_folder(checkpoint.folder, settings.latency, settings.rate) as place:
                task = Task(threads, str(place), checkpoint.auto_class)
                found += run(json.dumps(asdict(task)), 1, 600, "benchmarks.slow_disk")
        reading = statistics.median(each["reading"] for each in found)
        speed = checkpoint.nbytes / reading / 1e6
        in_all = statistics.median(each["seconds"] for each in found)
        print(f"| {what} | {reading:.2f} | {speed:.0f} | {speed / settings.rate:.0%} | {in_all:.2f} |", flush=True)


if __name__ == "__main__":
    if "RANK" in os.environ:
        main_of_rank()
    else:
        main()
