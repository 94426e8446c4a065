"""Training state: saves by us, in the background too, and by DeepSpeed; resumes at another number of ranks.

    python -m benchmarks.state                              # 58M parameters, 2 ranks, and 3 that go on
    python -m benchmarks.state --parameters 272 --repeats 3 --json state.json

The training is ZeRO-3 in bf16 with AdamW: 14 bytes for each parameter. All arms of saving run in the same processes,
in another order in each repeat, each several times: our first save also plans, so it stands apart. A save ends when
fsync says that the files are on the disk. `raw`: each rank writes as many bytes from memory into a file of its final
size. `copy`: ``tensor.clone()`` of as many bytes; `copy over`: the same into memory that is there already. A resume
is timed as `benchmarks.rank` times a load, with the files in the page cache. What the arms of resuming loaded must be
the same, bit for bit, or the exit code is 1.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import machine
from benchmarks.checkpoints import cached_checkpoint
from benchmarks.launch import ENVIRONMENT, run, write_figures
from benchmarks.rank import seconds_of, timed_load
from benchmarks.save import sync, write_part
from hf_zero_stream.reports.measures import AnonymousMemory


COPIES = ("copy", "copy over")
SAVES = ("ours", "background", "deepspeed", "deepspeed with weights", "raw", *COPIES)
RESUMES = ("ours", "universal")
BYTES_PER_PARAMETER = 14  # weights in bf16; masters and two moments in fp32
UNIVERSAL = "global_step1_universal"

Figures = dict[str, Any]


def config_of(universal: bool = False) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": universal},
    }


def engine_of(source: str, config: dict[str, Any]) -> Any:
    import deepspeed

    import hf_zero_stream

    deepspeed.init_distributed("gloo")
    model = hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(source, ds_config=config)
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=torch.optim.AdamW(model.parameters()))
    return engine


def measure_saves(source: str, folder: str, arms: list[str], saves: int) -> dict[str, list[Figures]]:
    """`saves` saves by each of `arms` with all ranks; this rank's figures. Ours and DeepSpeed's last ones stay."""
    engine = engine_of(source, config_of())
    tokens = torch.arange(8).view(1, -1)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    nbytes = BYTES_PER_PARAMETER * sum(param.ds_tensor.numel() for param in engine.module.parameters())
    values = torch.empty(nbytes, dtype=torch.uint8)
    if {"raw", *COPIES} & set(arms):
        values.fill_(1)
    found: dict[str, list[Figures]] = {}
    for arm in arms:
        for number in range(saves):
            target = Path(folder, arm)
            if dist.get_rank() == 0:
                shutil.rmtree(target, ignore_errors=True)
            dist.barrier()
            found.setdefault(arm, []).append(_save(arm, engine, target, values))
    if dist.get_rank() == 0:
        for arm in set(arms) - {"ours", "deepspeed"}:
            shutil.rmtree(Path(folder, arm), ignore_errors=True)
    dist.destroy_process_group()
    return found


def _save(arm: str, engine: Any, target: Path, values: torch.Tensor) -> Figures:
    import hf_zero_stream

    memory_there = torch.ones_like(values) if arm == "copy over" else values
    dist.barrier()
    with AnonymousMemory() as memory:
        began = time.perf_counter()
        blocked = 0.0
        if arm == "ours":
            hf_zero_stream.save_state(engine, target)
        elif arm == "background":
            pending: Any = hf_zero_stream.save_state(engine, target, asynchronous=True)
            blocked = time.perf_counter() - began
            pending.wait()
        elif arm == "raw":
            if dist.get_rank() == 0:
                target.mkdir()
            write_part(target / "raw", memoryview(values.numpy()))
        elif arm in COPIES:
            copied = values.clone() if arm == "copy" else memory_there.copy_(values)
            blocked = time.perf_counter() - began
            del copied
        else:
            engine.save_checkpoint(str(target))
            if arm == "deepspeed with weights":
                engine.save_16bit_model(str(target))
        if dist.get_rank() == 0 and arm not in COPIES:
            for path in target.rglob("*"):
                if path.is_file():
                    sync(path)
        dist.barrier()
        seconds = time.perf_counter() - began
    return {
        "seconds": seconds,
        "blocked": blocked or seconds,
        "anonymous_growth_bytes": memory.growth_peak,
        "nbytes": values.nbytes,
    }


def measure_resume(source: str, folder: str, arm: str) -> Figures:
    """Go on from a state with all ranks; this rank's figures."""
    import hf_zero_stream

    engine = engine_of(source, config_of(universal=arm == "universal"))
    state = Path(folder, "ours") if arm == "ours" else Path(folder, "deepspeed")

    def work() -> None:
        if arm == "ours":
            hf_zero_stream.load_state(engine, state)
        else:
            engine.load_checkpoint(str(state), tag=UNIVERSAL)
        dist.barrier()

    files = [path for path in (state if arm == "ours" else state / UNIVERSAL).rglob("*") if path.is_file()]
    _, figures = timed_load(work, files, "warm")
    digest = _digest(engine)
    again, _ = seconds_of(work)
    dist.destroy_process_group()
    figures = {key: figures[key] for key in ("seconds", "anonymous_growth_bytes")}
    return figures | {"seconds_again": again, "digest": digest}


