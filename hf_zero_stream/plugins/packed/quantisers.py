"""Has transformers dequantise the weights that can stay quantised, by the ``quant_method`` of their config.

Each function is called with the fields of a checkpoint's ``quantization_config``, and returns the fields of the config
by which transformers' own quantizer dequantises lazy tensors, or a quantizer that does so instead; None if the
installed versions do not. `casts`: weights get the dtype of the model; else somebody else casts them. A plug-in names
such a function in ``Plugin.tools``, as "quantiser fp8".
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.quantizers.base import HfQuantizer

from ...errors import UnsupportedError
from ...plugin_api import has_tool, tool
from .bitsandbytes import dequantising_quantizer
from .quantised import COMPRESSED_FORMATS


Fields = Mapping[str, Any]

_SPARSE_FORMATS = {"sparse-bitmask", "sparse-24-bitmask", "marlin-24"}
"""Of which compressed-tensors 0.20 knows no more than the names."""


def dequantiser_of(fields: Fields, *, casts: bool) -> Fields | HfQuantizer | None:
    """Call the function that a plug-in has for a config with these `fields`; None if no plug-in has one."""
    name = f"quantiser {fields.get('quant_method', '')}"
    function: Callable[..., Fields | HfQuantizer | None] | None = tool(name, "packed") if has_tool(name) else None
    return None if function is None else function(fields, casts=casts)


def refuse_sparse(fields: Fields, place: str) -> None:
    """Raise an UnsupportedError for a format of which stock leaves the weights random, or cannot read the shapes."""
    groups = fields.get("config_groups") or {}
    used = {(fields.get("sparsity_config") or {}).get("format"), fields.get("format")}
    used |= {group.get("format") for group in groups.values()}
    if found := sorted(_SPARSE_FORMATS & used):
        raise UnsupportedError(
            f"{place}: quantization_config has the format {found[0]} of compressed-tensors, which keeps some elements "
            "of each four. Neither transformers 5 nor hf_zero_stream reads it: stock would leave weights random. Save "
            "the checkpoint dense, or without sparsity, with the release of compressed-tensors that wrote it."
        )


def by_transformers(fields: Fields, *, casts: bool) -> Fields | None:
    """transformers' own quantizer, where its config knows ``dequantize``; it always casts."""
    cls = AUTO_QUANTIZATION_CONFIG_MAPPING.get(fields["quant_method"])
    if cls is None or "dequantize" not in inspect.signature(cls.__init__).parameters:
        return None
    return {**fields, "dequantize": True}


def of_compressed_tensors(fields: Fields, *, casts: bool) -> Fields | None:
    """transformers' own quantizer, for formats that work on lazy tensors."""
    groups = fields.get("config_groups") or {}
    formats = {group.get("format") or fields.get("format") for group in groups.values()}
    return by_transformers(fields, casts=casts) if formats <= set(COMPRESSED_FORMATS) else None


def of_bitsandbytes(fields: Fields, *, casts: bool) -> HfQuantizer | None:
    """A quantizer of ours, which leaves the model as it is."""
    knows_operations = hasattr(HfQuantizer, "get_load_operations")
    return dequantising_quantizer(fields, casts=casts) if knows_operations else None
