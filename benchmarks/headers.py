"""How long rank 0 takes for the headers of a checkpoint of many shards behind a URL, and a plan of it.

python -m benchmarks.headers --latency 50

The checkpoint has the headers of DeepSeek-V3 as it is published, in FP8, in as many shards, and a hole in place of the
values (see :mod:`benchmarks.sparse_checkpoint`). The server has a process of its own.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import CACHE
from benchmarks.slow_server import slow_server


SHARD_BYTES = 4_300_000_000


def seconds_of(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def read_headers(urls: list[str]) -> None:
    from hf_zero_stream.engine.opened import OpenCheckpoint
    from hf_zero_stream.ranks.coordinator import Coordinator
    from hf_zero_stream.settings.config import StreamingConfig

    with closing(OpenCheckpoint(StreamingConfig(), Coordinator(0, 1, alone=True))) as checkpoint:
        assert len(checkpoint.read_headers(urls)) == len(urls)


def make_plan(place: str) -> None:
    import transformers

    import hf_zero_stream

    dequantised = transformers.FineGrainedFP8Config(dequantize=True)
    hf_zero_stream.plan(place, world_size=512, rank=37, quantization_config=dequantised)


def main() -> None:
    from benchmarks.scale import deepseek_v3
    from benchmarks.sparse_checkpoint import make_sparse_checkpoint

    parser = argparse.ArgumentParser(description="Read the headers of DeepSeek-V3 over a link of known latency.")
    parser.add_argument("--rate", type=float, default=400, help="of the link, in units of 10^6 bytes per second")
    parser.add_argument("--latency", type=float, default=50, help="of each request, in milliseconds")
    parser.add_argument("--repeats", type=int, default=3)
    settings = parser.parse_args()
    folder: Path = CACHE / "deepseek-v3-fp8-163"
    make_sparse_checkpoint(folder, deepseek_v3(), fp8=True, shard_bytes=SHARD_BYTES)
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    works: dict[str, Callable[[str], Any]] = {
        "headers": lambda address: read_headers([f"{address}/{name}" for name in names]),
        "plan of the URL": make_plan,
        "plan of the folder": lambda address: make_plan(str(folder)),
    }
    print(f"{len(names)} shards, {settings.latency:g} ms, {settings.rate:g} MB/s")
    for what, work in works.items():
        found, counts = [], []
        for _ in range(settings.repeats):
            with slow_server(folder, rate=settings.rate, latency=settings.latency) as server:
                found.append(seconds_of(lambda work=work, server=server: work(server.address)))  # type: ignore[misc]
            counts.append(len(server.requests))
        spread = f"{min(found):.2f} to {max(found):.2f}"
        print(f"{what}: {statistics.median(found):.2f} s ({spread}), {statistics.median(counts):.0f} requests")


if __name__ == "__main__":
    main()