def _digest(engine: Any) -> int:
    """A checksum of this rank's masters and moments, without what DeepSpeed fills partitions up with."""
    from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

    checksum = 0
    for param in engine.module.parameters():
        states = [safe_get_local_optimizer_state(param, key) for key in ("exp_avg", "exp_avg_sq")]
        start = dist.get_rank() * param.ds_tensor.numel()
        count = max(0, min(param.ds_numel - start, param.ds_tensor.numel()))
        for values in (safe_get_local_fp32_param(param), *states):
            checksum = zlib.crc32(values[:count].contiguous().view(torch.uint8).numpy(), checksum)
    return checksum


def convert(folder: Path) -> Figures:
    """DeepSpeed's conversion of its own state for other numbers of ranks."""
    state = folder / "deepspeed"
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    folders = ["--input_folder", str(state / "global_step1"), "--output_folder", str(state / UNIVERSAL)]
    began = time.perf_counter()
    done = subprocess.run(
        [*command, *folders], env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"ds_to_universal failed:\n{done.stderr[-2000:]}")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return {"seconds": time.perf_counter() - began, "resident_peak_bytes": peak}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare saving and resuming a training with DeepSpeed's.")
    parser.add_argument("--parameters", type=float, default=58, help="of the model, in millions")
    parser.add_argument("--kind", choices=("dense", "moe"), default="dense")
    parser.add_argument("--ranks", type=int, default=2, help="that save")
    parser.add_argument("--resume-ranks", type=int, default=3)
    parser.add_argument("--saves", type=int, default=3, help="by each arm in each repeat; at least 2")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run")
    settings = parser.parse_args(arguments)
    if settings.saves < 2:
        parser.error(f"--saves: expected at least 2, as the first stands apart; got {settings.saves}")
    checkpoint = cached_checkpoint(settings.kind, settings.parameters * 2e-3)
    print(
        f"{checkpoint.nbytes / 2e6:.0f}M parameters\n{machine.in_words(machine.describe(checkpoint.folder))}",
        flush=True,
    )
    saves: dict[str, list[list[Figures]]] = {arm: [] for arm in SAVES}
    resumes: dict[str, list[Figures]] = {arm: [] for arm in RESUMES}
    conversions: list[Figures] = []
    is_same = True
    for repeat in range(settings.repeats):
        folder = tempfile.mkdtemp(prefix="state-", dir=checkpoint.folder.parent)

        def measured(ranks: int, *task: Any) -> list[Any]:
            words = json.dumps([task[0], str(checkpoint.folder), folder, *task[1:]])
            return run(words, ranks, 1800, module="benchmarks.state")

        try:
            arms = Random(repeat).sample(SAVES, len(SAVES))
            of_ranks = measured(settings.ranks, "save", arms, settings.saves)
            for arm in SAVES:
                saves[arm].append([_slowest(found) for found in zip(*(rank[arm] for rank in of_ranks), strict=True)])
            conversions.append(convert(Path(folder)))
            in_turn = Random(repeat).sample(RESUMES, len(RESUMES))
            loaded = {arm: measured(settings.resume_ranks, "resume", arm) for arm in in_turn}
            is_same &= len({json.dumps([rank.pop("digest") for rank in ranks]) for ranks in loaded.values()}) == 1
            for arm, ranks in loaded.items():
                resumes[arm].append(_slowest(ranks))
        finally:
            shutil.rmtree(folder)
        print(f"repeat {repeat + 1} of {settings.repeats}", flush=True)
    _print(saves, resumes, conversions, is_same, settings.ranks, settings.resume_ranks)
    if settings.json:
        found = {"saves": saves, "resumes": resumes, "conversions": conversions}
        settings.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if is_same else 1


