"""The steps of `speed`: loads and saves onto a GPU, against loops that do nothing but copy the same bytes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .reader import copy_files
from .setting import Setting, Step, timed


REQUEST_BYTES = 8 << 20


def _shards(folder: Path) -> list[Path]:
    """The shards, which are in the page cache now."""
    shards = sorted(folder.glob("*.safetensors"))
    for shard in shards:
        with open(shard, "rb", buffering=0) as file:
            while file.read(REQUEST_BYTES):
                pass
    return shards


def _rate(folder: Path, seconds: float) -> str:
    nbytes = sum(shard.stat().st_size for shard in folder.glob("*.safetensors"))
    return f"{nbytes / seconds / 1e9:.2f} GB/s ({seconds:.2f} s)"


def pinned_copies(setting: Setting) -> tuple[dict[str, Any], bool]:
    """The bytes of all shards through pinned buffers, two for each thread, by as many threads as a load has."""
    folder = setting.large()
    shards = _shards(folder)
    targets = [torch.empty(shard.stat().st_size, dtype=torch.uint8, device="cuda") for shard in shards]
    threads = min(12, len(os.sched_getaffinity(0)))
    rates = [_rate(folder, timed(lambda: copy_files(shards, targets, REQUEST_BYTES, threads))[1]) for _ in range(3)]
    return {"first, second, third": rates}, True


def zero3(setting: Setting) -> tuple[dict[str, Any], bool]:
    """A model under ZeRO-3 that one rank holds; the first load imports what it needs."""
    from transformers import AutoModelForCausalLM

    import hf_zero_stream
    from tests.support.parity import ds_config

    folder = setting.large()
    _shards(folder)
    rates, beyond = [], []
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with hf_zero_stream.streaming():
            model, seconds = timed(
                lambda: AutoModelForCausalLM.from_pretrained(folder, ds_config=ds_config(torch.bfloat16))
            )
        held = torch.cuda.memory_allocated() - before
        beyond.append(round((torch.cuda.max_memory_allocated() - before - held) / 2**20))
        rates.append(_rate(folder, seconds))
        del model
    return {"first, second": rates, "peak beyond the partitions, MiB": beyond}, max(beyond) <= 64


def asynchronous_save(setting: Setting) -> tuple[dict[str, Any], bool]:
    """How long a training stands still while its weights are copied to the host, and how long they are written."""
    from transformers import AutoModelForCausalLM

    import hf_zero_stream

    folder, target = setting.large(), setting.new_folder("asynchronous")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    stalls, totals = [], []
    for number in range(2):  # the second finds the memory of the first
        save = lambda: hf_zero_stream.save_state(  # noqa: E731
            model, target, optimizer=optimizer, batch_size=1, tag=f"{number}", asynchronous=True
        )
        pending, stall = timed(save)
        _, rest = timed(pending.wait)
        stalls.append(_rate(folder, stall))
        totals.append(_rate(folder, stall + rest))
    return {"stands still, first, second": stalls, "in all": totals}, True


STEPS: Mapping[str, Step] = {
    "pinned copies": pinned_copies,
    "load under ZeRO-3": zero3,
    "asynchronous save": asynchronous_save,
}
