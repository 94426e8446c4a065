"""The steps of `speed`: loads and saves onto a GPU, against loops that do nothing but copy the same bytes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from .setting import Setting, Step


REQUEST_BYTES = 8 << 20


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """What `work` gives, and seconds until the device has done all."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    result = work()
    torch.cuda.synchronize()
    return result, time.perf_counter() - began


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
    rates = [_rate(folder, _timed(lambda: _copy(shards, targets))[1]) for _ in range(3)]
    return {"first, second, third": rates}, True


def _copy(shards: list[Path], targets: list[torch.Tensor]) -> None:
    files = [os.open(shard, os.O_RDONLY) for shard in shards]
    pending = iter(
        [
            (file, at, target[at : at + REQUEST_BYTES])
            for file, target in zip(files, targets, strict=True)
            for at in range(0, target.numel(), REQUEST_BYTES)
        ]
    )
    lock = threading.Lock()

    def work() -> None:
        stream = torch.cuda.Stream()
        buffers = [torch.empty(REQUEST_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        events = [torch.cuda.Event() for _ in range(2)]
        turn = 0
        while True:
            with lock:
                request = next(pending, None)
            if request is None:
                break
            file, at, target = request
            events[turn].synchronize()
            view = memoryview(buffers[turn].numpy())[: target.numel()]
            done = 0
            while done < len(view):
                done += os.preadv(file, [view[done:]], at + done)
            with torch.cuda.stream(stream):
                target.copy_(buffers[turn][: target.numel()], non_blocking=True)
                events[turn].record(stream)
            turn = 1 - turn
        stream.synchronize()

    workers = [threading.Thread(target=work) for _ in range(min(8, len(os.sched_getaffinity(0))))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for file in files:
        os.close(file)


def safetensors(setting: Setting) -> tuple[dict[str, Any], bool]:
    """safetensors' own loading of every shard to the device: no model."""
    from safetensors.torch import load_file

    folder = setting.large()
    shards = _shards(folder)
    rates = [_rate(folder, _timed(lambda: [load_file(shard, device="cuda") for shard in shards])[1]) for _ in range(2)]
    return {"first, second": rates}, True


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
            model, seconds = _timed(
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
        pending, stall = _timed(save)
        _, rest = _timed(pending.wait)
        stalls.append(_rate(folder, stall))
        totals.append(_rate(folder, stall + rest))
    return {"stands still, first, second": stalls, "in all": totals}, True


def dequantised(setting: Setting) -> tuple[dict[str, Any], bool]:
    """FP8 by blocks, dequantised on the way to the device; its values against those of transformers on the host."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    import hf_zero_stream
    from tests.support.parity import differences, ds_config
    from tests.support.quantised_checkpoints import dense_fp8

    folder = setting.folder / "fp8"
    if not (folder / "model.safetensors").exists():
        dense_fp8(folder, width=32 * max(1, round(32 * min(1.0, setting.gigabytes))))
    how = {"quantization_config": FineGrainedFP8Config(dequantize=True), "dtype": torch.bfloat16}
    expected = AutoModelForCausalLM.from_pretrained(folder, **how)
    with hf_zero_stream.streaming():
        model, seconds = _timed(
            lambda: AutoModelForCausalLM.from_pretrained(folder, ds_config=ds_config(torch.bfloat16), **how)
        )
    wrong = differences(model, expected, torch.bfloat16)
    return {"of the file": _rate(folder, seconds), "differences": wrong[:8]}, not wrong


STEPS: Mapping[str, Step] = {
    "pinned copies": pinned_copies,
    "safetensors": safetensors,
    "load under ZeRO-3": zero3,
    "asynchronous save": asynchronous_save,
    "FP8 dequantised": dequantised,
}