def _slowest(ranks: Any) -> Figures:
    return {key: max(rank[key] for rank in ranks) for key in ranks[0]}


def _print(
    saves: dict[str, list[list[Figures]]],
    resumes: dict[str, list[Figures]],
    conversions: list[Figures],
    is_same: bool,
    save_ranks: int,
    resume_ranks: int,
) -> None:
    """Tables of medians. Of saves, the first of each process stands apart from the later ones."""
    later = {arm: [one for runs in repeats for one in runs[1:]] for arm, repeats in saves.items()}
    first = {arm: [runs[0] for runs in repeats] for arm, repeats in saves.items()}
    nbytes = first["copy"][0]["nbytes"]
    print(f"\nSaving by {save_ranks} ranks, {nbytes / 1e6:.0f} MB each")
    print(
        "| arm | first s | later s (range) | of raw | of deepspeed | blocked s (first, later) | of copy | MiB (same) |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for arm in SAVES:
        of_arm = _values(later[arm], "seconds")
        is_copy = arm in ("background", *COPIES)
        cells = [
            f"{median(_values(first[arm], 'seconds')):.2f}",
            f"{median(of_arm):.2f} ({min(of_arm):.2f} - {max(of_arm):.2f})",
            _ratio(later, arm, "raw", "seconds"),
            _ratio(later, arm, "deepspeed", "seconds"),
            f"{median(_values(first[arm], 'blocked')):.3f}, {median(_values(later[arm], 'blocked')):.3f}"
            if is_copy
            else "",
            _ratio(later, arm, "copy", "blocked") if is_copy else "",
            f"{_mebibytes(first[arm]):.0f}, {_mebibytes(later[arm]):.0f}",
        ]
        print(f"| {arm} | {' | '.join(cells)} |")
    ours, universal = (median(_values(resumes[arm], "seconds")) for arm in RESUMES)
    converted = median(_values(conversions, "seconds"))
    peak = max(_values(conversions, "resident_peak_bytes")) / 2**20
    print(f"\nResuming by {resume_ranks} ranks; the same masters and moments: {'yes' if is_same else 'NO'}")
    print("| arm | s | again s | of ours | with the conversion s | of ours | anonymous MiB |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    again = {arm: f"{median(_values(resumes[arm], 'seconds_again')):.2f}" for arm in RESUMES}
    print(f"| ours | {ours:.2f} | {again['ours']} | 1 | {ours:.2f} | 1 | {_mebibytes(resumes['ours']):.0f} |")
    both = universal + converted
    print(
        f"| universal | {universal:.2f} | {again['universal']} | {universal / ours:.1f}x | {both:.2f} "
        f"| {both / ours:.1f}x | {_mebibytes(resumes['universal']):.0f} (the conversion: {peak:.0f} resident) |"
    )


def _values(runs: list[Figures], key: str) -> list[float]:
    return [one[key] for one in runs]


def _ratio(found: dict[str, list[Figures]], arm: str, other: str, key: str) -> str:
    return f"{median(_values(found[arm], key)) / median(_values(found[other], key)):.2f}x"


def _mebibytes(runs: list[Figures]) -> float:
    return max(_values(runs, "anonymous_growth_bytes")) / 2**20


MEASURES: dict[str, Callable[..., Any]] = {"save": measure_saves, "resume": measure_resume}

if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].startswith("["):
        torch.set_num_threads(1)
        what, *task = json.loads(sys.argv[1])
        write_figures(sys.argv[2], MEASURES[what](*task))
    else:
        sys.exit(main())
