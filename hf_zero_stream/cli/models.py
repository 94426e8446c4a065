"""The model that transformers makes of a checkpoint, without values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedConfig
from transformers.quantizers import AutoQuantizationConfig

from ..bindings.table import installed
from ..errors import CheckpointError, HfZeroStreamError
from ..loading.dry_load import lazily_loaded, load_of_layouts
from ..registry import PatchScope
from ..seams.session import bars_hidden
from ..settings.config import StreamingConfig


def load_arguments(place: str, trust_remote_code: bool, dequantize: bool) -> dict[str, Any]:
    """Arguments for ``from_pretrained``; transformers never asks on the terminal whether code may run."""
    if not dequantize:
        return {"trust_remote_code": trust_remote_code}
    method = quantisation_of(place)
    if method is None:
        raise CheckpointError(f"{place}: --dequantize: config.json has no quantization_config. Leave the option out.")
    loading = AutoQuantizationConfig.from_dict({"quant_method": method, "dequantize": True})
    return {"trust_remote_code": trust_remote_code, "quantization_config": loading}


def quantisation_of(place: str) -> str | None:
    """The method by which a checkpoint is quantised, such as "fp8"; None if it is not."""
    with installed(PatchScope.BLOCK):  # by which small files come from a URL
        config, _ = PreTrainedConfig.get_config_dict(place)
    found = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    return found and str(found.get("quant_method"))


def lazy_model(place: str, arguments: Mapping[str, Any]) -> tuple[nn.Module, set[str], set[str]]:
    """(the model on the meta device; the names that the checkpoint lacks; those of them that are tied to others)."""
    with closing(load_of_layouts(StreamingConfig(progress=False))) as load:
        return lazily_loaded(place, load, **arguments)


@contextmanager
def transformers_errors(path: str) -> Iterator[None]:
    """Turn other libraries' errors about a checkpoint or a config into ours, with progress bars off."""
    try:
        with bars_hidden():
            yield
    except HfZeroStreamError:
        raise
    except Exception as error:  # a config.json can make them raise any exception
        raise CheckpointError(f"{path}: no model can be made of it: {type(error).__name__}: {error}") from error
