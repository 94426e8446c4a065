"""`make scale`: one rank of worlds that this machine could never hold, really executed.

Checkpoints are of true size but sparse (see :mod:`benchmarks.sparse_checkpoint`), and a *fake* process group stands
for the other ranks. Everything else is real: the public ``streaming()`` path, DeepSpeed's partitions, the reads.

    python -m benchmarks.scale --models qwen3-30b-a3b,deepseek-v3

With ``--plan`` nothing is read: DeepSeek-V3 is planned for one rank, under ZeRO-3 and where FSDP2, tensor and expert
parallelism shard it, one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


CACHE = Path(__file__).parent / ".cache"


def qwen3_30b_a3b() -> Any:
    """Source: config.json of Qwen/Qwen3-30B-A3B."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        tie_word_embeddings=False,
    )


def qwen3_235b_a22b() -> Any:
    """Source: config.json of Qwen/Qwen3-235B-A22B."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=94,
        num_attention_heads=64,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=1536,
        tie_word_embeddings=False,
    )


def deepseek_v3() -> Any:
    """The defaults of transformers' config class are those of deepseek-ai/DeepSeek-V3."""
    from transformers import DeepseekV3Config

    return DeepseekV3Config()


def kimi_k2() -> Any:
    """Source: config.json of moonshotai/Kimi-K2-Instruct, which is of DeepSeek-V3's architecture."""
    from transformers import DeepseekV3Config

    return DeepseekV3Config(
        vocab_size=163840,
        num_attention_heads=64,
        num_key_value_heads=64,
        n_routed_experts=384,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    )


MODELS: dict[str, tuple[Callable[[], Any], int]] = {
    # Named -fp8: as DeepSeek publishes its models, and dequantised on the way.
    "qwen3-30b-a3b": (qwen3_30b_a3b, 8),
    "qwen3-235b-a22b": (qwen3_235b_a22b, 64),
    "deepseek-v3": (deepseek_v3, 512),
    "deepseek-v3-fp8": (deepseek_v3, 512),
    "kimi-k2": (kimi_k2, 1024),
}

GROWTH = {
    "qwen3-30b-a3b": (8, 32, 128, 512),
    "qwen3-235b-a22b": (64, 128, 512),
    "deepseek-v3": (256, 512, 1024),
    "kimi-k2": (512, 1024, 2048),
}
"""Model -> worlds whose middle rank shows how time and memory grow with parameters and with ranks."""


def load_one_rank(folder: str, rank: int, world_size: int) -> dict[str, Any]:
    """Load `folder` as rank `rank` of a fake world; runs in a process of its own."""
    import time

    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
    }
    kwargs = {"quantization_config": FineGrainedFP8Config(dequantize=True)} if folder.endswith("-fp8") else {}
    began, cpu = time.perf_counter(), time.process_time()
    import hf_zero_stream  # a user waits for it, too

    with hf_zero_stream.streaming():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, ds_config=config, **kwargs)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    (report,) = model.streaming_report.to_dict()["ranks"]
    partition = sum(param.ds_tensor.numel() * param.ds_tensor.element_size() for param in model.parameters())
    return {
        "rank": rank,
        "world_size": world_size,
        "parameters": sum(param.ds_numel for param in model.parameters()),
        "tensors": len(json.loads((Path(folder) / "model.safetensors.index.json").read_text())["weight_map"]),
        "seconds": seconds,
        "cpu_seconds": cpu,
        "plan_seconds": report["seconds"]["index"] + report["seconds"]["plan"],
        "bytes_read": report["bytes_read"],
        "reads": report["reads"],
        "partition_bytes": partition,
        "growth_bytes": report["anonymous_growth_peak"],
    }


SHARDINGS: dict[str, dict[str, int]] = {
    "ZeRO-3": {},
    "fsdp 64 x tp 8": {"fsdp_size": 64, "tp_size": 8},
    "fsdp 64 x tp 8, ep 64": {"fsdp_size": 64, "tp_size": 8, "ep_size": 64},
}
PLANNED, PLANNED_WORLD, PLANNED_RANK, REPEATS = "deepseek-v3", 512, 37, 3


