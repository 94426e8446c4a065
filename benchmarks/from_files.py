"""Adapters on a mixture of experts whose weights stay in its files, beside the same training with them in memory.

    python -m benchmarks.from_files                                       # 0.9 GB in layers of 100 MB, one rank
    python -m benchmarks.from_files --ranks 2 --experts
    python -m benchmarks.from_files --sparse --steps 2 --arms files       # 8 GB in 26 layers of 300 MB, all zeros

LoRA on attention, and with `--experts` on the fused experts too; gradient checkpointing; ZeRO-3 in bf16, told in both
arms to keep nothing in full (`stage3_max_reuse_distance` 0). `cold`: the files are dropped from the page cache before
each step. `read`: bytes that all ranks have read in a step, by ``/proc/self/io``, over those of the frozen weights.
`host MiB`: the most anonymous memory of a rank over what it had before the load, its imports. `ready`: what of it is
there before the first step. `step s`: the median but for the first. `fio`: the time in which fio reads what a step
reads, if it is installed.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import fio, machine
from benchmarks.checkpoints import CACHE
from benchmarks.launch import run, write_figures
from benchmarks.moe_checkpoint import make_moe_checkpoint
from benchmarks.sparse_checkpoint import make_sparse_checkpoint
from hf_zero_stream.reports.measures import AnonymousMemory
from hf_zero_stream.sources.page_cache import drop_from_cache


ARMS = ("memory", "files", "files, cold")
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
CONFIG = {
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


def measure(arm: str, folder: str, experts: bool, tokens: int, steps: int) -> Figures:
    """This rank's figures."""
    import deepspeed
    import peft
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    import hf_zero_stream

    deepspeed.init_distributed("gloo")
    keeps = HfDeepSpeedConfig(CONFIG)  # noqa: F841  # transformers knows it as long as it lives
    torch.manual_seed(0)
    with AnonymousMemory() as memory:
        began = time.perf_counter()
        frozen_weights: Any = arm.partition(",")[0]
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
        engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=CONFIG)
        engine.train()
        found["ready"] = memory.sample()
        for step in range(steps):
            if arm.endswith("cold"):
                drop_from_cache([*Path(folder).glob("*.safetensors")])
            dist.barrier()
            before, began = _bytes_read(), time.perf_counter()
            ids = torch.arange(tokens).view(1, -1) * (37 + step) % 1000
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            found["seconds"].append(time.perf_counter() - began)
            found["bytes"].append(_bytes_read() - before)
            found["losses"].append(loss.item())
    found["growth"] = memory.growth_peak
    dist.destroy_process_group()
    return found


def _bytes_read() -> int:
    """All bytes that this process has read, from the page cache too."""
    return next(int(line.split()[1]) for line in Path("/proc/self/io").read_text().splitlines() if "rchar" in line)


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
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--arms", type=lambda text: text.split(";"), default=[*ARMS], help='such as "files;memory"')
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    settings = parser.parse_args(arguments)
    folder = _checkpoint(settings.gigabytes, settings.layers, settings.sparse)
    print(machine.in_words(machine.describe(folder)), flush=True)
    found = {}
    for arm in settings.arms:
        task = json.dumps([arm, str(folder), settings.experts, settings.tokens, settings.steps])
        found[arm] = run(task, settings.ranks, 3600, module="benchmarks.from_files")
        print(f"{arm} is measured", flush=True)
    print(f"\nranks: {settings.ranks}, {settings.tokens} tokens a step, largest of all ranks")
    print("| arm | load s | ready MiB | host MiB | read | step s | fio |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for arm, ranks in found.items():
        print(_row(arm, ranks, sorted(folder.glob("*.safetensors"))))
    if len({tuple(each["losses"]) for ranks in found.values() for each in ranks[:1]}) > 1:
        print("The losses of rank 0 differ between arms.")
    if settings.json:
        settings.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


def _row(arm: str, ranks: list[Figures], paths: list[Path]) -> str:
    multiple = median(sum(of_step) for of_step in zip(*(each["bytes"] for each in ranks), strict=True))
    multiple /= ranks[0]["frozen"]
    disk = ""
    if arm.endswith("cold") and fio.is_installed():
        disk = f"{multiple * fio.fio_seconds(paths):.2f} s"
    cells = [
        f"{max(each['load'] for each in ranks):.2f}",
        f"{max(each['ready'] for each in ranks) / 2**20:.0f}",
        f"{max(each['growth'] for each in ranks) / 2**20:.0f}",
        f"{multiple:.2f}x",
        f"{median(max(of_step) for of_step in zip(*(each['seconds'][1:] for each in ranks), strict=True)):.2f}",
        disk,
    ]
    return f"| {arm} | {' | '.join(cells)} |"


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].startswith("["):
        write_figures(sys.argv[2], measure(*json.loads(sys.argv[1])))
    else:
        sys.exit(main())
