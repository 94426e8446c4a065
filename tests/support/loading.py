"""What ranks run to load one checkpoint plain and streamed with the same arguments, errors included."""

import copy
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers.integrations.deepspeed import HfDeepSpeedConfig

import hf_zero_stream
from tests.support.parity import differences, ds_config


Probe = Callable[[Any], Any]
"""What to look at in a loaded model besides its values."""


def find_class(name: str) -> Any:
    """A class of transformers by its name, or any other by `module:name`."""
    module, _, attribute = name.rpartition(":")
    return getattr(importlib.import_module(module) if module else transformers, attribute)


def load_with(how: str, class_name: str, path: Path | str | None, ds: dict[str, Any], kwargs: dict[str, Any]) -> Any:
    """`from_pretrained` under plain transformers, under stock's ZeRO-3, or streamed; always the same random numbers.

    Auto classes are streamed through their Streaming class, model classes inside `streaming()`.
    """
    kwargs = copy.deepcopy(kwargs)
    torch.manual_seed(0)
    model_class = find_class(class_name)
    if how == "streamed":
        own_class = getattr(hf_zero_stream, f"Streaming{class_name}", None)
        if own_class is not None:
            return own_class.from_pretrained(path, ds_config=ds, **kwargs)
        with hf_zero_stream.streaming():
            return model_class.from_pretrained(path, ds_config=ds, **kwargs)
    keeps_zero3_on = HfDeepSpeedConfig(ds) if how == "stock" else None
    try:
        return model_class.from_pretrained(path, **kwargs)
    finally:
        del keeps_zero3_on


def compare(
    class_name: str,
    path: Path | str | None,
    kwargs: dict[str, Any],
    ds_dtype: torch.dtype = torch.float32,
    probe: Probe | None = None,
) -> dict[str, Any]:
    """Load plain and streamed: what differs, loading infos, what `probe` sees in both, and the report."""
    kwargs = {"output_loading_info": True, **kwargs}
    plain, plain_info = load_with("plain", class_name, path, {}, kwargs)
    streamed, info = load_with("streamed", class_name, path, ds_config(ds_dtype), kwargs)
    return {
        "differences": differences(streamed, plain, ds_dtype),
        "info": info,
        "plain_info": plain_info,
        "probes": None if probe is None else (probe(streamed), probe(plain)),
        "report": streamed.streaming_report.to_dict(),
    }


def assert_same(results: list[dict[str, Any]], bytes_are_read: bool = True) -> None:
    """What `compare` found on every rank is that there is no difference, and that weights were streamed."""
    for result in results:
        assert not result["differences"], result["differences"]
        assert result["info"] == result["plain_info"], (result["info"], result["plain_info"])
        if result["probes"] is not None:
            assert result["probes"][0] == result["probes"][1], result["probes"]
    read = sum(rank["bytes_read"] for rank in results[0]["report"]["ranks"])
    assert bool(read) == bytes_are_read


def errors_of(
    hows: list[str], class_name: str, path: Path | str | None, kwargs: dict[str, Any]
) -> list[tuple[str, str] | None]:
    """For each way of loading, the type and the text of the error that it raises, or None if it loads."""
    # An error may come before ranks talk to each other; one that is done early must not leave while others connect.
    dist.barrier()
    found: list[tuple[str, str] | None] = []
    for how in hows:
        try:
            load_with(how, class_name, path, ds_config(), kwargs)
        except Exception as error:
            found.append((type(error).__name__, str(error)))
        else:
            found.append(None)
    return found
