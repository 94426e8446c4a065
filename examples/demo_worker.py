"""What each rank of the demonstration runs; started by `examples/demo.py` through `accelerate launch`."""

import argparse
import gc
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM


STEPS = 3


def digest(values: torch.Tensor) -> str:
    """A fingerprint of dtype, shape and every bit of a tensor."""
    # A view as bytes needs a last dimension, and numpy has no bf16.
    flat = values.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return f"{values.dtype} {list(values.shape)} {hashlib.blake2b(flat.numpy(), digest_size=16).hexdigest()}"


def plain_digests(checkpoint: Path) -> dict[str, str]:
    """Every parameter's fingerprint after a plain `from_pretrained`, without DeepSpeed."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    return {name: digest(param) for name, param in model.named_parameters()}


def different_parameters(model: nn.Module, expected: dict[str, str]) -> list[str]:
    """Names whose values are not those expected; gathers one parameter at a time, on all ranks together."""
    import deepspeed

    different = set(expected)
    for name, param in model.named_parameters():
        with deepspeed.zero.GatheredParameters([param]):
            if digest(param.data) == expected.get(name):
                different.remove(name)
            else:
                different.add(name)
    return sorted(different)


def train(accelerator: Any, model: Any) -> list[float]:
    """A few steps on token ids made up here; returns the losses, averaged over ranks."""
    torch.manual_seed(0)
    text = list(torch.randint(model.config.vocab_size, (STEPS * accelerator.num_processes, 16)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(text, batch_size=1))
    model.train()
    losses = []
    for tokens in batches:
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach().float()).mean().item())
    return losses


def gather(value: Any) -> list[Any]:
    """One value of every rank, in order."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def main() -> None:
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    from examples import demo_embeddings
    from hf_zero_stream import StreamingAutoModelForCausalLM
    from hf_zero_stream.reports.memory import AnonymousMemory

    class Curve(AnonymousMemory):
        """Keeps every sample: (time, growth of this process's anonymous memory in bytes)."""

        def __init__(self) -> None:
            super().__init__()
            self.points: list[tuple[float, int]] = []

        def sample(self) -> int:
            growth = super().sample()
            self.points.append((time.perf_counter(), growth))
            return growth

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loader", choices=["streaming", "stock"], required=True)
    parser.add_argument("--folder", type=Path, required=True, help="checkpoint and what is expected of it")
    parser.add_argument("--results", type=Path, required=True, help="file for this run's figures")
    arguments = parser.parse_args()
    auto_class = StreamingAutoModelForCausalLM if arguments.loader == "streaming" else AutoModelForCausalLM

    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    # The first load of a process pays for imports; they are no part of the comparison.
    auto_class.from_pretrained(arguments.folder / "tiny", dtype="auto")
    gc.collect()
    dist.barrier()
    with (memory := Curve()):
        start = time.perf_counter()
        model = auto_class.from_pretrained(arguments.folder / "moe", dtype="auto")
        seconds = time.perf_counter() - start
    expected = json.loads((arguments.folder / "digests.json").read_text())
    results = {
        "seconds": gather(seconds),
        "growth": gather(memory.growth_peak),
        "curves": gather([[when - start, growth] for when, growth in list(memory.points)]),
        "partition": sum(param.ds_tensor.numel() * param.ds_tensor.element_size() for param in model.parameters()),
        "different": sorted(set().union(*gather(different_parameters(model, expected)))),
    }
    if arguments.loader == "streaming":
        results |= {"report": model.streaming_report.to_dict(), "table": model.streaming_report.table()}
    results["losses"] = train(accelerator, model)
    if arguments.loader == "streaming":
        results["embeddings"] = demo_embeddings.compare(json.loads((arguments.folder / "embeddings.json").read_text()))

    if accelerator.is_main_process:
        arguments.results.write_text(json.dumps(results))
    accelerator.end_training()  # destroys the process group too


if __name__ == "__main__":
    main()
