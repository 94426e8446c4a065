"""From a ZeRO checkpoint of DeepSpeed to a folder for ``from_pretrained``: ``convert``, and DeepSpeed's zero_to_fp32.

    python -m benchmarks.convert                              # 58M parameters, saved by 2 ranks at stage 3
    python -m benchmarks.convert --parameters 272 --repeats 3

Each conversion has a process of its own, and ends when fsync says that the files are on the disk. The tensors of both
must be the same, bit for bit, or the exit code is 1.
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

from benchmarks import machine
from benchmarks.checkpoints import cached_checkpoint
from benchmarks.launch import ENVIRONMENT, run
from benchmarks.save import sync
from hf_zero_stream.reports.memory import AnonymousMemory


ARMS = ("convert", "zero_to_fp32")

Figures = dict[str, float]


def measure(arm: str, zero: str, target: str) -> Figures:
    """Convert in this process."""
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict

    from hf_zero_stream.convert import convert

    with AnonymousMemory() as memory:
        began = time.perf_counter()
        if arm == "convert":
            convert(zero, target, progress=False)
        else:
            convert_zero_checkpoint_to_fp32_state_dict(zero, target, safe_serialization=True)
        for path in Path(target).glob("*.safetensors"):
            sync(path)
        seconds = time.perf_counter() - began
    return {"seconds": seconds, "anonymous_growth_bytes": memory.growth_peak}


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
    parser = argparse.ArgumentParser(description="Compare convert with DeepSpeed's zero_to_fp32.")
    parser.add_argument("--parameters", type=float, default=58, help="of the model, in millions")
    parser.add_argument("--ranks", type=int, default=2, help="that saved")
    parser.add_argument("--repeats", type=int, default=3)
    settings = parser.parse_args(arguments)
    checkpoint = cached_checkpoint("dense", settings.parameters * 2e-3)
    print(machine.in_words(machine.describe(checkpoint.folder)), flush=True)
    folder = Path(tempfile.mkdtemp(prefix="convert-", dir=checkpoint.folder.parent))
    found: dict[str, list[Figures]] = {arm: [] for arm in ARMS}
    try:
        words = json.dumps(["save", str(checkpoint.folder), str(folder), ["deepspeed"], 1])
        run(words, settings.ranks, 1800, module="benchmarks.state")
        zero = folder / "deepspeed"
        for repeat in range(settings.repeats):
            for arm in Random(repeat).sample(ARMS, len(ARMS)):
                shutil.rmtree(folder / arm, ignore_errors=True)
                found[arm].append(_in_own_process(arm, zero, folder / arm))
        same = tensors_are_same(*(folder / arm for arm in ARMS))
    finally:
        shutil.rmtree(folder)
    seconds = {arm: median(one["seconds"] for one in runs) for arm, runs in found.items()}
    print(f"\n{checkpoint.nbytes / 2e6:.0f}M parameters; the same tensors: {'yes' if same else 'NO'}")
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
        print(json.dumps(measure(*json.loads(sys.argv[1]))))
    else:
        sys.exit(main())
