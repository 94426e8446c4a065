"""From other formats to safetensors: ``convert``, and what the formats' own libraries have for it.

    python -m benchmarks.convert                              # 58M parameters, saved by 2 ranks at ZeRO stage 3
    python -m benchmarks.convert --parameters 272 --repeats 3
    python -m benchmarks.convert --parameters 600 --source bin
    python -m benchmarks.convert --parameters 600 --source distcp

``zero``: DeepSpeed's zero_to_fp32. ``bin``: ``torch.load(mmap=True)`` and ``save_file`` of each file in turn.
``distcp``: dcp_to_torch_save, which writes one file of ``torch.save``, no safetensors. Each conversion has a process
of its own, and ends when fsync says that the files are on the disk. The tensors of both must be the same, bit for bit,
or the exit code is 1.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from benchmarks import machine
from benchmarks.checkpoints import cached_checkpoint
from benchmarks.launch import ENVIRONMENT, run
from benchmarks.save import sync
from hf_zero_stream.reports.measures import AnonymousMemory


ONE_FILE = "model.pt"
STOCK = {"zero": "zero_to_fp32", "bin": "torch.load", "distcp": "dcp_to_torch_save"}

Figures = dict[str, float]


def measure(arm: str, source: str, target: str) -> Figures:
    """Convert in this process."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    from hf_zero_stream.plugins.pickled.convert import convert

    Path(target).mkdir()
    if arm == "zero_to_fp32":
        from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict

    with AnonymousMemory() as memory:
        began = time.perf_counter()
        if arm == "convert":
            convert(source, target, progress=False)
        elif arm == "zero_to_fp32":
            convert_zero_checkpoint_to_fp32_state_dict(source, target, safe_serialization=True)
        elif arm == "torch.load":
            for path in sorted(Path(source).glob("*.bin")):
                tensors = torch.load(path, mmap=True, weights_only=True)
                save_file(tensors, Path(target, f"{path.stem}.safetensors"), {"format": "pt"})
        else:
            dcp_to_torch_save(source, Path(target, ONE_FILE))
        for path in Path(target).iterdir():
            sync(path)
        seconds = time.perf_counter() - began
    if arm == "dcp_to_torch_save":  # to compare the tensors
        save_file(torch.load(Path(target, ONE_FILE), mmap=True), Path(target, "model.safetensors"))
    return {"seconds": seconds, "anonymous_growth_bytes": memory.growth_peak}


def write_source(kind: str, checkpoint: Path, folder: Path) -> None:
    """The weights of `checkpoint`, safetensors, in another format (in a process of its own)."""
    folder.mkdir()
    shards = sorted(checkpoint.glob("*.safetensors"))
    if kind == "bin":
        weight_map: dict[str, str] = {}
        for shard in shards:
            tensors, name = load_file(shard), f"pytorch_{shard.stem}.bin"
            torch.save(tensors, folder / name)
            weight_map |= dict.fromkeys(tensors, name)
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    else:
        from torch.distributed import checkpoint as distributed_checkpoint

        tensors = {name: value for shard in shards for name, value in load_file(shard).items()}
        distributed_checkpoint.save(tensors, checkpoint_id=folder, no_dist=True)


def tensors_are_same(first: Path, second: Path) -> bool:
    """Whether both folders hold the same tensors; one is in memory at a time."""
    places = [
        {name: path for path in folder.glob("*.safetensors") for name in safe_open(path, "pt").keys()}  # noqa: SIM118
        for folder in (first, second)
    ]
    if places[0].keys() != places[1].keys():
        return False
    for name in places[0]:
        mine, theirs = (safe_open(place[name], "pt").get_tensor(name) for place in places)
        if mine.dtype != theirs.dtype or not torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)):
            return False
    return True


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare convert with the formats' own libraries.")
    parser.add_argument("--source", choices=STOCK, default="zero", help="format of what is converted")
    parser.add_argument("--parameters", type=float, default=58, help="of the model, in millions")
    parser.add_argument("--ranks", type=int, default=2, help="that saved the ZeRO checkpoint")
    parser.add_argument("--repeats", type=int, default=3)
    settings = parser.parse_args(arguments)
    checkpoint = cached_checkpoint("dense", settings.parameters * 2e-3)
    print(machine.in_words(machine.describe(checkpoint.folder)), flush=True)
    folder = Path(tempfile.mkdtemp(prefix="convert-", dir=checkpoint.folder.parent))
    arms = ("convert", STOCK[settings.source])
    found: dict[str, list[Figures]] = {arm: [] for arm in arms}
    try:
        if settings.source == "zero":
            words = json.dumps(["save", str(checkpoint.folder), str(folder), ["deepspeed"], 1])
            run(words, settings.ranks, 1800, module="benchmarks.state")
            source = folder / "deepspeed"
        else:
            source = folder / settings.source
            _in_own_process(settings.source, checkpoint.folder, source)
        nbytes = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
        for repeat in range(settings.repeats):
            for arm in Random(repeat).sample(arms, len(arms)):
                shutil.rmtree(folder / arm, ignore_errors=True)
                found[arm].append(_in_own_process(arm, source, folder / arm))
        same = tensors_are_same(*(folder / arm for arm in arms))
    finally:
        shutil.rmtree(folder)
    seconds = {arm: median(one["seconds"] for one in runs) for arm, runs in found.items()}
    print(f"\n{settings.source}, {nbytes / 1e6:.0f} MB; the same tensors: {'yes' if same else 'NO'}")
    print("| arm | s (range) | of convert | anonymous growth MiB |\n|---|--:|--:|--:|")
    for arm, runs in found.items():
        times = [one["seconds"] for one in runs]
        growth = max(one["anonymous_growth_bytes"] for one in runs) / 2**20
        ratio = seconds[arm] / seconds["convert"]
        print(f"| {arm} | {seconds[arm]:.2f} ({min(times):.2f} - {max(times):.2f}) | {ratio:.2f}x | {growth:.0f} |")
    return 0 if same else 1


def _in_own_process(arm: str, zero: Path, target: Path) -> Any:
    words = json.dumps([arm, str(zero), str(target)])
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.convert", words],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{arm} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("["):
        what, *folders = json.loads(sys.argv[1])
        if what in STOCK:
            print(json.dumps(write_source(what, *map(Path, folders))))
        else:
            print(json.dumps(measure(what, *folders)))
    else:
        sys.exit(main())
