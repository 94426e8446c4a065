"""Loads and saves of a sweep's models, whatever the destination."""

import gc
import hashlib
import importlib
import json
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from transformers import PreTrainedModel, core_model_loading
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

import hf_zero_stream
from tests.support.checkpoint_files import differing, tensors_of
from tests.support.saving import different, saves_with
from tests.support.streams import change, patched, taken
from tests.sweep.fixes import NO_LOADING_INFO


SAVED_SHARD_SIZE = "100KB"
"""Most tiny models then have several shards."""


def class_of(case: dict[str, Any]) -> type[PreTrainedModel]:
    return getattr(importlib.import_module(case["module"]), case["class"])


def load_plain(model_class: Any, folder: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, dict[str, Any]]:
    gc.collect()
    assert not is_deepspeed_zero3_enabled(), "the config of the model before is still alive"
    return load(model_class, folder, dtype)


def load(loader: Any, folder: Path, dtype: torch.dtype, **kwargs: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load; every load starts from the same random numbers, and memory nobody wrote to reads as NaN, not as chance."""
    gc.collect()
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        if json.loads((folder / "config.json").read_text())["architectures"][0] in NO_LOADING_INFO:
            return loader.from_pretrained(folder, dtype=dtype, **kwargs), {}
        return loader.from_pretrained(folder, dtype=dtype, output_loading_info=True, **kwargs)
    finally:
        torch.use_deterministic_algorithms(False)


def generators() -> str:
    """A digest of the states of all random number generators."""
    states = torch.get_rng_state().tolist(), numpy.random.get_state(), random.getstate()
    return hashlib.sha256(pickle.dumps(states)).hexdigest()


def info_differences(info: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    return [
        f"{name}: {info.get(name)}, expected {expected.get(name)}"[:600]
        for name in expected | info
        if info.get(name) != expected.get(name)
    ]


def saved_differences(streamed: Any, plain: Any, folder: Path) -> list[str]:
    """Files that we save differently from what stock saves of the plain model, or an error that only one of us has.

    And tensors that a weight stream gives otherwise than our files have them, or patches otherwise than a new pass.
    """
    target = folder.with_name(f"saved {folder.name}")
    # transformers puts tensors with one memory into one shard, and takes empty ones that lie side by side for such.
    has_empty = any(tensor.numel() == 0 for tensor in plain.state_dict().values() if isinstance(tensor, torch.Tensor))
    kwargs = {} if has_empty else {"max_shard_size": SAVED_SHARD_SIZE}
    errors: dict[str, str] = {}

    def attempt(name: str, save: Callable[[], Any]) -> None:
        try:
            save()
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"
        dist.barrier()

    # Stock's on the main rank only; the others need to know whether it could.
    attempt("stock", lambda: plain.save_pretrained(target / f"stock {dist.get_rank()}", **kwargs))
    with saves_with(chunk_bytes=2**14, progress=False):
        attempt("ours", lambda: hf_zero_stream.save_pretrained(streamed, target / "ours", **kwargs))
    if errors:
        found = [] if len(errors) == 2 else [f"saving: {name}: {error}"[:400] for name, error in errors.items()]
    else:
        found = [f"saving: {name} differs" for name in different(target / "ours", target / "stock 0")]
        stream = hf_zero_stream.weight_stream(streamed, bucket_bytes=2**16, deltas=True)
        tensors = taken(stream)
        if dist.get_rank() == 0:
            found += [f"stream: {name} differs" for name in differing(tensors, tensors_of(target / "ours"))]
        change(streamed, 1)
        patched(tensors, stream)
        found += [f"stream: a patch of {name} differs" for name in differing(tensors, taken(stream))]
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(target, ignore_errors=True)
    return found


@contextmanager
def recorded_ops() -> Iterator[set[str]]:
    """The names of the conversion ops that run inside."""
    used: set[str] = set()
    originals = {
        op: op.convert
        for op in core_model_loading.ConversionOps.__subclasses__()
        if "convert" in vars(op) and not op.__name__.startswith("_")
    }

    def recording(original: Callable[..., Any]) -> Callable[..., Any]:
        def convert(self: Any, *args: Any, **kwargs: Any) -> Any:
            used.add(type(self).__name__)
            return original(self, *args, **kwargs)

        return convert

    for op, original in originals.items():
        op.convert = recording(original)
    try:
        yield used
    finally:
        for op, original in originals.items():
            op.convert = original
