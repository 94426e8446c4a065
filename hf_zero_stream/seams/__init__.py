"""transformers' seams; the only package that touches its private surface.

``from_pretrained`` stays transformers' own. While a :class:`Session` is active in a thread, its seams differ there:

1. ``get_init_context``: the model is built on the meta device instead of inside ``zero.Init``;
2. ``_load_pretrained_model``: the *stock* function runs, in its branch without ZeRO-3, on a state dict of lazy
   tensors, so that renames, conversions, prefix and dtype rules and the report of missing keys stay transformers' own;
3. ``_move_missing_keys_from_meta_to_device``: lazy tensors become ZeRO-3 partitions and are read;
4. ``_initialize_weights`` and the comparison of tied weights work on partitions;
5. dequantising ops, which would make whole tensors, are given a piece at a time.

Tried with transformers 5.1.0, 5.17.0 and 5.23.0.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel, core_model_loading, modeling_utils
from transformers.integrations import deepspeed as transformers_deepspeed

from .. import patching
from ..versions import refuse_unknown_version


__all__ = [
    "ModelsConfig",
    "REPLACEMENTS",
    "Session",
    "Stopped",
    "other_config",
    "raise_if_misfit",
    "zero3_config",
    "zero3_hidden",
]

_RELIED_ON = (
    (PreTrainedModel, "get_init_context"),
    (PreTrainedModel, "_load_pretrained_model"),
    (PreTrainedModel, "_finalize_model_loading"),
    (PreTrainedModel, "_move_missing_keys_from_meta_to_device"),
    (PreTrainedModel, "_initialize_weights"),
    (PreTrainedModel, "_adjust_missing_and_unexpected_keys"),
    (core_model_loading, "convert_and_load_state_dict_in_model"),
    (modeling_utils, "get_checkpoint_shard_files"),
    (modeling_utils, "load_state_dict"),
    (modeling_utils, "set_zero3_state"),
    (transformers_deepspeed, "_hf_deepspeed_config_weak_ref"),
    (transformers_deepspeed, "set_hf_deepspeed_config"),
)
refuse_unknown_version("transformers", [name for owner, name in _RELIED_ON if not hasattr(owner, name)])

# Only now: these modules rely on the names above.
from . import conversion, keys, loading, quantised  # noqa: E402
from .ds_config import ModelsConfig, other_config, zero3_config, zero3_hidden  # noqa: E402
from .loading import raise_if_misfit  # noqa: E402
from .session import Session, Stopped  # noqa: E402


REPLACEMENTS: dict[tuple[Any, str], patching.Replacement] = {
    place: make
    for module in (loading, conversion, keys, quantised)
    for place, make in module.REPLACEMENTS.items()
    if hasattr(*place)
}
"""(owner, attribute) -> what makes its replacement; what this version of transformers does not have needs none."""
