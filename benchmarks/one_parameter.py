"""The table of DeepSpeed PR #8103: how much memory does it take to partition one parameter of 2 GB?

The parameter has 22528 x 22528 elements in fp32 (2.03 GB of 10^9 bytes), the world 2 ranks. Stock allocates it in full
on every rank; the PR streams it in chunks; here each rank reads its half.

    python -m benchmarks.one_parameter                  # host memory: growth of RssAnon
    python -m benchmarks.one_parameter --device cuda    # device memory: torch's peak; the ranks share one device
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from benchmarks.launch import run
from benchmarks.sparse_checkpoint import write_shard


CACHE = Path(__file__).parent / ".cache"
PUBLISHED = "PR #8103, on 2 L40S: full 2.03, partition 1.02, stock 3.05, streamed in chunks 1.10 GB"


class OneParameterConfig(PreTrainedConfig):
    model_type = "one-parameter"

    def __init__(self, width: int = 22528, **kwargs: Any) -> None:
        self.width = width
        super().__init__(**kwargs)


class OneParameter(PreTrainedModel):
    """A model that is one square weight."""

    config_class = OneParameterConfig

    def __init__(self, config: OneParameterConfig) -> None:
        super().__init__(config)
        self.weight = nn.Parameter(torch.empty(config.width, config.width))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        pass


def make_checkpoint(folder: Path, width: int) -> Path:
    """Of true size, its data a hole in the file: only memory is measured."""
    folder.mkdir(parents=True, exist_ok=True)
    OneParameterConfig(width, architectures=["OneParameter"], dtype=torch.float32).save_pretrained(folder)
    write_shard(folder / "model.safetensors", {"weight": ("F32", (width, width))})
    return folder


def measure(arm: str, folder: str, device: str) -> dict[str, Any]:
    """Load on this rank; returns sizes in bytes."""
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig

    from hf_zero_stream.reports.measures import AnonymousMemory

    deepspeed.init_distributed("gloo")
    kept_alive = HfDeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}})
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with AnonymousMemory() as memory:
        if arm == "ours":
            import hf_zero_stream

            with hf_zero_stream.streaming():
                model = OneParameter.from_pretrained(folder)
        else:
            model = OneParameter.from_pretrained(folder)
    figures = {
        "full_bytes": model.weight.ds_numel * model.weight.ds_tensor.itemsize,
        "partition_bytes": model.weight.ds_tensor.nbytes,
        "host_growth_bytes": memory.growth_peak,
        "device_peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else 0,
    }
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    del kept_alive
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory that it takes to partition one large parameter.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--width", type=int, default=22528, help="rows and columns of the parameter")
    parser.add_argument("--world", type=int, default=2, help="number of ranks")
    parser.add_argument("--json", type=Path, help="also write every rank's figures there")
    arguments = parser.parse_args()

    folder = make_checkpoint(CACHE / f"one-parameter-{arguments.width}", arguments.width)
    # The ranks share one device.
    variables = {"DS_ACCELERATOR": arguments.device, "CUDA_VISIBLE_DEVICES": "0", "LOCAL_RANK": "0"}
    found = {}
    for arm in ("stock", "ours"):
        task = json.dumps({"arm": arm, "folder": str(folder), "device": arguments.device})
        found[arm] = run(task, arguments.world, 600.0, "benchmarks.one_parameter", **variables)

    where = "device_peak_bytes" if arguments.device == "cuda" else "host_growth_bytes"
    print(f"{arguments.width} x {arguments.width} fp32, {arguments.world} ranks, {arguments.device}; GB of 10^9 bytes")
    print("| arm | full | partition | peak of the rank with most | host growth |")
    print("|---|--:|--:|--:|--:|")
    for arm, ranks in found.items():
        cells = [ranks[0]["full_bytes"], ranks[0]["partition_bytes"], max(rank[where] for rank in ranks)]
        cells.append(max(rank["host_growth_bytes"] for rank in ranks))
        print(f"| {arm} | " + " | ".join(f"{cell / 1e9:.2f}" for cell in cells) + " |")
    print(PUBLISHED)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].startswith("{"):
        Path(sys.argv[2]).write_text(json.dumps(measure(**json.loads(sys.argv[1]))))
    else:
        main()
