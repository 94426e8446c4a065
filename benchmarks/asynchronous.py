"""Saves of a training in the background: ours, ours with a whole copy, DCP's ``async_save``, and stock's, waited for.

    python -m benchmarks.save --asynchronous                                       # one process, plain AdamW in fp32
    python -m benchmarks.save --asynchronous --home zero3 --ranks 2                # ZeRO-3 in bf16
    python -m benchmarks.save --asynchronous --parameters 29 --tokens 512 --repeats 5

An arm trains in a process of its own. It makes steps without a save, then saves again and again, and trains on until
the files are there. `call`: seconds until the save returns, the first of its process apart. `of a step`: the later
calls over the median step; `computing`: the processor's time that the calling thread took in them, which other
programs disturb less. `step beside`: steps that begin while the save goes on, over those without one. `held`: how
long the optimizer's steps waited. `host MiB`: the growth of anonymous memory from the call to the end, the first
save's apart; `of the state`: over the bytes that are saved. Stock is ``torch.save`` of both state dicts, or
``engine.save_checkpoint`` under ZeRO-3. With one thread of computing for each rank, the writer has a core to itself
as far as there are more cores than ranks.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import machine
from benchmarks.checkpoints import cached_checkpoint
from benchmarks.launch import run, write_figures
from hf_zero_stream.reports.measures import AnonymousMemory


ARMS = {"plain": ("ours", "whole copy", "dcp", "stock"), "zero3": ("ours", "whole copy", "stock")}
STEPS_BEFORE = 4
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
    "zero_allow_untested_optimizer": True,
}

Figures = dict[str, Any]


def _training(home: str, source: str, tokens: int) -> tuple[Any, Any, Callable[[], None]]:
    """What is trained, its optimizer (None: the engine's own), and a step."""
    import transformers

    import hf_zero_stream

    batch = torch.arange(tokens).view(1, -1) % 100
    if home == "zero3":
        import deepspeed

        deepspeed.init_distributed("gloo")
        model = hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(source, ds_config=CONFIG)
        engine, *_ = deepspeed.initialize(model=model, config=CONFIG, optimizer=torch.optim.AdamW(model.parameters()))

        def engine_step() -> None:
            engine.backward(engine(input_ids=batch, labels=batch).loss)
            engine.step()

        return engine, None, engine_step
    with hf_zero_stream.streaming():
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def step() -> None:
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def _begun(arm: str, trained: Any, optimizer: Any, folder: Path) -> tuple[Callable[[], bool], Callable[[], float]]:
    """Save; returns what says whether the files are there, and what waits for them and says how long steps waited."""
    import hf_zero_stream

    if arm in ("ours", "whole copy"):
        own = {"optimizer": optimizer, "snapshot_bytes": "all" if arm == "whole copy" else None}
        pending: Any = hf_zero_stream.save_state(trained, folder, asynchronous=True, keep_older=False, **own)
        rank = dist.get_rank() if dist.is_initialized() else 0
        return lambda: pending.done, lambda: pending.wait().ranks[rank].seconds["held"]
    if arm == "dcp":
        import torch.distributed.checkpoint as dcp

        state = {"model": trained.state_dict(), "optimizer": optimizer.state_dict()}
        future: Any = dcp.async_save(state, checkpoint_id=str(folder), no_dist=True)
        return future.done, lambda: float(future.result() is None)
    if optimizer is None:
        trained.save_checkpoint(str(folder))
    else:
        folder.mkdir(exist_ok=True)
        torch.save({"model": trained.state_dict(), "optimizer": optimizer.state_dict()}, folder / "state.pt")
    return lambda: True, lambda: 0.0


def measure(home: str, arm: str, source: str, folder: str, tokens: int, threads: int, saves: int) -> Figures:
    """This rank's figures."""
    torch.set_num_threads(threads)
    trained, optimizer, step = _training(home, source, tokens)

    def seconds_of_step() -> float:
        began = time.perf_counter()
        step()
        return time.perf_counter() - began

    alone = [seconds_of_step() for _ in range(STEPS_BEFORE)][1:]
    found: Figures = {"call": [], "computing": [], "write": [], "beside": [], "held": [], "growth_bytes": []}
    for number in range(saves):
        target = Path(folder, f"{arm} {number}")
        with AnonymousMemory() as memory:
            began, began_computing = time.perf_counter(), time.thread_time()
            is_done, wait = _begun(arm, trained, optimizer, target)
            found["call"].append(time.perf_counter() - began)
            found["computing"].append(time.thread_time() - began_computing)
            while not is_done():
                found["beside"].append(seconds_of_step())
            found["held"].append(wait())
            found["write"].append(time.perf_counter() - began)
        found["growth_bytes"].append(memory.growth_peak)
        if dist.is_initialized():
            dist.barrier()
        found["nbytes"] = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
        if dist.is_initialized():
            dist.barrier()
        if not dist.is_initialized() or dist.get_rank() == 0:
            shutil.rmtree(target)
        alone += [seconds_of_step() for _ in range(2)]
    found["alone"] = alone
    if dist.is_initialized():
        dist.destroy_process_group()
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Compare saves in the background with a whole copy, DCP's and stock's."
    )
    parser.add_argument("--home", choices=[*ARMS], default="plain")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--parameters", type=float, default=29, help="of the model, in millions")
    parser.add_argument("--tokens", type=int, default=2048, help="in a step of a rank; more make it longer")
    parser.add_argument("--threads", type=int, default=1, help="of computing, for each rank")
    parser.add_argument("--saves", type=int, default=3, help="in each process; at least 2")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--arms", type=lambda text: text.split(","), help="those alone, such as ours,dcp")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run")
    settings = parser.parse_args(arguments)
    if settings.saves < 2 or (settings.home == "plain" and settings.ranks != 1):
        parser.error("expected at least 2 --saves, and one of --ranks for a plain training")
    checkpoint = cached_checkpoint("dense", settings.parameters * 2e-3)
    print(f"{settings.parameters:g}M parameters\n{machine.in_words(machine.describe(checkpoint.folder))}", flush=True)
    arms = settings.arms or ARMS[settings.home]
    found: dict[str, list[list[Figures]]] = {arm: [] for arm in arms}
    for repeat in range(settings.repeats):
        for arm in Random(repeat).sample(arms, len(arms)):
            folder = tempfile.mkdtemp(prefix="asynchronous-", dir=checkpoint.folder.parent)
            of_run = [settings.home, arm, str(checkpoint.folder), folder, settings.tokens, settings.threads]
            task = json.dumps([*of_run, settings.saves])
            try:
                found[arm].append(run(task, settings.ranks, 1800, module="benchmarks.asynchronous"))
            finally:
                shutil.rmtree(folder)
            print(f"{repeat + 1} of {settings.repeats}: {arm}", flush=True)
    print(f"\n{settings.home}, ranks: {settings.ranks}, {settings.tokens} tokens a step, threads: {settings.threads}")
    of_calls = "call s (first, later) | of a step | computing s"
    print(f"| arm | step s | {of_calls} | write s | step beside | held s | host MiB | of the state |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    for arm, runs in found.items():
        print(_row(arm, [rank for ranks in runs for rank in ranks], settings.ranks))
    if settings.json:
        settings.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


def _row(arm: str, ranks: list[Figures], world_size: int) -> str:
    alone = median(seconds for each in ranks for seconds in each["alone"])
    first, later = ([call for each in ranks for call in each["call"][part]] for part in (slice(1), slice(1, None)))
    beside = [seconds for each in ranks for seconds in each["beside"]]
    grown = [max(part) for part in zip(*(_first_and_later(each["growth_bytes"]) for each in ranks), strict=True)]
    nbytes = ranks[0]["nbytes"] / world_size
    cells = [
        f"{alone:.2f}",
        f"{median(first):.3f}, {median(later):.3f}",
        f"{median(later) / alone:.1%}",
        f"{median(seconds for each in ranks for seconds in each['computing'][1:]):.3f}",
        f"{median(seconds for each in ranks for seconds in each['write']):.2f}",
        f"{median(beside) / alone:.2f}x ({len(beside)})" if beside else "",
        f"{median(seconds for each in ranks for seconds in each['held']):.3f}",
        ", ".join(f"{growth / 2**20:.0f}" for growth in grown),
        f"{max(grown) / nbytes:.2f}",
    ]
    return f"| {arm} | {' | '.join(cells)} |"


def _first_and_later(values: list[int]) -> tuple[int, int]:
    return values[0], max(values[1:])


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].startswith("["):
        write_figures(sys.argv[2], measure(*json.loads(sys.argv[1])))
    else:
        sys.exit(main())
