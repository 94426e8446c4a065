"""The jobs of a sweep that load by ``from_pretrained(distributed_config=...)``."""

from pathlib import Path
from typing import Any

import torch
from transformers.distributed import DistributedConfig

import hf_zero_stream
from hf_zero_stream.errors import UnsupportedError
from tests.support.sharded import moved, sharded_differences
from tests.sweep.destinations import Destination
from tests.sweep.loads import class_of, generators, info_differences, load, load_plain, recorded_ops, saved_differences


def ours(case: dict[str, Any], folder: Path, dtype: torch.dtype, destination: Destination) -> dict[str, Any]:
    """Streamed and saved again; a model that torch or transformers does not shard, or not rightly, is a row, too."""
    model_class = class_of(case)
    with recorded_ops() as ops:
        plain, plain_info = load_plain(model_class, folder, dtype)
    drawn = generators()
    try:
        with hf_zero_stream.streaming():
            streamed, info = load(
                model_class, folder, dtype, distributed_config=DistributedConfig(**destination.sizes)
            )
    except Exception as error:
        refusal = _stocks_refusal(case, folder, dtype, destination)
        # Of such a tie stock computes other logits, or raises in the forward pass.
        is_tie = isinstance(error, UnsupportedError) and str(error).startswith("The config ties")
        if not is_tie and refusal != f"{type(error).__name__}: {error}":
            raise
        return {"refused": refusal or str(error), "differences": [], "ops": sorted(ops)}
    found = [] if generators() == drawn else ["the random number generators are not as after a plain load"]
    found += [*info_differences(info, plain_info), *sharded_differences(streamed, plain), *moved(streamed)]
    found += saved_differences(streamed, plain, folder)
    return {"differences": found, "ops": sorted(ops)}


def stock(case: dict[str, Any], folder: Path, dtype: torch.dtype, destination: Destination) -> dict[str, Any]:
    """Stock transformers with the same arguments."""
    model_class = class_of(case)
    plain, plain_info = load_plain(model_class, folder, dtype)
    loaded, info = load(model_class, folder, dtype, distributed_config=DistributedConfig(**destination.sizes))
    return {"differences": [*info_differences(info, plain_info), *sharded_differences(loaded, plain)]}


def _stocks_refusal(case: dict[str, Any], folder: Path, dtype: torch.dtype, destination: Destination) -> str:
    """The error by which stock refuses the same load, or ""."""
    try:
        load(class_of(case), folder, dtype, distributed_config=DistributedConfig(**destination.sizes))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
