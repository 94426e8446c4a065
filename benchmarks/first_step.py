"""From the launch of a training to the end of its first step: where the time goes, stock's and ours, side by side.

    python -m benchmarks.first_step                              # a 1 GB Qwen3-MoE, 2 ranks; ZeRO-3, then FSDP2
    python -m benchmarks.first_step --ways zero3 --gigabytes 0.3 --repeats 3

Each run is a set of new processes on gloo, started as a launcher starts them, without the launcher's own seconds.
Files are in the page cache. A stage ends when the slowest rank has ended it. The losses of both arms must be equal.
"""

import argparse
import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from benchmarks.launch import run, write_figures


STAGES = ("imports", "process group", "load", "engine, or prepare", "first step")
ARMS = ("stock", "ours")
WAYS = ("zero3", "fsdp2")
WORLD_SIZE = 2
TOKENS = 64


def measure(way: str, arm: str, folder: str, launched: float) -> dict[str, Any]:
    """Seconds of each stage on this rank, and the loss of the step."""
    seconds = []

    def ends() -> None:
        seconds.append(time.time() - launched - sum(seconds))

    import torch
    import transformers
    from transformers import AutoModelForCausalLM, Trainer  # noqa: F401 - as in a script

    if way == "zero3":
        import deepspeed
    streams: Any = nullcontext()
    if arm == "ours":
        import hf_zero_stream

        streams = hf_zero_stream.streaming()
    torch.set_num_threads(1)
    ends()
    if way == "zero3":
        deepspeed.init_distributed("gloo")
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 3},
            "zero_allow_untested_optimizer": True,
        }
        kept = transformers.integrations.HfDeepSpeedConfig(config)  # noqa: F841 - as long as it lives, ZeRO-3 is on
    else:
        from tests.support.fsdp2 import announce, make_accelerator

        announce(cpu_ram_efficient_loading=True)
        accelerator = make_accelerator()
    ends()
    with streams:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        ends()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)  # AdamW's states of two ranks need a larger machine
        engine: Any
        if way == "zero3":
            engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        else:
            engine, optimizer = accelerator.prepare(model, optimizer)
    ends()
    tokens = torch.arange(TOKENS).view(1, -1) % model.config.vocab_size
    loss = engine(input_ids=tokens, labels=tokens).loss
    if way == "zero3":
        engine.backward(loss)
        engine.step()
    else:
        accelerator.backward(loss)
        optimizer.step()
    ends()
    return {"seconds": seconds, "loss": loss.item()}


def rank_main(words: str, result: Path) -> None:
    import torch.distributed as dist

    write_figures(result, measure(*json.loads(words)))
    dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Where the time goes until the first step.")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="size of the checkpoint, in units of 10^9 bytes")
    parser.add_argument("--ways", default=",".join(WAYS), help="zero3, fsdp2")
    parser.add_argument("--repeats", type=int, default=1)
    settings = parser.parse_args(arguments)

    from benchmarks import machine
    from benchmarks.checkpoints import cached_checkpoint
    from hf_zero_stream.sources.page_cache import fill_cache

    checkpoint = cached_checkpoint("moe", settings.gigabytes)
    print(f"{checkpoint.nbytes / 1e9:.2f} GB, bf16\n{machine.in_words(machine.describe(checkpoint.folder))}")
    print(f"\n| seconds | {' | '.join(STAGES)} | to the end of the first step |\n|---|{'--:|' * (len(STAGES) + 1)}")
    differing = 0
    for way in settings.ways.split(","):
        found: dict[str, list[list[float]]] = {arm: [] for arm in ARMS}
        losses = set()
        for repeat in range(settings.repeats):
            for arm in Random(f"{repeat} {way}").sample(ARMS, len(ARMS)):
                fill_cache(checkpoint.shards)
                words = json.dumps([way, arm, str(checkpoint.folder), time.time()])
                ranks = run(words, WORLD_SIZE, 1800, module="benchmarks.first_step")
                ends = [[sum(rank["seconds"][: number + 1]) for number in range(len(STAGES))] for rank in ranks]
                slowest = [max(of_stage) for of_stage in zip(*ends, strict=True)]
                found[arm].append([end - before for end, before in zip(slowest, [0.0, *slowest], strict=False)])
                losses.add(tuple(rank["loss"] for rank in ranks))
        for arm in ARMS:
            stages = [median(of_stage) for of_stage in zip(*found[arm], strict=True)]
            cells = " | ".join(f"{seconds:.1f}" for seconds in (*stages, sum(stages)))
            print(f"| {way}, {arm} | {cells} |", flush=True)
        differing += len(losses) > 1
    print("\n" + ("Losses differ." if differing else "Losses are equal."))
    return int(bool(differing))


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].startswith("["):
        rank_main(sys.argv[1], Path(sys.argv[2]))
    else:
        sys.exit(main())
