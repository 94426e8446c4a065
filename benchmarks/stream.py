"""Weights of a training for an engine beside it: stock's loop of gathers, and a weight stream.

    python -m benchmarks.stream                       # a 0.7 GB Qwen3-MoE, ZeRO-3 on 2 ranks, 5 passes of each
    python -m benchmarks.stream --gigabytes 3.4 --worlds 2,4 --json stream.json

One training gives all its tensors away, in turns by all ways: as TRL does it, each parameter is gathered on all ranks,
and by a weight stream in buckets, which is in the hub's layout. `stock, packed`: what vLLM's packer makes of stock's:
chunks of up to 1 GB, of copies. `ours, direct`: nothing is gathered, and each rank sends what it holds to a server, a
process of its own that puts tensors together; `changes`: one element of a hundred is another, and no others are sent.
`stock, TRL`: a sync of TRL's own GRPO, with its client and vLLM's packer, to a server in a process of its own that
only takes the bytes; `ours, TRL`: the same call inside of `streaming()`, to another such server. The other ways send
nothing. On a CPU DeepSpeed gathers through shared memory where all ranks are on one host, and by gloo where they are
not: `--gathers` chooses. A stream sends by gloo. `copies`: rank 0 alone copies as many bytes, of any values, into new
memory, bucket by bucket: no way with one sender takes less. Growth is that of anonymous memory, beside what the
training holds. All give the same values, or the exit code is 1.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import machine
from benchmarks.checkpoints import cached_checkpoint
from benchmarks.launch import run
from examples.vllm_on_cpu import Group, free_port, stand_in
from hf_zero_stream.plugins.stream.receiver import Receiver
from hf_zero_stream.reports.measures import AnonymousMemory
from tests.support.engine_servers import DirectServer, VLLMServer


ARMS = ("copies", "ours", "ours, direct", "ours, changes", "stock", "stock, packed", "ours, TRL", "stock, TRL")
UNCOMPARED = ("copies", "ours, changes")
CONFIG = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
PACKER_BYTES = 1 << 30


def gathered(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    import deepspeed

    for name, param in model.named_parameters():
        with deepspeed.zero.GatheredParameters([param]):
            yield name, param.data


def copies(nbytes: int, bucket_bytes: int) -> Iterator[torch.Tensor]:
    bucket = torch.ones(bucket_bytes, dtype=torch.uint8)
    for at in range(0, nbytes, bucket_bytes):
        yield bucket[: nbytes - at].clone()


def sum_of(tensor: torch.Tensor) -> int:
    """A number that depends on every element; sums of tensors may be added. Takes no memory."""
    return int(tensor.reshape(-1).view(torch.int64).sum())


def packed(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[torch.Tensor]:
    """The chunks that vLLM's packer makes of tensors."""
    chunk: list[torch.Tensor] = []
    size = 0
    for _, tensor in tensors:
        chunk.append(tensor.contiguous().view(-1).view(torch.uint8))
        size += tensor.nbytes
        if size > PACKER_BYTES:
            yield torch.cat(chunk)
            chunk, size = [], 0
    if chunk:
        yield torch.cat(chunk)


def broadcast_packed(iterator: Any, group: Group, src: int, post_iter_func: Any) -> None:
    """In place of vLLM's function, which copies on a GPU's streams."""
    for chunk in packed(iterator):
        group.broadcast(chunk, src)


class Summing(VLLMServer):
    """It keeps nothing of an update, and says the sum of what it got."""

    sum = 0

    def answer(self, path: str, body: Any) -> Any:
        match path:
            case "start_weight_update":
                self.sum = 0
            case "finish_weight_update":
                pass
            case "sum":
                return self.sum
            case _:
                return super().answer(path, body)
        return {}


class Engine(Summing, DirectServer):
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
            case _:
                return super().answer(path, body)
        return {}


class Taker(Summing):
    """It takes what is broadcast: the sum is that of all chunks."""

    def take(self, names: list[str], dtypes: list[str], shapes: list[list[int]]) -> None:
        numel = sum(torch.Size(shape).numel() for shape in shapes)
        chunk = torch.empty(numel, dtype=getattr(torch, dtypes[0])).view(torch.uint8)
        self.receive(chunk)
        self.sum += sum_of(chunk)


