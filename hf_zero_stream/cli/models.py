"""The model that a model class makes of a checkpoint, by transformers' own renames and conversions, without values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedConfig
from transformers.quantizers import AutoQuantizationConfig
from transformers.utils import logging

from ..config import StreamingConfig
from ..errors import CheckpointError, HfZeroStreamError
from ..loading.dry_load import lazily_loaded, load_of_layouts


__all__ = ["lazy_model", "load_arguments", "quantisation", "transformers_errors"]


def load_arguments(folder: Path, trust_remote_code: bool, dequantize: bool) -> dict[str, Any]:
    """Arguments for ``from_pretrained``; transformers never asks on the terminal whether code may run."""
    if not dequantize:
        return {"trust_remote_code": trust_remote_code}
    method = quantisation(folder)
    if method is None:
        raise CheckpointError(f"{folder}: --dequantize: config.json has no quantization_config. Leave the option out.")
    loading = AutoQuantizationConfig.from_dict({"quant_method": method, "dequantize": True})
    return {"trust_remote_code": trust_remote_code, "quantization_config": loading}


def quantisation(folder: Path) -> str | None:
    """The method by which a checkpoint is quantised, such as "fp8"; None if it is not."""
    config, _ = PreTrainedConfig.get_config_dict(folder)
    found = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    return found and str(found.get("quant_method"))


def lazy_model(folder: Path, arguments: Mapping[str, Any]) -> tuple[nn.Module, set[str], set[str]]:
    """(the model on the meta device; the names that the checkpoint lacks; those of them that are tied to others)."""
    with closing(load_of_layouts(StreamingConfig(progress=False))) as load:
        return lazily_loaded(str(folder), load, **arguments)


@contextmanager
def transformers_errors(path: str) -> Iterator[None]:
    """Inside, other libraries' errors about a checkpoint or a config become ours, and progress bars are off."""
    were_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    except HfZeroStreamError:
        raise
    except Exception as error:  # a config.json can make them raise any exception
        raise CheckpointError(f"{path}: no model can be made of it: {type(error).__name__}: {error}") from error
    finally:
        if were_on:
            logging.enable_progress_bar()
