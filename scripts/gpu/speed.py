"""Loads and saves onto a GPU, against loops that do nothing but copy the same bytes."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hf_zero_stream import accelerators

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
    targets.clear()
    torch.cuda.empty_cache()
    return {"first, second, third": rates}, True


def zero3(setting: Setting) -> tuple[dict[str, Any], bool]:
    """A model under ZeRO-3 that one rank holds; the first load imports what it needs."""
    from transformers import AutoModelForCausalLM

    import hf_zero_stream
    from tests.support.parity import ds_config

    folder = setting.large()
    _shards(folder)
    rates, beyond, phases = [], [], []
    reserved = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with hf_zero_stream.streaming():
            model, seconds = timed(
                lambda: AutoModelForCausalLM.from_pretrained(folder, ds_config=ds_config(torch.bfloat16))
            )
        held = torch.cuda.memory_allocated() - before
        beyond.append(round((torch.cuda.max_memory_allocated() - before - held) / 2**20))
        rates.append(_rate(folder, seconds))
        phases.append(_seconds(model))
        del model
        gc.collect()
        torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved() - torch.cuda.memory_allocated() - reserved
    figures = {"first, second, third": rates, "phases": phases, "peak beyond the partitions, MiB": beyond}
    return {**figures, "reserved afterwards, MiB": reserved >> 20}, max(beyond) <= 64


def sharded(setting: Setting) -> tuple[dict[str, Any], bool]:
    """The same into shards of FSDP2 of one rank, whose memory is there."""
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM

    import hf_zero_stream

    folder = setting.large()
    _shards(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    for layer in (*model.model.layers, model):
        fully_shard(layer)
    model.to_empty(device="cuda")
    rates = []
    for _ in range(2):
        with hf_zero_stream.streaming():
            rates.append(_rate(folder, timed(lambda: hf_zero_stream.load_into(model, str(folder)))[1]))
    return {"load_into, first, second": rates}, True


def saves(setting: Setting) -> tuple[dict[str, Any], bool]:
    """Weights from the device into files, at once and in the background: how long a training stands still."""
    from transformers import AutoModelForCausalLM

    import hf_zero_stream
    from tests.support.parity import ds_config

    folder = setting.large()
    with hf_zero_stream.streaming():
        model = AutoModelForCausalLM.from_pretrained(folder, ds_config=ds_config(torch.bfloat16))
    rates = []
    for _ in range(2):
        target = setting.new_folder("saved")
        rates.append(_rate(folder, timed(lambda: hf_zero_stream.save_pretrained(model, target))[1]))
    shutil.rmtree(target)
    del model
    gc.collect()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    stalls, totals = [], []
    for _ in range(2):  # the second finds the memory of the first
        target = setting.new_folder("asynchronous")
        save = partial(hf_zero_stream.save_state, model, target, optimizer=optimizer, batch_size=1, asynchronous=True)
        pending, stall = timed(save)
        _, rest = timed(pending.wait)
        stalls.append(_rate(folder, stall))
        totals.append(_rate(folder, stall + rest))
    shutil.rmtree(target)
    return {"save_pretrained": rates, "asynchronous: stands still": stalls, "in all": totals}, True


def stock(setting: Setting) -> tuple[dict[str, Any], bool]:
    """The same load by transformers and DeepSpeed alone."""
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    from tests.support.parity import ds_config

    folder = setting.large()
    keep = HfDeepSpeedConfig(ds_config(torch.bfloat16))
    model, seconds = timed(lambda: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))
    del keep, model
    return {"ZeRO-3": _rate(folder, seconds)}, True


def _seconds(model: Any) -> dict[str, Any]:
    """Seconds of a load by phase, and of all its reader threads together."""
    rank = model.streaming_report.ranks[0]
    phases, threads = ({name: round(s, 2) for name, s in each.items()} for each in (rank.seconds, rank.thread_seconds))
    return {**phases, "threads": threads}


def _load(folder: Path, **settings: Any) -> tuple[str, dict[str, Any]]:
    """One load under ZeRO-3, which is dropped: its rate, and :func:`_seconds`."""
    from transformers import AutoModelForCausalLM

    import hf_zero_stream
    from tests.support.parity import ds_config

    config = {**ds_config(torch.bfloat16), "hf_zero_stream": {"progress": False, **settings}}
    with hf_zero_stream.streaming():
        model, seconds = timed(lambda: AutoModelForCausalLM.from_pretrained(folder, ds_config=config))
    phases = _seconds(model)
    del model
    gc.collect()
    torch.cuda.empty_cache()
    return _rate(folder, seconds), phases


def first_load(setting: Setting) -> tuple[dict[str, Any], bool]:
    """The first load of a process; each group that has this step is a new one."""
    folder = setting.large()
    _shards(folder)
    rate, phases = _load(folder)
    return {"first": rate, "phases": phases}, True


def threads_and_streams(setting: Setting) -> tuple[dict[str, Any], bool]:
    """Loads by 8, 12 and 16 threads, through 2 and 4 side streams, in turn; beside each the plain loop by as many."""
    folder = setting.large()
    shards, figures = _shards(folder), dict[str, Any]()
    _load(folder)  # what only a first load does
    for threads in (8, 12, 16):
        targets = [torch.empty(shard.stat().st_size, dtype=torch.uint8, device="cuda") for shard in shards]
        seconds = [timed(lambda: copy_files(shards, targets, REQUEST_BYTES, threads))[1] for _ in range(2)]  # noqa: B023
        figures[f"{threads} threads, a loop"] = _rate(folder, seconds[-1])
        targets.clear()
        torch.cuda.empty_cache()
        for streams in (2, 4):
            accelerators.SIDE_STREAMS = streams
            accelerators.side_streams.cache_clear()
            own = {"reader_threads": threads, "staging_bytes": 2 * threads * REQUEST_BYTES}
            loads = [_load(folder, **own) for _ in range(3)]
            rates = [rate for rate, _ in loads]
            figures[f"{threads} threads, {streams} streams"] = [*rates, loads[-1][1]["threads"]]
    return figures, True


STEPS: Mapping[str, Step] = {
    "pinned copies": pinned_copies,
    "load under ZeRO-3": zero3,
    "load into FSDP2": sharded,
    "saves": saves,
}
STOCK: Mapping[str, Step] = {"stock": stock}
BESIDE: Mapping[str, Step] = {"load under ZeRO-3": zero3, **STOCK}
FIRST: Mapping[str, Step] = {"first load": first_load}
THREADS: Mapping[str, Step] = {"threads and streams": threads_and_streams}
