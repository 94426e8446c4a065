"""Weights of a training for an engine beside it: stock's loop of gathers, and a weight stream.

    python -m benchmarks.stream                       # a 0.7 GB Qwen3-MoE, ZeRO-3 on 2 ranks, 5 passes of each
    python -m benchmarks.stream --gigabytes 3.4 --worlds 2,4 --json stream.json

One training gives all its tensors away, in turns by all ways: as TRL does it, each parameter is gathered on all ranks,
and by a weight stream in buckets, which is in the hub's layout. `stock, packed`: what vLLM's packer makes of stock's:
chunks of up to 1 GB, of copies. `ours, direct`: nothing is gathered, and each rank sends what it holds to a server, a
process of its own that puts tensors together; `changes`: one element of a hundred is another, and no others are sent.
The other ways send nothing. On a CPU DeepSpeed gathers through shared memory where all ranks are on one host, and by
gloo where they are not: `--gathers` chooses. A stream sends by gloo. Growth is that of anonymous memory, beside what
the training holds. All give the same values, or the exit code is 1.
"""

import argparse
import json
import multiprocessing
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import machine
from benchmarks.checkpoints import cached_checkpoint
from benchmarks.launch import run
from hf_zero_stream.reports.measures import AnonymousMemory
from hf_zero_stream.stream.receiver import Receiver
from tests.support.engine_servers import DirectServer


ARMS = ("ours", "ours, direct", "ours, changes", "stock", "stock, packed")
CONFIG = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
PACKER_BYTES = 1 << 30