def plan_one_rank(folder: str, sharding: str) -> dict[str, Any]:
    """Plan `folder` for one rank of `SHARDINGS`; runs in a process of its own. The fastest of some runs counts."""
    import time

    import torch  # noqa: F401

    import hf_zero_stream

    sizes = SHARDINGS[sharding]
    kwargs = {"distributed_config": sizes} if sizes else {}
    times = []
    for _ in range(REPEATS):
        began, cpu = time.perf_counter(), time.process_time()
        planned = hf_zero_stream.plan(folder, world_size=PLANNED_WORLD, rank=PLANNED_RANK, **kwargs)
        times.append((time.perf_counter() - began, time.process_time() - cpu))
    first, (seconds, cpu_seconds) = times[0][0], min(times)
    return {
        "sharding": sharding,
        "first_seconds": first,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "bytes_needed": planned.load.cost.bytes_needed,
        "bytes_read": planned.load.cost.bytes_read,
        "reads": planned.load.cost.reads,
        "held_bytes": sum(planned.memory.partitions.values()),
    }


def plan_table(rows: list[dict[str, Any]]) -> str:
    header = ("sharding", "first plan s", "plan s", "CPU s", "need MiB", "read MiB", "reads", "hold MiB")
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for row in rows:
        seconds = (f"{row[name]:.1f}" for name in ("first_seconds", "seconds", "cpu_seconds"))
        sizes = [f"{row[name] / 2**20:.0f}" for name in ("bytes_needed", "bytes_read", "held_bytes")]
        lines.append(f"| {row['sharding']} | {' | '.join((*seconds, *sizes[:2]))} | {row['reads']} | {sizes[2]} |")
    return "\n".join(lines)


def run_rank(folder: Path, rank: int, world_size: int) -> dict[str, Any]:
    launched = {"LOCAL_RANK": "0", "RANK": str(rank), "WORLD_SIZE": str(world_size)}
    return in_own_process(["--one", str(folder), str(rank), str(world_size)], launched)


def in_own_process(arguments: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """What this module prints for `arguments`."""
    common = {"DS_ACCELERATOR": "cpu", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "benchmarks.scale", *arguments]
    whole = {**os.environ, **common, **environment}
    done = subprocess.run(command, env=whole, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def table(rows: list[tuple[str, dict[str, Any]]]) -> str:
    sizes = ("read MiB", "reads", "partition MiB", "beyond MiB")
    header = ("model", "tensors", "world", "rank", "plan s", "load s", *sizes)
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for name, row in rows:
        beyond = (row["growth_bytes"] - row["partition_bytes"]) / 2**20
        cells = (
            f"{name} ({row['parameters'] / 1e9:.0f} B)",
            row["tensors"],
            row["world_size"],
            row["rank"],
            f"{row['plan_seconds']:.1f}",
            f"{row['seconds']:.1f}",
            f"{row['bytes_read'] / 2**20:.0f}",
            row["reads"],
            f"{row['partition_bytes'] / 2**20:.0f}",
            f"{beyond:.0f}",
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Load one rank of very large worlds, for real.")
    parser.add_argument("--models", default=",".join(MODELS), help="names, separated by commas")
    parser.add_argument("--worlds", default="", help="world sizes, separated by commas; default: one for each model")
    parser.add_argument("--growth", action="store_true", help="instead: the middle rank of several worlds")
    parser.add_argument("--plan", action="store_true", help="instead: plan one rank, under ZeRO-3 and sharded")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder for the sparse checkpoints")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("--one", nargs=3, metavar=("FOLDER", "RANK", "WORLD"), help=argparse.SUPPRESS)
    parser.add_argument("--plan-one", nargs=2, metavar=("FOLDER", "SHARDING"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.plan_one:
        print(json.dumps(plan_one_rank(*arguments.plan_one)))
        return
    if arguments.one:
        folder, rank, world_size = arguments.one
        print(json.dumps(load_one_rank(folder, int(rank), int(world_size))))
        return
    from benchmarks.sparse_checkpoint import make_sparse_checkpoint

    if arguments.plan:
        folder = make_sparse_checkpoint(arguments.cache / f"sparse-{PLANNED}", MODELS[PLANNED][0]())
        found = [in_own_process(["--plan-one", str(folder), sharding], {}) for sharding in SHARDINGS]
        print(plan_table(found))
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")
        return
    rows: list[tuple[str, dict[str, Any]]] = []
    for name in arguments.models.split(","):
        make_config, default_world = MODELS[name]
        folder = make_sparse_checkpoint(arguments.cache / f"sparse-{name}", make_config(), name.endswith("-fp8"))
        worlds = [int(world) for world in arguments.worlds.split(",")] if arguments.worlds else [default_world]
        if arguments.growth:
            worlds = list(GROWTH.get(name, ()))
        for world_size in worlds:
            for rank in [world_size // 2] if arguments.growth else sorted({0, world_size // 2, world_size - 1}):
                rows.append((name, run_rank(folder, rank, world_size)))
                print(table(rows[-1:]).splitlines()[-1], file=sys.stderr)
    print(table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps([{"model": name, **row} for name, row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
