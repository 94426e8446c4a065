"""Saving a ZeRO-3 model into a bucket: ours, and obstore alone putting as many bytes from each rank (the limit).

    python -m benchmarks.bucket                                      # a 0.4 GB Qwen3-MoE, 2 ranks, moto's S3
    python -m benchmarks.bucket --server azure --repeats 3           # Azurite, if it is installed

The server runs in a process of its own, on the same cores. Both arms begin with the model loaded (or the bytes in
memory) and end when all objects are there; the first request of a process is made before. `parts` is the memory that a
rank of ours may take: two parts and 64 MiB.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
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
from hf_zero_stream.reports.measures import AnonymousMemory
from tests.support.buckets import ACCOUNT, BUCKET, Requests, azure_container, s3_bucket


ARMS = ("ours", "obstore")
URLS = {"s3": f"s3://{BUCKET}/saved", "azure": f"az://{ACCOUNT}/{BUCKET}/saved"}


def measure(arm: str, source: str, url: str, shard_bytes: int) -> dict[str, Any]:
    """Save once, with all ranks; returns this rank's seconds and bytes."""
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

    def work() -> None:
        if arm == "ours":
            hf_zero_stream.save_pretrained(model, url, max_shard_size=shard_bytes)
        else:
            obstore.put(opened, key, memoryview(values.numpy()))
            dist.barrier()

    dist.barrier()
    with AnonymousMemory() as memory:
        seconds, _ = seconds_of(work)
    dist.destroy_process_group()
    return {
        "seconds": seconds,
        "bytes": nbytes,
        "anonymous_growth_bytes": memory.growth_peak,
        "allowed_bytes": 2 * part_bytes(shard_bytes) + 64 * 2**20,
    }


def serve(kind: str, pipe: Any) -> None:
    """An empty bucket, until the other end of the pipe is closed; what was put there is counted."""
    requests = Requests()
    with tempfile.TemporaryDirectory() as folder:
        with s3_bucket(Path(folder), requests) if kind == "s3" else azure_container(Path(folder)) as environment:
            pipe.send(environment)
            pipe.recv()
            shards = [it for it in requests.seen if it[0] == "PUT" and ".safetensors" in it[1]]
            pipe.send(sum(nbytes for _, _, nbytes in shards))


def run_one(arm: str, kind: str, source: Path, world_size: int, shard_bytes: int) -> dict[str, Any]:
    """One save into a new bucket; the most that any rank took."""
    mine, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(kind, theirs))
    server.start()
    try:
        environment = mine.recv()
        task = json.dumps([arm, str(source), URLS[kind], shard_bytes])
        ranks = run(task, world_size, 900, module="benchmarks.bucket", **environment)
        mine.send(None)
        sent = mine.recv()
    finally:
        server.terminate()
        server.join()
    return {**{key: max(rank[key] for rank in ranks) for key in ranks[0]}, "sent_bytes": sent}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare saves into a bucket with what obstore alone needs.")
    parser.add_argument("--gigabytes", type=float, default=0.4, help="size of the checkpoint, in units of 10^9 bytes")
    parser.add_argument("--shard-megabytes", type=int, default=220)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--server", choices=sorted(URLS), default="s3")
    settings = parser.parse_args(arguments)
    checkpoint = cached_checkpoint("moe", settings.gigabytes, fp32=False)
    print(f"{checkpoint.nbytes / 1e9:.2f} GB, bf16\n{machine.in_words(machine.describe(checkpoint.folder))}")
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    for repeat in range(settings.repeats):
        for arm in Random(repeat).sample(ARMS, len(ARMS)):
            shard_bytes = settings.shard_megabytes * 10**6
            one = run_one(arm, settings.server, checkpoint.folder, settings.world, shard_bytes)
            found[arm].append(one)
            print(f"{repeat + 1}: {arm}: {one['seconds']:.2f} s", flush=True)
    print("\n| arm | seconds (range) | of obstore | anonymous MiB | allowed MiB | bytes of shards sent |")
    print("|---|--:|--:|--:|--:|--:|")
    for arm, runs in found.items():
        seconds = [one["seconds"] for one in runs]
        ratio = median(one["seconds"] / other["seconds"] for one, other in zip(runs, found["obstore"], strict=True))
        print(
            f"| {arm} | {median(seconds):.2f} ({min(seconds):.2f} - {max(seconds):.2f}) | {ratio:.2f}x "
            f"| {max(one['anonymous_growth_bytes'] for one in runs) / 2**20:.0f} "
            f"| {runs[0]['allowed_bytes'] / 2**20:.0f} | {runs[0]['sent_bytes'] / checkpoint.nbytes:.3f}x |"
        )
    return 0


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].startswith("["):
        torch.set_num_threads(1)
        Path(sys.argv[2]).write_text(json.dumps(measure(*json.loads(sys.argv[1]))))
    else:
        sys.exit(main())