def gathered(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    import deepspeed

    for name, param in model.named_parameters():
        with deepspeed.zero.GatheredParameters([param]):
            yield name, param.data


def sum_of(tensor: torch.Tensor) -> int:
    """A number that depends on every element; sums of tensors may be added. Takes no memory."""
    return int(tensor.reshape(-1).view(torch.int64).sum())


def pack(tensors: Iterator[tuple[str, torch.Tensor]]) -> int:
    """Do as vLLM's packer does; the sum of all chunks."""
    chunk: list[torch.Tensor] = []
    size = total = 0
    for _, tensor in tensors:
        chunk.append(tensor.contiguous().view(-1))
        size += tensor.nbytes
        if size > PACKER_BYTES:
            total += sum_of(torch.cat(chunk))
            chunk, size = [], 0
    return total + (sum_of(torch.cat(chunk)) if chunk else 0)


class Engine(DirectServer):
    """One worker, which holds nothing: it says the sum of all tensors of an update."""

    def answer(self, path: str, body: Any) -> Any:
        match path:
            case "get_world_size":
                return {"world_size": 1}
            case "init_weight_transfer_engine":
                self._workers = [Receiver(body["init_info"], 0, torch.device("cpu"))]
            case "update_weights":
                info, (worker,) = body["update_info"], self._workers
                if info["changes"]:
                    self.sum = sum(
                        len(each.indices) for changes in worker.changes(info["buckets"]) for each in changes
                    )
                else:
                    buckets = worker.tensors(info["plan"], info["buckets"], sliced=info["sliced"])
                    self.sum = sum(sum_of(each) for tensors in buckets for _, each in tensors)
            case "finish_weight_update":
                pass
            case "sum":
                return self.sum
            case _:
                return super().answer(path, body)
        return {}


def serve(source: str, urls: Any) -> None:
    torch.set_num_threads(1)
    urls.put([Engine(source).url, Engine(source).url])
    threading.Event().wait()


def change(model: Any) -> None:
    """One element of a hundred."""
    with torch.no_grad():
        for param in model.parameters():
            param.ds_tensor.view(-1)[::100] += 1.0


def measure(source: str, repeats: int, bucket_bytes: int, gathers: str) -> dict[str, Any]:
    """Each arm `repeats` times, with all ranks; this rank's seconds and bytes."""
    import deepspeed

    import hf_zero_stream

    if gathers == "gloo":
        vars(sys.modules["deepspeed.comm.torch"])["build_shm_op"] = lambda: None
    deepspeed.init_distributed("gloo")
    model = hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(source, ds_config=CONFIG)
    engine, *_ = deepspeed.initialize(model=model, config=CONFIG)
    began = time.perf_counter()
    stream = hf_zero_stream.weight_stream(engine, bucket_bytes=bucket_bytes)
    plan_s = time.perf_counter() - began
    servers = ["", ""]
    if dist.get_rank() == 0:
        context = multiprocessing.get_context("spawn")
        urls = context.Queue()
        context.Process(target=serve, args=(source, urls), daemon=True).start()
        servers = urls.get()
    dist.broadcast_object_list(servers)
    how: dict[str, Any] = {"direct": True, "bucket_bytes": bucket_bytes}
    direct = hf_zero_stream.weight_sender(engine, servers[0], **how)
    changes = hf_zero_stream.weight_sender(engine, servers[1], deltas=True, **how)
    changes.send()
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    for _ in range(repeats):
        change(engine.module)
        for arm, runs in found.items():
            dist.barrier()
            with AnonymousMemory() as memory:
                began = time.perf_counter()
                if arm == "ours":
                    total = sum(sum_of(tensor) for bucket in stream for _, tensor in bucket)
                elif arm.startswith("ours, "):
                    (direct if arm == "ours, direct" else changes).send()
                    total = _said(servers[arm == "ours, changes"]) if dist.get_rank() == 0 else 0
                elif arm == "stock":
                    total = sum(sum_of(tensor) if dist.get_rank() == 0 else 0 for _, tensor in gathered(engine.module))
                else:
                    tensors = gathered(engine.module)
                    total = pack(tensors) if dist.get_rank() == 0 else sum(0 for _ in tensors)
                dist.barrier()
                seconds = time.perf_counter() - began
            runs.append({"seconds": seconds, "anonymous_growth_bytes": memory.growth_peak, "sum": total % 2**64})
    dist.destroy_process_group()
    return {"plan_s": plan_s, "arms": found}


def _said(url: str) -> int:
    with urllib.request.urlopen(f"{url}/sum") as answer:
        return int(json.loads(answer.read()))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare a weight stream with gathers of each parameter.")
    parser.add_argument("--gigabytes", type=float, default=0.7, help="size of the checkpoint, in units of 10^9 bytes")
    parser.add_argument("--worlds", type=lambda text: [int(part) for part in text.split(",")], default=[2])
    parser.add_argument("--bucket-mib", type=int, default=64)
    parser.add_argument("--gathers", choices=("gloo", "shared memory"), default="gloo", help="of DeepSpeed, on a CPU")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run")
    settings = parser.parse_args(arguments)
    checkpoint = cached_checkpoint("moe", settings.gigabytes, fp32=False)
    print(f"{checkpoint.nbytes / 1e9:.2f} GB, bf16\n{machine.in_words(machine.describe(checkpoint.folder))}")
    same, everything = True, {}
    for world in settings.worlds:
        task = json.dumps([str(checkpoint.folder), settings.repeats, settings.bucket_mib << 20, settings.gathers])
        ranks = everything[world] = run(task, world, 1800, module="benchmarks.stream")
        plan_s = max(rank["plan_s"] for rank in ranks)
        how = f"buckets of {settings.bucket_mib} MiB, plan {plan_s:.2f} s, gathers by {settings.gathers}"
        print(f"\n{world} ranks, {how}")
        print("| arm | s (range) | of stock | growth MiB, rank 0 | others |\n|---|--:|--:|--:|--:|")
        sums = set()
        stock = median(one["seconds"] for one in ranks[0]["arms"]["stock"])
        for arm in ARMS:
            seconds = [one["seconds"] for one in ranks[0]["arms"][arm]]
            if arm != "ours, changes":
                sums.add(tuple(one["sum"] for one in ranks[0]["arms"][arm]))  # of each repeat
            growth = (max(one["anonymous_growth_bytes"] for one in rank["arms"][arm]) for rank in ranks)
            first, *others = (nbytes / 2**20 for nbytes in growth)
            print(
                f"| {arm} | {median(seconds):.2f} ({min(seconds):.2f} - {max(seconds):.2f}) "
                f"| {median(seconds) / stock:.2f}x | {first:.0f} | {max(others, default=0):.0f} |"
            )
        same = same and len(sums) == 1
        print(f"the same values: {'yes' if len(sums) == 1 else 'NO'}")
    if settings.json:
        settings.json.write_text(json.dumps(everything, indent=2) + "\n")
    return 0 if same else 1


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].startswith("["):
        Path(sys.argv[2]).write_text(json.dumps(measure(*json.loads(sys.argv[1]))))
    else:
        sys.exit(main())
