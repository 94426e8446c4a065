"""Adapters on a mixture of experts whose weights stay in its files, beside the same training with them in memory.

    python -m benchmarks.from_files                                       # 0.9 GB in layers of 100 MB, one rank
    python -m benchmarks.from_files --ranks 2 --experts
    python -m benchmarks.from_files --arms "memory;files;nvme"            # beside DeepSpeed's offload of parameters
    python -m benchmarks.from_files --sparse --steps 2 --arms files       # 8 GB in 26 layers of 300 MB, all zeros

LoRA on attention, and with `--experts` on the fused experts too; gradient checkpointing; ZeRO-3 in bf16, told in all
arms to keep nothing in full (`stage3_max_reuse_distance` 0). The arms take turns, step by step. `cold`: the files are
dropped from the page cache before each step. `read`: bytes that all ranks have read in a step, by ``/proc/self/io``,
over those of the frozen weights. `host MiB`: the most anonymous memory of a rank over what it had before the load, its
imports. `ready`: what of it is there before the first step. `step s`: the median but for the first. `alone s`: in
which a loop of plain reads in one thread of each rank, which does nothing else, reads as many bytes of the same files
as a step, into memory that is there, and cold if the arm is. `ratio`: a step over the larger of this and the same step
in memory, the median.
"""

import argparse
import fcntl
import importlib
import json
import resource
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import machine
from benchmarks.checkpoints import CACHE
from benchmarks.launch import ArmFailed, run, write_figures
from benchmarks.moe_checkpoint import make_moe_checkpoint
from benchmarks.sparse_checkpoint import make_sparse_checkpoint
from hf_zero_stream.reports.measures import AnonymousMemory
from hf_zero_stream.sources.page_cache import drop_from_cache, fill_cache


ARMS = ("memory", "files", "files, cold")
NVME = "nvme"
"""An arm that takes long: DeepSpeed's own offload, which first writes all weights into swap files."""
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "stage3_max_reuse_distance": 0,
        "stage3_max_live_parameters": 0,
        "stage3_param_persistence_threshold": 0,
        "stage3_allgather_sequential": True,
        "reduce_bucket_size": 1000000,
    },
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}

Figures = dict[str, Any]


def measure(arm: str, folder: str, experts: bool, tokens: int, steps: int, limit: float) -> Figures:
    """This rank's figures."""
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (int(limit * 2**30),) * 2)
    import deepspeed
    import peft
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    import hf_zero_stream

    for name in ("transformers.models.qwen3_moe.modeling_qwen3_moe", "hf_zero_stream.destinations.deepspeed.live"):
        importlib.import_module(name)  # a load would
    deepspeed.init_distributed("gloo")
    config = _config(folder) if arm == NVME else CONFIG
    keeps = HfDeepSpeedConfig(config)  # noqa: F841  # transformers knows it as long as it lives
    torch.manual_seed(0)
    with AnonymousMemory() as memory:
        began = time.perf_counter()
        frozen_weights: Any = "files" if arm.startswith("files") else "memory"
        with hf_zero_stream.streaming(frozen_weights=frozen_weights):
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        found: Figures = {"load": time.perf_counter() - began, "seconds": [], "bytes": [], "losses": []}
        model.config.use_cache = False
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
        targets = {"target_modules": ["q_proj", "v_proj"], "target_parameters": EXPERTS if experts else None}
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, **targets))
        found["frozen"] = sum(p.ds_numel * p.element_size() for p in model.parameters() if not p.requires_grad)
        trained = [param for param in model.parameters() if param.requires_grad]
        engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
        engine.train()
        found["ready"] = memory.sample()
        for step in range(steps):
            with _turn(arm, folder):
                before, began = _bytes_read(), time.perf_counter()
                ids = torch.arange(tokens).view(1, -1) * (37 + step) % 1000
                loss = engine(input_ids=ids, labels=ids).loss
                engine.backward(loss)
                engine.step()
                found["seconds"].append(time.perf_counter() - began)
            found["bytes"].append(max(now - then for now, then in zip(_bytes_read(), before, strict=True)))
            found["losses"].append(loss.item())
    found["growth"] = memory.growth_peak
    found["alone"] = []
    for _ in range(3 if arm.startswith("files") else 0):
        with _turn(arm, folder):
            found["alone"].append(_seconds_alone(folder, found["bytes"][-1]))
    dist.destroy_process_group()
    return found


def _config(folder: str) -> dict[str, Any]:
    """With partitions in swap files beside the checkpoint. Each of a layer takes a buffer, as large as the largest."""
    from transformers import AutoConfig

    it = AutoConfig.from_pretrained(folder)
    largest = max(2 * it.num_experts * it.moe_intermediate_size, it.vocab_size) * it.hidden_size
    nvme = {"device": "nvme", "nvme_path": f"{folder}-swap", "buffer_count": 12, "buffer_size": largest}
    return {**CONFIG, "zero_optimization": {**CONFIG["zero_optimization"], "offload_param": nvme}}


@contextmanager
def _turn(arm: str, folder: str) -> Iterator[None]:
    """Inside, no other arm makes a step; they take turns, so that what else the machine does is the same for all."""
    import torch.distributed as dist

    paths = sorted(Path(folder).glob("*.safetensors"))
    with open(f"{folder}.turn", "w") as file:
        if dist.get_rank() == 0:
            fcntl.flock(file, fcntl.LOCK_EX)
            if arm.endswith("cold"):
                drop_from_cache(paths)
            elif arm == "files":
                fill_cache(paths)
        dist.barrier()
        yield
        dist.barrier()
        time.sleep(0.3)  # until nothing is read ahead any more


