"""Models that were dequantised, while they were loaded or afterwards, are saved as if they had never been quantised.

transformers takes the quantizer and its config off such a model, but the model goes on knowing the conversions of its
load. A save would reverse them: quantise anew, or give weights the names of the quantised tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from transformers.quantizers.auto import AutoQuantizationConfig

from ...errors import UnsupportedError
from ...plugin_api import ops_of_quantizer


def dequantising(quantized: Mapping[str, Any], wished: Any) -> Any:
    """Return the config by which a checkpoint, `quantized` by its own one, loads as values: the `wished`, if any.

    Raises an UnsupportedError if there is none.
    """
    config = AutoQuantizationConfig.from_dict(dict(quantized)) if wished is None else copy.copy(wished)
    if not hasattr(config, "dequantize"):
        raise UnsupportedError(
            f"The checkpoint is quantised by {quantized.get('quant_method')}, which transformers does not dequantise "
            "while it loads, and the model that it is to be loaded into is not quantised. Load it with "
            "from_pretrained, call dequantize(), and save that."
        )
    config.dequantize = True
    return config


def forget_quantizer(model: Any) -> None:
    """Take off a `model` that is dequantised what the quantizer has left: conversions, and a config in a part."""
    conversions = getattr(model, "_weight_conversions", None) or []
    has_ops = any(map(ops_of_quantizer, conversions))
    if has_ops:
        model._weight_conversions = list(without_quantizer(conversions))
    is_packed = hasattr(model, "_hf_zero_stream_dequantised")  # and is saved as it is
    if is_packed or not (has_ops or vars(model).get("is_quantized") is False):  # transformers says so of what it was
        return
    for config in (model.config, model.config.get_text_config(decoder=True)):  # where transformers looks for it
        vars(config).pop("quantization_config", None)


def without_quantizer(conversions: Iterable[Any]) -> Iterator[Any]:
    """`conversions` as they would be for a checkpoint that is not quantised."""
    for each in conversions:
        dequantising = ops_of_quantizer(each)
        if not dequantising:
            yield each
        elif rest := [op for op in each.operations if op not in dequantising]:
            yield _of_plain_weights(each, rest, dequantising[0].hf_quantizer)


def _of_plain_weights(conversion: Any, operations: list[Any], quantizer: Any) -> Any:
    """The model's own `conversion`, with these `operations`, from before the `quantizer` had it collect scales too."""
    # Versions of transformers without this attribute have such conversions of FP8 only.
    serialized = getattr(quantizer, "serialized_names", None) or {"weight": ["weight", "weight_scale_inv"]}
    plain = {f".{name}": f".{param}" for param, names in serialized.items() for name in names}
    sources: dict[str, None] = {}
    for pattern in conversion._original_source_patterns:
        whole = pattern.removesuffix("$")
        longest = max((name for name in plain if whole.endswith(name)), key=len, default="")  # .weight.absmax
        sources[whole.removesuffix(longest) + plain[longest] if longest else pattern] = None
    own = type(conversion)(list(sources), list(conversion._original_target_patterns), operations)
    for scope in ("scope_prefix", "base_model_prefix", "force_cpu"):
        if hasattr(conversion, scope):
            setattr(own, scope, getattr(conversion, scope))
    return own
