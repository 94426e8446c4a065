"""One rank of ``demo``, started by torchrun: loads, trains, and writes its figures to a file.

python -m hf_zero_stream.plugins.demo.demo_rank ARM TASK

The arm "streaming" also saves its training, and "resumed" goes on with it.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import transformers
from deepspeed.accelerator import get_accelerator
from transformers.integrations import HfDeepSpeedConfig

from ...plugin_api import AnonymousMemory, GrowthPeak, without_own_section
from .demo import DemoTask


class Curve(AnonymousMemory):
    """Keeps every sample: (time, growth of this process's anonymous memory in bytes)."""

    def __init__(self) -> None:
        super().__init__()
        self.points: list[tuple[float, int]] = []

    def sample(self) -> int:
        growth = super().sample()
        self.points.append((time.perf_counter(), growth))
        return growth


def mapped_bytes() -> int:
    """This process's resident pages of mapped files."""
    found = re.search(r"^RssFile:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def loaded(arm: str, task: DemoTask) -> Any:
    """The model; what this imports is part of the load."""
    model_class, dtype = getattr(transformers, task.model_class), getattr(torch, task.dtype)
    if arm == "stock":
        config = HfDeepSpeedConfig(without_own_section(task.config))  # transformers finds ZeRO-3 while it is alive
        model = model_class.from_pretrained(task.folder, dtype=dtype)
        model.kept_config = config
        return model
    from ...plugin_api import streaming

    with streaming():
        return model_class.from_pretrained(task.folder, dtype=dtype, ds_config=task.config)


def measure(arm: str, task: DemoTask) -> dict[str, Any]:
    """Load and train with all ranks; returns this rank's figures."""
    times: list[float] = []
    model: Any = None
    for _ in range(task.loads):
        del model
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # or the next load would grow into what this one has given back
        with (memory := Curve()), GrowthPeak(mapped_bytes) as mapped:
            dist.barrier()
            start = time.perf_counter()
            model = loaded(arm, task)
            get_accelerator().synchronize()
            dist.barrier()
            times.append(time.perf_counter() - start)
    report = getattr(model, "streaming_report", None)
    figures = {
        "seconds": times,
        "bytes_read": mapped.growth_peak if report is None else report.ranks[dist.get_rank()].bytes_read,
        "anonymous_growth_bytes": memory.growth_peak,
        "partition_bytes": sum(param.ds_tensor.nbytes for param in model.parameters()),
        "digests": digests(model),
        "curves": [[when - start, growth] for when, growth in memory.points],
    }
    return figures | {"losses": train(arm, model, task) if task.steps else []}


def digests(model: torch.nn.Module) -> dict[str, str] | None:
    """Return digests of the bits of this rank's part of every parameter, by name; None if some are in swap files."""
    from ...plugin_api import own_range

    found = {}
    for name, param in model.named_parameters():
        _, start, stop = own_range(param)
        part = param.ds_tensor.detach()[: stop - start]
        if part.numel() < stop - start:
            return None
        found[name] = hashlib.blake2b(part.cpu().view(torch.uint8).numpy(), digest_size=16).hexdigest()
    return found


def train(arm: str, model: Any, task: DemoTask) -> list[float]:
    """The losses of all steps and of the one after them; of that alone in a training that goes on."""
    from ... import load_state, save_pretrained, save_state

    engine, *_ = deepspeed.initialize(
        model=model, config=without_own_section(task.config), model_parameters=model.parameters()
    )
    losses = []
    if arm == "resumed":
        load_state(engine, Path(task.results, "saved"))
        save_pretrained(engine, Path(task.results, "again"))
    else:
        for step in range(task.steps):
            loss = loss_of(engine, step)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    if arm == "streaming":
        save_state(engine, Path(task.results, "saved"))
    engine.eval()
    with torch.no_grad():
        return [*losses, loss_of(engine, task.steps).item()]


def loss_of(engine: Any, step: int) -> torch.Tensor:
    """Compute the loss of random token ids, the same on all ranks, so that the world size changes nothing."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(engine.module.config.vocab_size, (1, 16), generator=generator).to(engine.device)
    loss: torch.Tensor = engine(input_ids=tokens, labels=tokens).loss
    return loss


def main() -> None:
    arm, file = sys.argv[1:]
    task = DemoTask(**json.loads(Path(file).read_text()))
    transformers.utils.logging.disable_progress_bar()
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))  # the barriers' too, with NCCL
    deepspeed.init_distributed()
    try:
        found = measure(arm, task)
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    Path(task.results, f"{arm}-{dist.get_rank()}.json").write_text(json.dumps(found))
    if "error" in found:
        sys.exit(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
