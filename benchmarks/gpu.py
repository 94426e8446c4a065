"""Load a mixture-of-experts checkpoint onto a GPU: bits, device memory, and speed against a loop of pinned copies.

    python -m benchmarks.gpu --gigabytes 10
    python -m benchmarks.gpu --gigabytes 10 --world 2    # both ranks on the one device, with gloo

Not run so far: no GPU was at hand when it was written. Its arms, in turns, each in processes of their own:

ours: the streaming Auto class, onto the device. Where DeepSpeed is not installed: `load_into` a model that is there,
    on one rank.
pinned: the same bytes of each rank, read into pinned buffers and copied to the device asynchronously, by as many
    threads as `ours` has, and nothing else: no model, no partitions.
host: the same as `ours`, on a CPU, for its bits.
"""

import argparse
import json
import os
import statistics
import sys
import threading
import time
import zlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.arms import Task, digest, ours
from benchmarks.launch import run
from benchmarks.machine import describe, in_words
from benchmarks.moe_checkpoint import make_moe_checkpoint


CACHE = Path(__file__).parent / ".cache"
REQUEST_BYTES = 8 << 20
HAS_DEEPSPEED = find_spec("deepspeed") is not None


def measure(arm: str, folder: str, threads: int) -> dict[str, Any]:
    """One arm on this rank; returns seconds, and sizes in bytes."""
    if HAS_DEEPSPEED:
        import deepspeed

        deepspeed.init_distributed("gloo")
    else:
        dist.init_process_group("gloo")
    task = Task("ours", "warm", folder, "AutoModelForCausalLM", cast=False)
    if arm == "host":
        return {"digest": digest(ours(task)()) if HAS_DEEPSPEED else whole_digest(into_a_model(folder, "cpu")())}
    torch.cuda.set_device(0)
    torch.empty(1, device="cuda")  # the context of the device is nobody's time
    if arm == "pinned":
        work: Callable[[], Any] = lambda: pinned_copies(task.shards, threads)  # noqa: E731
    else:
        work = ours(task) if HAS_DEEPSPEED else into_a_model(folder, "cuda")
    for shard in task.shards:
        shard.read_bytes()  # into the page cache
    torch.cuda.reset_peak_memory_stats()
    dist.barrier()
    began = time.perf_counter()
    loaded = work()
    torch.cuda.synchronize()
    figures: dict[str, Any] = {
        "seconds": time.perf_counter() - began,
        "device_peak_bytes": torch.cuda.max_memory_allocated(),
    }
    if arm == "ours":
        (report,) = [entry for entry in loaded.streaming_report.to_dict()["ranks"] if entry["rank"] == dist.get_rank()]
        figures |= {"staging_bytes": report["staging_bytes"], "report": report}
        if HAS_DEEPSPEED:
            params = list(loaded.parameters())
            figures["kept_bytes"] = sum(param.ds_tensor.nbytes for param in params)
            for param in params:
                param.ds_tensor.data = param.ds_tensor.data.cpu()
            figures["digest"] = digest(loaded)
        else:
            figures["kept_bytes"] = sum(param.nbytes for param in loaded.parameters())
            figures["digest"] = whole_digest(loaded)
    else:
        figures["kept_bytes"] = sum(tensor.nbytes for tensor in loaded)
    dist.barrier()
    return figures


