"""How long `deepspeed.initialize` takes under ZeRO stage 1 or 2, and what memory, when ranks flatten together.

Stock copies all parameters into one flat buffer (DeepSpeed PR #7828, "Z1/2 init: flatten params on device", 382 s ->
130 s on 8 H100s where there is room for the copy). With `ours` each rank copies 1/N, and they gather the buffer. The
model is a stack of square linear layers; neither making nor filling it is timed.

    python -m benchmarks.engine_start                            # 1 GB of bf16, 2 ranks, gloo
    python -m benchmarks.engine_start --world 4 --stage 1 --repeats 5
    python -m benchmarks.engine_start --device cuda --world 8    # a GPU and NCCL for each rank; not run yet

On a CPU stock's last resort, flattening on the host, costs it nothing extra, so it is no row here.
"""

import argparse
import json
import os
import statistics
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.launch import run


WIDTH = 2048

# (arm, optimizer groups)
ARMS = {
    "stock": ("stock", 1),
    "ours": ("ours", 1),
    "stock, two groups": ("stock", 2),
    "ours, two groups": ("ours", 2),
}


def build(arm: str, nbytes: int, device: str) -> nn.Module:
    """A model of about `nbytes` bytes in bf16, each parameter filled with a number of its own."""
    from hf_zero_stream.plugins.flat.flatten import flatten_sharded

    layers = max(1, round(nbytes / (2 * WIDTH * WIDTH)))
    with torch.device(device):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16) for _ in range(layers)))
    for index, param in enumerate(model.parameters()):
        param.data.fill_(index + 1)
    if arm == "ours":
        flatten_sharded(model)
    return model


def optimizer_for(model: nn.Module, groups: int) -> torch.optim.Optimizer:
    """AdamW over all parameters, or over weights and biases apart."""
    if groups == 1:
        return torch.optim.AdamW(model.parameters())
    weights, biases = ([param for param in model.parameters() if param.ndim == ndim] for ndim in (2, 1))
    return torch.optim.AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0}])


def measure(arm: str, groups: int, nbytes: int, stage: int, device: str) -> dict[str, Any]:
    """Start one engine on this rank; returns seconds, bytes and a checksum of the master weights."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.engine import DeepSpeedEngine

    from hf_zero_stream.reports.measures import AnonymousMemory

    deepspeed.init_distributed("nccl" if device == "cuda" else "gloo")
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
    }
    place = get_accelerator().current_device_name()
    model = build(arm, nbytes, place)
    # What the first broadcast of a process costs is not the engine's.
    torch.distributed.broadcast(torch.zeros(1, device=place), 0)
    optimizer_seconds = 0.0
    configure = DeepSpeedEngine._configure_zero_optimizer

    def timed(self: Any, optimizer: Any) -> Any:
        nonlocal optimizer_seconds
        start = time.perf_counter()
        made = configure(self, optimizer)
        get_accelerator().synchronize()
        optimizer_seconds = time.perf_counter() - start
        return made

    DeepSpeedEngine._configure_zero_optimizer = timed
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    torch.distributed.barrier()
    with AnonymousMemory() as memory:
        start = time.perf_counter()
        engine = deepspeed.initialize(model=model, optimizer=optimizer_for(model, groups), config=config)[0]
        seconds = time.perf_counter() - start
    checksum = 0
    for master in engine.optimizer.single_partition_of_fp32_groups:
        checksum = zlib.crc32(master.detach().cpu().numpy(), checksum)
    figures = {
        "seconds": seconds,
        "optimizer_seconds": optimizer_seconds,
        "host_growth_bytes": memory.growth_peak,
        "device_growth_bytes": torch.cuda.max_memory_allocated() - before if device == "cuda" else 0,
        "checksum": f"{checksum:08x}",
    }
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description="Start of DeepSpeed's engine under ZeRO stage 1 or 2.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the model in GB of 10^9 bytes")
    parser.add_argument("--stage", type=int, choices=(1, 2), default=2)
    parser.add_argument("--world", type=int, default=2, help="number of ranks")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write every rank's figures there")
    arguments = parser.parse_args()

    names = list(ARMS)
    found: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in names}
    for repeat in range(arguments.repeats):
        # Each repeat begins with another arm, so that a change of the machine's speed meets all.
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            arm, groups = ARMS[name]
            task = {"arm": arm, "groups": groups, "nbytes": int(arguments.gigabytes * 1e9)}
            task |= {"stage": arguments.stage, "device": arguments.device}
            ranks = run(
                json.dumps(task), arguments.world, 900.0, "benchmarks.engine_start", DS_ACCELERATOR=arguments.device
            )
            found[name].append(ranks)

    where = "device_growth_bytes" if arguments.device == "cuda" else "host_growth_bytes"
    print(f"{arguments.gigabytes:g} GB bf16, stage {arguments.stage}, {arguments.world} ranks, {arguments.device}")
    print("| arm | initialize s (range) | its optimizer s | peak growth GB |")
    print("|---|--:|--:|--:|")
    for name, repeats in found.items():
        seconds = [max(rank["seconds"] for rank in ranks) for ranks in repeats]
        in_optimizer = statistics.median(max(rank["optimizer_seconds"] for rank in ranks) for ranks in repeats)
        growth = max(rank[where] for ranks in repeats for rank in ranks)
        print(
            f"| {name} | {statistics.median(seconds):.2f} "
            f"({min(seconds):.2f} - {max(seconds):.2f}) | {in_optimizer:.2f} | {growth / 1e9:.2f} |"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    checksums = {(ARMS[name][1], tuple(rank["checksum"] for rank in ranks)) for name in names for ranks in found[name]}
    if len(checksums) != len({groups for _, groups in ARMS.values()}):
        print("master weights differ between the arms", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].startswith("{"):
        if json.loads(sys.argv[1])["device"] == "cpu":
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        Path(sys.argv[2]).write_text(json.dumps(measure(**json.loads(sys.argv[1]))))
    else:
        sys.exit(main())
