"""Models that DTensor shards: loads by ``distributed_config=`` and by accelerate, and saves, stock's and ours.

    python -m benchmarks.sharded                          # a 1 GB Qwen3-MoE, 2 ranks, 5 repeats
    python -m benchmarks.sharded --ways tp2 --repeats 3 --json sharded.json

Each run is a set of new processes on gloo. A load is timed as `benchmarks.rank` does, from a barrier on, with the
files in the page cache. It is the first of its process, with its imports; `again` is the second. Stock reads through
mapped files, whose bytes nothing counts, so bytes read are ours alone.
Under `accelerate` it is ``from_pretrained`` and ``Accelerator.prepare``, with FSDP2's efficient loading on rank 0;
DeepSpeed, which ``prepare`` imports where it is installed, is imported before.
A save begins with the model loaded by us, and ends when fsync says that the files are on the disk. What all arms
loaded or saved must be the same, bit for bit, or the exit code is 1.
"""

import argparse
import json
import shutil
import sys
import tempfile
import zlib
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from benchmarks import machine
from benchmarks.checkpoints import Checkpoint, cached_checkpoint
from benchmarks.launch import run, write_figures
from benchmarks.rank import seconds_of, timed_load
from benchmarks.save import sync
from hf_zero_stream.reports.measures import AnonymousMemory
from tests.support.fsdp2 import announce, make_accelerator


WAYS = {"fsdp2": {"fsdp_size": 2}, "tp2": {"tp_size": 2}}
ARMS = ("stock", "ours")
WORLD_SIZE = 2

Figures = dict[str, Any]


def measure(arm: str, what: str, folder: str, target: str) -> Figures:
    """One load (`what` is a way or ``"accelerate"``) or one save (``"save"``) with all ranks; this rank's figures."""
    import transformers
    from transformers import Trainer  # noqa: F401 - as in a script that trains
    from transformers.distributed import DistributedConfig

    import hf_zero_stream

    config = transformers.AutoConfig.from_pretrained(folder)
    model_class = getattr(transformers, config.architectures[0])

    def load(arm: str, **kwargs: Any) -> Any:
        with hf_zero_stream.streaming() if arm == "ours" else nullcontext():
            return model_class.from_pretrained(folder, **kwargs)

    if what == "save":
        return _save(arm, load("ours", distributed_config=DistributedConfig(**WAYS["fsdp2"])), Path(target))
    if what == "accelerate":
        import deepspeed  # noqa: F401 - otherwise accelerate imports it in prepare, whoever has loaded the model

        announce(cpu_ram_efficient_loading=True)
        accelerator = make_accelerator()

        def work() -> Any:
            model = load(arm)
            prepared, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))  # accelerate wants one
            return prepared
    else:

        def work() -> Any:
            return load(arm, distributed_config=DistributedConfig(**WAYS[what]))

    model, figures = timed_load(work, sorted(Path(folder).glob("*.safetensors")), "warm")
    if arm == "ours":
        report = model.streaming_report.ranks[dist.get_rank()]
        figures |= {"bytes_needed": report.bytes_needed, "bytes_read": report.bytes_read, "reads": report.reads}
    figures |= _held(model)
    del model
    figures["seconds_again"], _ = seconds_of(work)
    return figures


def _held(model: torch.nn.Module) -> Figures:
    """Bytes of the local shards, and a checksum of them."""
    nbytes = checksum = 0
    for name, param in sorted(model.named_parameters()):
        local = (param.to_local() if isinstance(param, DTensor) else param).detach().contiguous()
        nbytes += local.nbytes
        checksum = zlib.crc32(local.view(-1).view(torch.uint8).numpy(), zlib.crc32(name.encode(), checksum))
    return {"owned_bytes": nbytes, "digest": checksum}


def _save(arm: str, model: Any, folder: Path) -> Figures:
    import hf_zero_stream

    def work(name: str) -> None:
        if arm == "ours":
            hf_zero_stream.save_pretrained(model, folder / name)
        else:
            model.save_pretrained(folder / name)
        if dist.get_rank() == 0:
            for path in (folder / name).iterdir():
                sync(path)
        dist.barrier()

    with AnonymousMemory() as memory:
        seconds, _ = seconds_of(partial(work, "first"))
    again, _ = seconds_of(partial(work, "second"))
    digest = {path.name: zlib.crc32(path.read_bytes()) for path in sorted(folder.glob("*/*"))}
    return {
        "seconds": seconds,
        "seconds_again": again,
        "anonymous_growth_bytes": memory.growth_peak,
        "digest": digest,
    }


