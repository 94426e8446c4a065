"""All seams of loads, complete: importing this refuses versions of transformers that lack what they rely on."""

from __future__ import annotations

from transformers import PreTrainedModel, core_model_loading, dynamic_module_utils, modeling_utils
from transformers.integrations import deepspeed as transformers_deepspeed

from ..errors import refuse_unknown_version
from . import keys, loading, packing, quantised, remote, sharding  # noqa: F401 - they fill REPLACEMENTS
from .session import REPLACEMENTS, missing_names


__all__ = ["REPLACEMENTS"]

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
