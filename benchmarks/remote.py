"""Loads over a link of known speed and latency: how much of it is used, and what faults of the server cost.

python -m benchmarks.remote --gigabytes 1.7 --worlds 1,2 --rate 400 --latency 50

A server on the loopback, in a process of its own, gives ranges of a checkpoint's files as S3 does; all connections
together get `--rate` bytes per second, and each request waits `--latency` first. Run:ai's streamer, where it and
its plugin (runai-model-streamer-s3) are installed, reads whole tensors from the same server, on one rank.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import cached_checkpoint
from benchmarks.launch import ArmFailed, run
from benchmarks.slow_server import slow_server
from hf_zero_stream.holdings.introspection import is_streamed


ARMS = ("ours", "ours, 1 % of 503s", "Run:ai's streamer")

LARGE_BYTES = 200_000
"""A request for so much is for weights, not for headers or small files."""


@dataclass(frozen=True)
class Task:
    """One load, as every rank is told."""

    arm: str
    folder: str
    """Where the same files are on disk: only their names are looked at."""

    auto_class: str


def load(task: Task) -> dict[str, Any]:
    """Load once, with all ranks; returns this rank's figures."""
    import torch.distributed as dist

    from hf_zero_stream.reports.measures import AnonymousMemory

    work = run_ai(task) if task.arm == ARMS[2] else ours(task)
    memory = AnonymousMemory()
    with memory:
        dist.barrier()
        began = time.perf_counter()
        loaded = work()
        seconds = time.perf_counter() - began
    figures = {"seconds": seconds, "reading": seconds, "growth_bytes": memory.growth_peak, "retries": 0}
    figures["began"] = time.monotonic() - seconds
    if is_streamed(loaded):
        report = loaded.streaming_report.ranks[dist.get_rank()]
        reading = sum(report.seconds.get(phase, 0.0) for phase in ("read", "convert", "copy"))
        figures |= {"retries": report.retries, "reading": reading, "phases": report.seconds}
        figures["growth_bytes"] -= sum(parameter.ds_tensor.nbytes for parameter in loaded.parameters())
    return figures


def ours(task: Task) -> Any:
    """`from_pretrained` of the URL, under ZeRO-3."""
    import torch
    import transformers

    import hf_zero_stream

    config = transformers.AutoConfig.from_pretrained(task.folder)
    getattr(transformers, config.architectures[0])
    ds_config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    auto_class = getattr(hf_zero_stream, f"Streaming{task.auto_class}")
    return lambda: auto_class.from_pretrained("s3://bucket", dtype=torch.bfloat16, ds_config=ds_config)


def run_ai(task: Task) -> Any:
    from runai_model_streamer import SafetensorsStreamer

    def work() -> list[Any]:
        with SafetensorsStreamer() as streamer:
            streamer.stream_files(
                [f"s3://bucket/{path.name}" for path in sorted(Path(task.folder).glob("*.safetensors"))]
            )
            return [tensor.clone() for _, tensor in streamer.get_tensors()]

    return work


def main_of_rank() -> None:
    import deepspeed
    import torch

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    Path(sys.argv[2]).write_text(json.dumps(load(Task(**json.loads(sys.argv[1])))))
    torch.distributed.destroy_process_group()


def measure(settings: argparse.Namespace) -> list[dict[str, Any]]:
    checkpoint = cached_checkpoint("moe", settings.gigabytes)
    arms = [(arm, world_size) for arm in ARMS[: 1 if settings.sound else 2] for world_size in settings.worlds]
    if not settings.sound and importlib.util.find_spec("runai_model_streamer"):
        arms.append((ARMS[2], 1))
    found = []
    for repeat, (arm, world_size) in product(range(settings.repeats), arms):
        task = Task(arm, str(checkpoint.folder), checkpoint.auto_class)
        entry: dict[str, Any] = {"arm": arm, "world_size": world_size, "repeat": repeat}
        how = {"rate": settings.rate, "latency": settings.latency, "fault_every": 100 * (arm == ARMS[1])}
        try:
            with slow_server(Path(checkpoint.folder), prefix="/bucket", **how) as server:
                access = {"AWS_ENDPOINT_URL": server.address, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
                access |= {"AWS_REGION": "us-east-1", "RUNAI_STREAMER_S3_ENDPOINT": server.address}
                access |= {"RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0", "AWS_EC2_METADATA_DISABLED": "true"}
                text = json.dumps(asdict(task))
                ranks = run(text, world_size, settings.timeout, "benchmarks.remote", **access)
        except ArmFailed as error:
            entry["error"] = str(error)[-2000:]
        else:
            began = max(rank["began"] for rank in ranks)
            large = [seconds - began for seconds, _, start, stop in server.requests if stop - start >= LARGE_BYTES]
            entry |= {
                "seconds": max(rank["seconds"] for rank in ranks),
                "first": min(large),
                "reading": max(rank["reading"] for rank in ranks),
                "retries": sum(rank["retries"] for rank in ranks),
                "growth_mib": max(rank["growth_bytes"] for rank in ranks) / 2**20,
                "requests": len(server.requests),
                "bytes": server.nbytes,
                "phases": [rank.get("phases") for rank in ranks],
            }
            entry["of_the_link"] = checkpoint.nbytes / entry["reading"] / (settings.rate * 1e6)
            entry["of_the_link_in_all"] = checkpoint.nbytes / entry["seconds"] / (settings.rate * 1e6)
            if settings.requests:
                entry["asked"] = [(seconds - began, *rest) for seconds, *rest in server.requests]
        found.append(entry)
        print({key: value for key, value in entry.items() if key != "asked"}, file=sys.stderr)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Load over a link of known speed and latency.")
    parser.add_argument("--gigabytes", type=float, default=1.7)
    parser.add_argument("--worlds", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2])
    parser.add_argument("--rate", type=float, default=400, help="of the link, in units of 10^6 bytes per second")
    parser.add_argument("--latency", type=float, default=50, help="of each request, in milliseconds")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sound", action="store_true", help="without faults, and without other streamers")
    parser.add_argument("--timeout", type=float, default=600)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--requests", action="store_true", help="write each request, with its time, into the JSON")
    settings = parser.parse_args()
    found = measure(settings)
    print("| | ranks | seconds | reading | of the link | tried again | requests | growth over the partition |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for arm, world_size in dict.fromkeys((entry["arm"], entry["world_size"]) for entry in found):
        alike = [
            each for each in found if (each["arm"], each["world_size"]) == (arm, world_size) and "error" not in each
        ]
        if not alike:
            print(f"| {arm} | {world_size} | does not run | | | | | |")
            continue
        numbers = [key for key, value in alike[0].items() if isinstance(value, (int, float))]
        middle = {key: statistics.median(each[key] for each in alike) for key in alike[0] if key in numbers}
        times = f"{middle['seconds']:.2f} | {middle['reading']:.2f} | {middle['of_the_link']:.0%}"
        asked = f"{middle['retries']:.0f} | {middle['requests']:.0f}"
        print(f"| {arm} | {world_size} | {times} | {asked} | {middle['growth_mib']:.0f} MiB |")
    if settings.json:
        settings.json.write_text(
            json.dumps({"settings": vars(settings) | {"json": ""}, "runs": found}, indent=2) + "\n"
        )
    return 1 if any("error" in entry and entry["arm"] != ARMS[2] for entry in found) else 0


if __name__ == "__main__":
    if "RANK" in os.environ:
        main_of_rank()
    else:
        sys.exit(main())
