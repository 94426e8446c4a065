"""transformers' seams; the only package that touches its private surface.

``from_pretrained`` stays transformers' own. While a :class:`Session` is active in a thread, its seams differ there:

1. ``get_init_context``: the model is built on the meta device instead of inside ``zero.Init``;
2. ``_load_pretrained_model``: the *stock* function runs, in its branch without ZeRO-3, on a state dict of lazy
   tensors, so that renames, conversions, prefix and dtype rules and the report of missing keys stay transformers' own;
3. ``_move_missing_keys_from_meta_to_device``: lazy tensors become ZeRO-3 partitions and are read;
4. ``_initialize_weights`` and the comparison of tied weights work on partitions;
5. dequantising ops, which would make whole tensors, are given a piece at a time; or their inputs become parameters,
   and the model dequantises in its forward pass;
6. ``cached_files`` fetches small files from URLs, and gives the URLs of weights.

Tried with transformers 5.1.0, 5.17.0 and 5.23.0.
"""

from __future__ import annotations

from transformers import PreTrainedModel, core_model_loading, dynamic_module_utils, modeling_utils
from transformers.integrations import deepspeed as transformers_deepspeed

from ..errors import refuse_unknown_version
from . import keys, loading, packing, quantised, remote, sharding  # noqa: F401 - they fill REPLACEMENTS
from .ds_config import ModelsConfig, found_config
from .loading import raise_if_misfit
from .session import REPLACEMENTS, LazyModel, Session, Stopped, missing_names


__all__ = ["LazyModel", "ModelsConfig", "REPLACEMENTS", "Session", "Stopped", "found_config", "raise_if_misfit"]

_CALLED = (
    (PreTrainedModel, "_adjust_missing_and_unexpected_keys"),
    (core_model_loading, "convert_and_load_state_dict_in_model"),
    (dynamic_module_utils, "get_relative_imports"),
    (modeling_utils, "_add_variant"),
    (modeling_utils, "safe_save_file"),
    (modeling_utils, "set_zero3_state"),
    (modeling_utils, "split_torch_state_dict_into_shards"),
    (modeling_utils, "unwrap_model"),
    (transformers_deepspeed, "_hf_deepspeed_config_weak_ref"),
    (transformers_deepspeed, "set_hf_deepspeed_config"),
)
"""What we call or set, or replace for a save, besides the attributes that seams replace."""

refuse_unknown_version(
    "transformers",
    [*missing_names, *(f"{owner.__name__}.{name}" for owner, name in _CALLED if not hasattr(owner, name))],
)
