"""Saving a ZeRO-3 model: stock's gather-and-save, ours, and plain writes of the same bytes (the limit).

    python -m benchmarks.save                                  # a 1.7 GB Qwen3-MoE, 2 ranks, 5 repeats
    python -m benchmarks.save --gigabytes 3.4 --worlds 2,4 --repeats 3 --json save.json
    python -m benchmarks.save --asynchronous                   # of a training that goes on: benchmarks/asynchronous.py

Stock is what the Trainer and accelerate do: DeepSpeed gathers all parameters on rank 0, which then calls
``save_pretrained``. `raw`: each rank writes its 1/N of as many bytes, from memory, into files of their final size. All
three begin with the model loaded (or the bytes in memory), and end when fsync says that the files are on the disk;
what that last wait took is shown apart, because stock itself does not wait. A save is the first of its process, with
its imports; `again` is the second, into another folder.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import asynchronous, machine
from benchmarks.checkpoints import cached_checkpoint
from benchmarks.launch import run
from benchmarks.rank import seconds_of
from hf_zero_stream.reports.measures import AnonymousMemory


ARMS = ("stock", "ours", "raw")
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
}
WRITE_BYTES = 8 << 20


def measure(arm: str, source: str, folder: str) -> dict[str, Any]:
    """Save twice, with all ranks; returns this rank's seconds and bytes."""
    import deepspeed

    import hf_zero_stream

    deepspeed.init_distributed("gloo")
    model = hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(source, ds_config=CONFIG)
    # Without an optimizer: what it holds is not saved here, and three times as large.
    engine, *_ = deepspeed.initialize(model=model, config=CONFIG)
    nbytes = sum(param.ds_tensor.nbytes for param in engine.module.parameters())
    values = torch.ones(nbytes, dtype=torch.uint8) if arm == "raw" else None

    def work(folder: Path) -> float:
        began = time.perf_counter()
        if arm == "ours":
            hf_zero_stream.save_pretrained(engine, folder, max_shard_size="5GB")
        elif arm == "stock":
            state_dict = engine._zero3_consolidated_16bit_state_dict()
            if dist.get_rank() == 0:
                engine.module.save_pretrained(folder, state_dict=state_dict, max_shard_size="5GB")
        else:
            folder.mkdir(exist_ok=True)
            write_part(folder / "raw", memoryview(values.numpy()))
        until_written = time.perf_counter() - began
        if dist.get_rank() == 0:
            for path in folder.iterdir():
                sync(path)
        dist.barrier()
        return until_written

    with AnonymousMemory() as memory:
        seconds, until_written = seconds_of(partial(work, Path(folder, "first")))
    again, _ = seconds_of(partial(work, Path(folder, "second")))
    dist.destroy_process_group()
    return {
        "seconds": seconds,
        "until_written": until_written,
        "seconds_again": again,
        "anonymous_growth_bytes": memory.growth_peak,
    }


def write_part(path: Path, values: memoryview) -> None:
    """This rank's part of a file that all ranks write."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        with open(path, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, len(values) * world_size)
    dist.barrier()
    handle = os.open(path, os.O_WRONLY)
    for begin in range(0, len(values), WRITE_BYTES):
        os.pwrite(handle, values[begin : begin + WRITE_BYTES], rank * len(values) + begin)
    os.fsync(handle)
    os.close(handle)
    dist.barrier()


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def run_one(arm: str, source: Path, world_size: int) -> list[dict[str, Any]]:
    """One save into a new folder, which is removed again."""
    folder = tempfile.mkdtemp(prefix="save-", dir=source.parent)
    try:
        return run(json.dumps([arm, str(source), folder]), world_size, 900, module="benchmarks.save")
    finally:
        shutil.rmtree(folder)


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    if "--asynchronous" in given:
        return asynchronous.main([each for each in given if each != "--asynchronous"])
    parser = argparse.ArgumentParser(description="Compare saving with stock's, and with plain writes.")
    parser.add_argument("--gigabytes", type=float, default=1.7, help="size of the checkpoint, in units of 10^9 bytes")
    parser.add_argument("--worlds", type=lambda text: [int(part) for part in text.split(",")], default=[2])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run")
    settings = parser.parse_args(arguments)
    checkpoint = cached_checkpoint("moe", settings.gigabytes, fp32=False)
    print(f"{checkpoint.nbytes / 1e9:.2f} GB, bf16\n{machine.in_words(machine.describe(checkpoint.folder))}")
    found: dict[int, dict[str, list[dict[str, Any]]]] = {world: {arm: [] for arm in ARMS} for world in settings.worlds}
    for repeat in range(settings.repeats):
        for world in settings.worlds:
            # In another order each time: an arm finds the disk's queue as the one before has left it.
            for arm in Random(f"{repeat} {world}").sample(ARMS, len(ARMS)):
                ranks = run_one(arm, checkpoint.folder, world)
                found[world][arm].append({key: max(rank[key] for rank in ranks) for key in ranks[0]})
                print(f"{repeat + 1}: {arm}, {world} ranks: {found[world][arm][-1]['seconds']:.2f} s", flush=True)
    for world, arms in found.items():
        print(
            f"\n{world} ranks\n"
            "| arm | seconds (range) | of raw | of ours | without the last fsync | again | anonymous MiB |"
        )
        print("|---|--:|--:|--:|--:|--:|--:|")
        for arm, runs in arms.items():
            seconds = [one["seconds"] for one in runs]
            print(
                f"| {arm} | {median(seconds):.2f} ({min(seconds):.2f} - {max(seconds):.2f}) "
                f"| {_ratio(runs, arms['raw'])} | {_ratio(runs, arms['ours'])} "
                f"| {median(one['until_written'] for one in runs):.2f} "
                f"| {median(one['seconds_again'] for one in runs):.2f} "
                f"| {max(one['anonymous_growth_bytes'] for one in runs) / 2**20:.0f} |"
            )
    if settings.json:
        settings.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


def _ratio(runs: list[dict[str, Any]], others: list[dict[str, Any]]) -> str:
    """The median over repeats of the ratio within a repeat."""
    ratios = [one["seconds"] / other["seconds"] for one, other in zip(runs, others, strict=True)]
    return f"{median(ratios):.2f}x"


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].startswith("["):
        torch.set_num_threads(1)
        Path(sys.argv[2]).write_text(json.dumps(measure(*json.loads(sys.argv[1]))))
    else:
        sys.exit(main())
