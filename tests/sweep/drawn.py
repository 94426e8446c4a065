"""Jobs of a sweep that compare what a load leaves of random numbers: with stock's, on each rank.

Of each model there are two loads: of its checkpoint, and of one that lacks a weight, which is drawn anew.
"""

import gc
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers.integrations import HfDeepSpeedConfig

import hf_zero_stream
from tests.support.checkpoint_files import tensors_of, write
from tests.support.fsdp2 import announce, make_accelerator
from tests.support.parity import differences, ds_config
from tests.sweep.destinations import Destination
from tests.sweep.loads import class_of, generators, load, load_plain


LOADS = ("", "without a weight: ")


def stocks(case: dict[str, Any], folder: Path, dtype: torch.dtype, _: Destination) -> dict[str, Any]:
    """Under ZeRO-3, ``random_numbers="stock"`` beside stock; and what is drawn, values too, beside a plain load."""
    as_stock = hf_zero_stream.StreamingConfig(random_numbers="stock", progress=False)
    model_class, found = class_of(case), []
    for title, place in zip(LOADS, (folder, _without_a_weight(folder)), strict=True):
        plain, _ = load_plain(model_class, place, dtype)
        as_plain = generators()
        with hf_zero_stream.streaming():
            streamed, _ = load(model_class, place, dtype, ds_config=ds_config(dtype))
        if generators() != as_plain:
            found.append(f"{title}the random number generators are not as after a plain load")
        found += [f"{title}{what}" for what in differences(streamed, plain, dtype)]
        del streamed, plain
        gc.collect()
        states = []
        for block in (nullcontext(), hf_zero_stream.streaming(as_stock)):
            kept_alive = HfDeepSpeedConfig(ds_config(dtype))
            fault = _fault_of(block, model_class, place, dtype, may_fail=not states)
            if fault:
                return {"refused": f"stock: {fault}"[:300], "differences": found}
            states.append(generators())
            del kept_alive
        if states[0] != states[1]:
            found.append(f"{title}the random number generators are not as after stock's load under ZeRO-3")
    return {"differences": found}


def accelerates(case: dict[str, Any], folder: Path, dtype: torch.dtype, _: Destination) -> dict[str, Any]:
    """Under accelerate's FSDP2, with efficient loading and without it."""
    model_class, found = class_of(case), []
    try:
        for efficient in (True, False):
            announce(cpu_ram_efficient_loading=efficient)
            make_accelerator()
            for title, place in zip(LOADS, (folder, _without_a_weight(folder)), strict=True):
                states = []
                for block in (nullcontext(), hf_zero_stream.streaming()):
                    fault = _fault_of(block, model_class, place, dtype, may_fail=not states)
                    if fault:
                        return {"refused": f"stock: {fault}"[:300], "differences": found}
                    states.append(generators())
                if states[0] != states[1]:
                    found.append(f"{title}efficient {efficient}: the random number generators are not as stock's")
    finally:
        os.environ.pop("ACCELERATE_USE_FSDP", None)
    return {"differences": found}


def _fault_of(block: Any, model_class: Any, folder: Path, dtype: torch.dtype, *, may_fail: bool) -> str:
    """Load inside `block`; the error of any rank, if it `may_fail`: stock raises on some alone."""
    fault = ""
    try:
        with block:
            load(model_class, folder, dtype)
    except Exception as error:
        if not may_fail:
            raise
        fault = f"{type(error).__name__}: {error}"
    faults: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(faults, fault)
    return next(filter(None, faults), "")


def _without_a_weight(folder: Path) -> Path:
    """The checkpoint in `folder` without the last of its matrices."""
    place = folder.with_name(f"{folder.name} without a weight")
    if dist.get_rank() == 0 and not place.exists():
        place.mkdir()
        for path in folder.iterdir():
            if path.suffix != ".safetensors" and not path.name.endswith(".index.json"):
                (place / path.name).write_bytes(path.read_bytes())
        tensors = tensors_of(folder)
        matrices = [name for name, tensor in tensors.items() if tensor.dim() > 1 and tensor.is_floating_point()]
        for name in matrices[-1:]:
            del tensors[name]
        write(tensors, place)
    dist.barrier()
    return place
