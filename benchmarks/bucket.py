"""Saving a ZeRO-3 model into a bucket: ours, and obstore alone putting as many bytes from each rank (the limit).

    python -m benchmarks.bucket                                      # a 0.4 GB Qwen3-MoE, 2 ranks, moto's S3
    python -m benchmarks.bucket --link 50                            # ... behind a link of 50 MB/s
    python -m benchmarks.bucket --server azure --repeats 3           # Azurite, if it is installed

The server runs in a process of its own, on the same cores. Both arms begin with the model loaded (or the bytes in
memory) and end when all objects are there; they take turns in the same processes. A rank of ours may take two parts
and 64 MiB of memory.
"""

import argparse
import json
import math
import multiprocessing
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import machine
from benchmarks.checkpoints import cached_checkpoint
from benchmarks.launch import run
from benchmarks.rank import seconds_of
from benchmarks.save import CONFIG
from tests.support.buckets import ACCOUNT, BUCKET, Requests, azure_container, s3_bucket


ARMS = ("ours", "obstore")
URLS = {"s3": f"s3://{BUCKET}/saved", "azure": f"az://{ACCOUNT}/{BUCKET}/saved"}


def measure(source: str, url: str, shard_bytes: int, repeats: int) -> dict[str, Any]:
    """Save by both arms in turn, with all ranks; returns this rank's seconds and bytes."""
    import deepspeed
    import obstore

    import hf_zero_stream
    from hf_zero_stream.plugins.remote.files import open_store
    from hf_zero_stream.plugins.remote.objects import RemoteFolder, part_bytes
    from hf_zero_stream.plugins.remote.urls import joined, located

    deepspeed.init_distributed("gloo")
    model = hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(source, ds_config=CONFIG)
    nbytes = sum(param.ds_tensor.nbytes for param in model.parameters())
    values = torch.ones(nbytes, dtype=torch.uint8)
    RemoteFolder(url).names()
    store, key = located(joined(url, f"raw-{dist.get_rank()}"))
    opened = open_store(store, {})
    grown = [0]

    def save() -> None:
        report = hf_zero_stream.save_pretrained(model, url, max_shard_size=shard_bytes)
        grown.append(max(rank.anonymous_growth_peak for rank in report.ranks))

    def put() -> None:
        obstore.put(opened, key, memoryview(values.numpy()))
        dist.barrier()

    found: dict[str, Any] = {arm: [] for arm in ARMS}
    for repeat in range(repeats):
        for arm in Random(repeat).sample(ARMS, len(ARMS)):
            dist.barrier()
            seconds, _ = seconds_of(save if arm == "ours" else put)
            found[arm].append(seconds)
    dist.destroy_process_group()
    return {**found, "grown": max(grown), "allowed": 2 * part_bytes(shard_bytes) + 64 * 2**20}


def link(bytes_per_s: float) -> Callable[[int], None]:
    """A link that all connections share: takes as long as `nbytes` need behind what others send."""
    lock = threading.Lock()

    def pace(nbytes: int) -> None:
        with lock:
            time.sleep(nbytes / bytes_per_s)

    return pace


def serve(kind: str, bytes_per_s: float, pipe: Any) -> None:
    """An empty bucket, until the other end of the pipe is closed; what was put there is counted."""
    requests = Requests(pace=link(bytes_per_s))
    with tempfile.TemporaryDirectory() as folder:
        with s3_bucket(Path(folder), requests) if kind == "s3" else azure_container(Path(folder)) as environment:
            pipe.send(environment)
            pipe.recv()
            shards = [it for it in requests.seen if it[0] == "PUT" and ".safetensors" in it[1]]
            pipe.send(sum(nbytes for _, _, nbytes in shards))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare saves into a bucket with what obstore alone needs.")
    parser.add_argument("--gigabytes", type=float, default=0.4, help="size of the checkpoint, in units of 10^9 bytes")
    parser.add_argument("--shard-megabytes", type=int, default=220)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--server", choices=sorted(URLS), default="s3")
    parser.add_argument("--link", type=float, default=math.inf, help="MB/s that a link to moto gives all ranks")
    settings = parser.parse_args(arguments)
    checkpoint = cached_checkpoint("moe", settings.gigabytes, fp32=False)
    print(f"{checkpoint.nbytes / 1e9:.2f} GB, bf16\n{machine.in_words(machine.describe(checkpoint.folder))}")
    mine, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(
        target=serve, args=(settings.server, settings.link * 1e6, theirs)
    )
    server.start()
    try:
        environment = mine.recv()
        task = [str(checkpoint.folder), URLS[settings.server], settings.shard_megabytes * 10**6, settings.repeats]
        ranks = run(json.dumps(task), settings.world, 1800, module="benchmarks.bucket", **environment)
        mine.send(None)
        sent = mine.recv()
    finally:
        server.terminate()
        server.join()
    of_arms = {arm: [max(each) for each in zip(*(rank[arm] for rank in ranks), strict=True)] for arm in ARMS}
    print("\n| arm | seconds (range) | of obstore |\n|---|--:|--:|")
    for arm, seconds in of_arms.items():
        ratio = median(one / other for one, other in zip(seconds, of_arms["obstore"], strict=True))
        print(f"| {arm} | {median(seconds):.2f} ({min(seconds):.2f} - {max(seconds):.2f}) | {ratio:.2f}x |")
    grown, allowed = (max(rank[key] for rank in ranks) / 2**20 for key in ("grown", "allowed"))
    print(f"\nA rank of ours grew by at most {grown:.0f} MiB; allowed are {allowed:.0f} MiB.")
    if settings.server == "s3":
        times = sent / checkpoint.nbytes / settings.repeats
        print(f"Ours sent each byte {times:.3f} times, headers of requests not counted.")
    return 0


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].startswith("["):
        torch.set_num_threads(1)
        Path(sys.argv[2]).write_text(json.dumps(measure(*json.loads(sys.argv[1]))))
    else:
        sys.exit(main())