def run_one(arm: str, what: str, checkpoint: Checkpoint) -> list[Figures]:
    """One load or save by new processes; what was saved is removed again."""
    folder = tempfile.mkdtemp(prefix="save-", dir=checkpoint.folder.parent)
    try:
        task = json.dumps([arm, what, str(checkpoint.folder), folder])
        return run(task, WORLD_SIZE, 900, module="benchmarks.sharded")
    finally:
        shutil.rmtree(folder)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare loads and saves of sharded models with stock's.")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the checkpoint, in units of 10^9 bytes")
    parser.add_argument("--ways", default="fsdp2,tp2,accelerate,save", help="what to measure, of these")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run")
    settings = parser.parse_args(arguments)
    checkpoint = cached_checkpoint("moe", settings.gigabytes)
    print(f"{checkpoint.nbytes / 1e9:.2f} GB, bf16\n{machine.in_words(machine.describe(checkpoint.folder))}")
    ways = settings.ways.split(",")
    found: dict[str, dict[str, list[list[Figures]]]] = {way: {arm: [] for arm in ARMS} for way in ways}
    for repeat in range(settings.repeats):
        for way in ways:
            # In another order each time: an arm finds the disk's queue, and memory, as the one before has left them.
            for arm in Random(f"{repeat} {way}").sample(ARMS, len(ARMS)):
                found[way][arm].append(run_one(arm, way, checkpoint))
                print(f"{repeat + 1}: {way}, {arm}: {_seconds(found[way][arm][-1]):.2f} s", flush=True)
    print(
        "\n| what | arm | of ours: median, of minima | seconds (range) | shard MiB | again s | anonymous beyond it "
        "| resident beyond it | bytes read of needed | reads | same bits |\n"
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|---|"
    )
    differing = []
    for way, arms in found.items():
        same = len({json.dumps([rank["digest"] for rank in ranks]) for runs in arms.values() for ranks in runs}) == 1
        differing += [] if same else [way]
        for arm in ARMS:
            print(f"| {way} | {arm} | {' | '.join(_cells(arms[arm], arms['ours']))} | {'yes' if same else 'NO'} |")
    if settings.json:
        settings.json.write_text(json.dumps(found, indent=2) + "\n")
    return 1 if differing else 0


def _seconds(ranks: list[Figures]) -> float:
    return max(rank["seconds"] for rank in ranks)


def _cells(runs: list[list[Figures]], ours: list[list[Figures]]) -> list[str]:
    seconds, others = [_seconds(ranks) for ranks in runs], [_seconds(ranks) for ranks in ours]
    ratios = [one / other for one, other in zip(seconds, others, strict=True)]
    ranks = [rank for ranks in runs for rank in ranks]
    shard = max(rank.get("owned_bytes", 0) for rank in ranks)
    cells = [
        f"{median(ratios):.2f}x, {min(seconds) / min(others):.2f}x",
        f"{median(seconds):.2f} ({min(seconds):.2f} - {max(seconds):.2f})",
        f"{shard / 2**20:.0f}" if shard else "",
        f"{median(max(rank['seconds_again'] for rank in ranks) for ranks in runs):.2f}",
    ]
    for key in ("anonymous_growth_bytes", "resident_growth_bytes"):
        beyond = [rank[key] - rank.get("owned_bytes", 0) for rank in ranks if rank.get(key) is not None]
        cells.append(f"{max(beyond) / 2**20:.0f}" if beyond else "")
    read = [rank for rank in ranks if "bytes_read" in rank]
    cells.append(f"{max(rank['bytes_read'] / rank['bytes_needed'] for rank in read):.3f}x" if read else "")
    cells.append(f"{max(rank['reads'] for rank in read)}" if read else "")
    return cells


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].startswith("["):
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        write_figures(sys.argv[2], measure(*json.loads(sys.argv[1])))
        dist.destroy_process_group()
    else:
        sys.exit(main())