def _seconds_alone(folder: str, nbytes: int) -> float:
    """Seconds in which this rank, beside the others, reads `nbytes` of the files, from its share of them on."""
    import torch.distributed as dist

    paths = sorted(Path(folder).glob("*.safetensors"))
    first = len(paths) * dist.get_rank() // dist.get_world_size()
    buffers = _parts_of(memoryview(bytearray(64 * 2**20)))
    began = time.perf_counter()
    while nbytes > 0:
        for path in [*paths[first:], *paths[:first]]:
            with open(path, "rb", buffering=0) as file:
                while nbytes > 0 and (count := file.readinto(next(buffers))):
                    nbytes -= count
    return time.perf_counter() - began


def _parts_of(memory: memoryview) -> Iterator[memoryview]:
    """Parts of 2 MiB of `memory`, again and again."""
    while True:
        yield from (memory[at : at + 2 * 2**20] for at in range(0, len(memory), 2 * 2**20))


def _bytes_read() -> list[int]:
    """Bytes that this process has read by calls, from the page cache too; and from disks, in whatever way."""
    lines = (line.split() for line in Path("/proc/self/io").read_text().splitlines())
    return [int(value) for name, value in lines if name in ("rchar:", "read_bytes:")]


def _checkpoint(gigabytes: float, layers: int, is_sparse: bool) -> Path:
    from transformers import Qwen3MoeConfig

    if not is_sparse:
        folder = CACHE / f"from-files-{gigabytes:g}-{layers}"
        done = (folder / "model.safetensors.index.json").exists()
        return folder if done else make_moe_checkpoint(folder, gigabytes * 1e9, num_layers=layers, num_experts=32)
    config = Qwen3MoeConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=26,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=32,
        num_experts_per_tok=8,
        tie_word_embeddings=False,
    )
    return make_sparse_checkpoint(CACHE / "from-files-sparse", config)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train adapters with frozen weights in their files and in memory.")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--gigabytes", type=float, default=0.9)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--sparse", action="store_true", help="8 GB that take no disk")
    parser.add_argument("--experts", action="store_true", help="adapters on experts too")
    parser.add_argument("--tokens", type=int, default=128, help="in a step of a rank")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--arms", type=lambda text: text.split(";"), default=[*ARMS], help='such as "files;nvme"')
    parser.add_argument("--limit", type=float, default=0.0, help="GiB of data that a rank may have (RLIMIT_DATA)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    settings = parser.parse_args(arguments)
    folder = _checkpoint(settings.gigabytes, settings.layers, settings.sparse)
    print(machine.in_words(machine.describe(folder)), flush=True)
    found: dict[str, list[Figures]] = {}

    def measured(arm: str) -> None:
        task = json.dumps([arm, str(folder), settings.experts, settings.tokens, settings.steps, settings.limit])
        try:
            found[arm] = run(task, settings.ranks, 3600, module="benchmarks.from_files")
        except ArmFailed as error:
            print(f"{arm} failed: {error}", flush=True)

    with ThreadPoolExecutor(len(settings.arms)) as pool:
        list(pool.map(measured, settings.arms))
    shutil.rmtree(f"{folder}-swap", ignore_errors=True)
    found = {arm: found[arm] for arm in settings.arms if arm in found}
    print(f"\nranks: {settings.ranks}, {settings.tokens} tokens a step, largest of all ranks")
    print("| arm | load s | ready MiB | host MiB | read | step s | alone s | ratio |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for arm, ranks in found.items():
        print(_row(arm, ranks, found.get("memory")))
    if len({tuple(each["losses"]) for ranks in found.values() for each in ranks[:1]}) > 1:
        print("The losses of rank 0 differ between arms.")
    if settings.json:
        settings.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


def _row(arm: str, ranks: list[Figures], in_memory: list[Figures] | None) -> str:
    multiple = median(sum(of_step) for of_step in zip(*(each["bytes"] for each in ranks), strict=True))
    tries = [max(of_try) for of_try in zip(*(each["alone"] for each in ranks), strict=True)]
    alone = median(tries) if tries else 0.0
    ratio = ""
    if alone and in_memory:  # step by step, since each has other tokens
        beside = zip(_seconds_of_steps(ranks), _seconds_of_steps(in_memory), strict=True)
        ratio = f"{median(step / max(alone, of_memory) for step, of_memory in beside):.2f}"
    cells = [
        f"{max(each['load'] for each in ranks):.2f}",
        f"{max(each['ready'] for each in ranks) / 2**20:.0f}",
        f"{max(each['growth'] for each in ranks) / 2**20:.0f}",
        f"{multiple / ranks[0]['frozen']:.2f}x",
        f"{median(_seconds_of_steps(ranks)):.2f}",
        f"{alone:.2f}" if alone else "",
        ratio,
    ]
    return f"| {arm} | {' | '.join(cells)} |"


def _seconds_of_steps(ranks: list[Figures]) -> list[float]:
    """Of all steps but the first, those of the slowest rank."""
    return [max(of_step) for of_step in zip(*(each["seconds"][1:] for each in ranks), strict=True)]


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].startswith("["):
        write_figures(sys.argv[2], measure(*json.loads(sys.argv[1])))
    else:
        sys.exit(main())