def serve(source: str, urls: Any) -> None:
    torch.set_num_threads(1)
    urls.put([kind(source).url for kind in (Engine, Engine, Taker, Taker)])
    threading.Event().wait()


def generation_of_trl(model: Any, url: str) -> Any:
    """What syncs in TRL's GRPO, without its trainer."""
    from trl.distributed import DistributedBackend
    from trl.generation import vllm_client
    from trl.generation.vllm_generation import VLLMGeneration

    state = SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=3), fsdp_plugin=None)
    generation: Any = object.__new__(VLLMGeneration)
    generation.model, generation.mode = model, "server"
    generation.accelerator = SimpleNamespace(is_main_process=dist.get_rank() == 0, state=state)
    generation._dist, generation._weight_metadata = DistributedBackend(generation.accelerator), None
    if dist.get_rank() == 0:
        vars(vllm_client)["packed_nccl_broadcast_producer"] = broadcast_packed
        generation.vllm_client = vllm_client.VLLMClient(base_url=url, group_port=free_port())
        generation.vllm_client.init_communicator()
    return generation


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
    nbytes = sum(each.dtype.itemsize * torch.Size(each.shape).numel() for each in stream.metadata)
    servers = [""] * 4
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
    synced = {"ours, TRL": hf_zero_stream.streaming, "stock, TRL": nullcontext}
    urls_of = dict(zip(("ours, direct", "ours, changes", *synced), servers, strict=True))
    first_s = {}
    with tempfile.TemporaryDirectory() as folder:
        stand_in(Path(folder))
        generations = {arm: generation_of_trl(engine.module, urls_of[arm]) for arm in synced}
    for arm, generation in generations.items():
        began = time.perf_counter()
        with synced[arm]():
            generation.sync_weights()
        dist.barrier()
        first_s[arm] = time.perf_counter() - began
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    for _ in range(repeats):
        change(engine.module)
        for arm, runs in found.items():
            dist.barrier()
            with AnonymousMemory() as memory:
                began = time.perf_counter()
                if arm == "copies":
                    total = sum(map(sum_of, copies(nbytes if dist.get_rank() == 0 else 0, bucket_bytes)))
                elif arm == "ours":
                    total = sum(sum_of(tensor) for bucket in stream for _, tensor in bucket)
                elif arm in urls_of:
                    if arm in synced:
                        with synced[arm]():
                            generations[arm].sync_weights()
                    else:
                        (direct if arm == "ours, direct" else changes).send()
                    total = _said(urls_of[arm]) if dist.get_rank() == 0 else 0
                elif arm == "stock":
                    total = sum(sum_of(tensor) if dist.get_rank() == 0 else 0 for _, tensor in gathered(engine.module))
                else:
                    tensors = gathered(engine.module)
                    total = sum(map(sum_of, packed(tensors))) if dist.get_rank() == 0 else sum(0 for _ in tensors)
                dist.barrier()
                seconds = time.perf_counter() - began
            runs.append({"seconds": seconds, "anonymous_growth_bytes": memory.growth_peak, "sum": total % 2**64})
    dist.destroy_process_group()
    return {"plan_s": plan_s, "first_s": first_s, "arms": found}


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
            if arm not in UNCOMPARED:
                sums.add(tuple(one["sum"] for one in ranks[0]["arms"][arm]))  # of each repeat
            growth = (max(one["anonymous_growth_bytes"] for one in rank["arms"][arm]) for rank in ranks)
            first, *others = (nbytes / 2**20 for nbytes in growth)
            print(
                f"| {arm} | {median(seconds):.2f} ({min(seconds):.2f} - {max(seconds):.2f}) "
                f"| {median(seconds) / stock:.2f}x | {first:.0f} | {max(others, default=0):.0f} |"
            )
        same = same and len(sums) == 1
        firsts = (f"{arm} {max(rank['first_s'][arm] for rank in ranks):.2f} s" for arm in ranks[0]["first_s"])
        print(f"first syncs: {', '.join(firsts)}; the same values: {'yes' if len(sums) == 1 else 'NO'}")
    if settings.json:
        settings.json.write_text(json.dumps(everything, indent=2) + "\n")
    return 0 if same else 1


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].startswith("["):
        Path(sys.argv[2]).write_text(json.dumps(measure(*json.loads(sys.argv[1]))))
    else:
        sys.exit(main())