def into_a_model(folder: str, device: str) -> Callable[[], torch.nn.Module]:
    """Work that fills a model which is on the device already, and returns it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    import hf_zero_stream

    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)

    def work() -> torch.nn.Module:
        model.streaming_report = hf_zero_stream.load_into(model, folder)
        return model

    return work


def whole_digest(model: torch.nn.Module) -> str:
    """A checksum of all parameters."""
    checksum = 0
    for name, param in sorted(model.named_parameters()):
        checksum = zlib.crc32(name.encode(), checksum)
        checksum = zlib.crc32(param.detach().cpu().contiguous().view(torch.uint8).numpy(), checksum)
    return f"{checksum:08x}"


def pinned_copies(shards: list[Path], threads: int) -> list[torch.Tensor]:
    """Rank r of N copies the r-th 1/N of each shard to the device; two pinned buffers for each thread."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    targets, requests = [], []
    for path in shards:
        size = path.stat().st_size
        start, stop = size * rank // world_size, size * (rank + 1) // world_size
        targets.append(torch.empty(stop - start, dtype=torch.uint8, device="cuda"))
        file = os.open(path, os.O_RDONLY)
        for at in range(start, stop, REQUEST_BYTES):
            requests.append((file, at, targets[-1][at - start : min(at + REQUEST_BYTES, stop) - start]))
    pending, lock = iter(requests), threading.Lock()

    def work() -> None:
        stream = torch.cuda.Stream()
        buffers = [torch.empty(REQUEST_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        events = [torch.cuda.Event() for _ in range(2)]
        turn = 0
        while True:
            with lock:
                request = next(pending, None)
            if request is None:
                break
            file, at, target = request
            events[turn].synchronize()
            view = memoryview(buffers[turn].numpy())[: target.numel()]
            done = 0
            while done < len(view):
                done += os.preadv(file, [view[done:]], at + done)
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
    return targets


def main() -> None:
    parser = argparse.ArgumentParser(description="Load a checkpoint onto a GPU, against a loop of pinned copies.")
    parser.add_argument("--gigabytes", type=float, default=10.0, help="size of the checkpoint, in 10^9 bytes")
    parser.add_argument("--world", type=int, default=1, help="ranks, all on the one device")
    parser.add_argument(
        "--threads", type=int, default=0, help="reader threads of a rank; default: as the package does"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write every rank's figures there")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.gpu needs a CUDA device; for a CPU there is python -m benchmarks.bench")
    if arguments.world > 1 and not HAS_DEEPSPEED:
        sys.exit("With --world above 1 benchmarks.gpu needs DeepSpeed, which is not installed.")

    from hf_zero_stream.engine.opened import choose_threads
    from hf_zero_stream.sources.base import Hints

    folder = CACHE / f"gpu-moe-{arguments.gigabytes:g}"
    if not (folder / "config.json").exists():
        make_moe_checkpoint(folder, arguments.gigabytes * 1e9)
    threads = choose_threads(arguments.threads, 4, arguments.world, Hints(0))
    runs: dict[str, list[list[dict[str, Any]]]] = {"host": [], "ours": [], "pinned": []}
    for repeat in range(arguments.repeats):
        for arm in runs if repeat == 0 else ("ours", "pinned"):
            variables = {"DS_ACCELERATOR": "cpu" if arm == "host" else "cuda", "LOCAL_RANK": "0"}
            variables["HF_ZERO_STREAM_READER_THREADS"] = str(threads)
            task = json.dumps({"arm": arm, "folder": str(folder), "threads": threads})
            runs[arm].append(run(task, arguments.world, 1200.0, "benchmarks.gpu", **variables))

    print(f"{torch.cuda.get_device_name()}; {in_words(describe(folder))}")
    seconds = {arm: [max(rank["seconds"] for rank in ranks) for ranks in runs[arm]] for arm in ("ours", "pinned")}
    for arm, values in seconds.items():
        kept = sum(rank["kept_bytes"] for rank in runs[arm][0])
        middle = statistics.median(values)
        print(f"{arm}: {middle:.2f} s ({min(values):.2f} - {max(values):.2f}), {kept / middle / 1e9:.1f} GB/s")
    ratio = statistics.median(a / b for a, b in zip(seconds["pinned"], seconds["ours"], strict=True))
    print(f"throughput of ours: {100 * ratio:.0f}% of pinned copies (wanted: 80%)")
    for number, rank in enumerate(runs["ours"][0]):
        beyond = rank["device_peak_bytes"] - rank["kept_bytes"]
        print(f"rank {number}: partition {rank['kept_bytes'] / 2**20:.0f} MiB, device peak {beyond / 2**20:+.0f} MiB")
    same = [rank["digest"] for rank in runs["ours"][0]] == [rank["digest"] for rank in runs["host"][0]]
    print(f"bits: {'those of a load on the host' if same else 'DIFFER from those of a load on the host'}")
    if arguments.json:
        arguments.json.write_text(json.dumps(runs, indent=1) + "\n")
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].startswith("{"):
        Path(sys.argv[2]).write_text(json.dumps(measure(**json.loads(sys.argv[1]))))
    else:
        main()
