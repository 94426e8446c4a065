"""Configs shrunk by the names of their attributes, sub-configs included.

Widths are divided by one number, which keeps most of what a model demands of them: equal widths stay equal, and what
divides another still does. Where a model does not accept the result, another way to shrink is tried.
"""

import re
from dataclasses import dataclass
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from tests.sweep.fixes import BASES, FIXES


VOCABULARY = 99


@dataclass(frozen=True)
class Way:
    """One way to shrink a config.

    Attributes:
        divisor: what widths are divided by.
        odd: make the widths between two linear layers odd, so that partitions are padded.
        heads: if not 0, every attention gets that many heads.
        in_place: change a default config instead of making a new one from arguments.
    """

    divisor: int
    odd: bool = False
    heads: int = 0
    in_place: bool = False


WAYS = (
    Way(32, odd=True),
    Way(32),
    Way(32, in_place=True),
    Way(32, heads=2),
    Way(64),
    Way(128),
    Way(8),
    Way(8, in_place=True),
    Way(16),
    Way(4),
    Way(1),
    Way(1, in_place=True),
)


_LAYERS = re.compile(
    r"(^|_)(layers?|depths?|blocks|n_layer|num_layers|cycles|levels)$|^stage_num|stage_numb|^num_flows$"
)
_NOT_LAYERS = re.compile(
    r"vision_feature|spatial_target|layer_types|rope_scaling|cross_attention_layers|attention_layers|mlp_layers"
    r"|attn_layers|extract_layers|subsample|select|feature_level|no_rope|target_layer|kv_shared|fpn_top|bp_cycles"
)
_EXPERTS = re.compile(
    r"(^|_)(num_experts|n_routed_experts|num_local_experts|n_experts|expert_num|num_routed_experts)$"
)
_WIDTH = re.compile(
    r"hidden|dim|size|embd|width|channel|d_model|d_ff|d_kv|d_inner|d_head|rank|embed|inner|ffn|unit|dff|feature|state|filter"
)
_NOT_WIDTH = re.compile(
    r"image|img|patch_size|patch_length|kernel|window|stride|seq|chunk|block|max_|hop|n_fft|codebook_size|batch|num_hidden"
    r"|num_channels|pool|grid|crop|layer|factor|group|frame|rate|position|bin_|merge|shape|train_size|ratio|roi|spectr"
    r"|cache|_id$|strides|dilat|sampling|beam|sample(?!_initial)|in_channels|num_feat|num_mel|length|out_features|tubelet"
)
_BETWEEN = re.compile(r"intermediate_size|ffn_dim|d_ff$|ffn_hidden_size")
_HEADS = re.compile(r"(^|_)n?_?heads$")
_TOKEN = re.compile(r"(token|pad|bos|eos|_start|_end)(_id|_index)s?$|token_id$|token_index$|_id$|^ignore_token")


def _shrunk(name: str, value: int, way: Way) -> int:
    """What the attribute `name` becomes."""
    if "vocab" in name and "offset" not in name:
        return min(value, VOCABULARY)
    if _EXPERTS.search(name):
        return min(value, 4)
    if name in ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k"):
        return min(value, 2)
    if way.heads and _HEADS.search(name):
        return min(value, way.heads)
    if name.endswith("_groups"):
        return min(value, 4)
    if name in ("n_group", "num_expert_group"):
        return min(value, 2)
    if name in ("topk_group", "first_k_dense_replace", "moe_layer_start_index", "num_dense_layers"):
        return min(value, 1)
    if _TOKEN.search(name):
        return value if value < VOCABULARY else 5 + value % 89
    if name in ("max_position_embeddings", "n_positions", "max_source_positions", "n_ctx"):
        return min(value, 128)
    if _WIDTH.search(name) and not _NOT_WIDTH.search(name) and value >= 32:
        small = max(4, value // way.divisor)
        return small | 1 if way.odd and _BETWEEN.search(name) else small
    return value


def _layers_wanted(config: PreTrainedConfig) -> int:
    """Two, or as many as it takes to have a layer of every kind."""
    wanted = 2
    for kinds in (getattr(config, "layer_types", None), getattr(config, "mlp_layer_types", None)):
        if isinstance(kinds, (list, tuple)) and all(isinstance(kind, str) for kind in kinds) and kinds:
            wanted = max(wanted, *(list(kinds).index(kind) + 1 for kind in set(kinds)))
    return wanted if wanted <= 8 else 2


def _changes(config: PreTrainedConfig, way: Way) -> dict[str, Any]:
    """The attributes that shrinking changes, by name; sub-configs as dicts of the same kind."""
    changes: dict[str, Any] = {}
    layers = _layers_wanted(config)
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            changes[name] = {"model_type": value.model_type, **_changes(value, way)}
        elif isinstance(value, bool) or name.startswith("_") or name in ("id2label", "label2id"):
            continue
        elif isinstance(value, int):
            if _LAYERS.search(name) and not _NOT_LAYERS.search(name):
                new = min(value, layers)
            else:
                new = _shrunk(name, value, way)
            if new != value:
                changes[name] = new
        elif isinstance(value, (list, tuple)) and value and all(type(item) is int for item in value):
            if _LAYERS.search(name) and not _NOT_LAYERS.search(name):
                new = type(value)(min(item, 2) for item in value)
            else:
                new = type(value)(_shrunk(name, item, way) for item in value)
            if new != value:
                changes[name] = new
    return changes


def tiny_config(model_type: str, way: Way) -> PreTrainedConfig:
    """The type's default config, shrunk, with its fixes.

    Raises:
        Exception: whatever the config's own checks say of the result.
    """
    config_class = CONFIG_MAPPING[model_type]
    fix = FIXES.get(model_type, {})
    config = config_class(**BASES.get(model_type, {}))
    changes = _merged(_changes(config, way), fix)
    if way.in_place:
        _apply(config, changes)
    else:
        config = config_class(**_merged(BASES.get(model_type, {}), changes))
    if hasattr(config, "validate"):  # not in transformers 5.1
        config.validate()  # as saving will
    return config


def _merged(changes: dict[str, Any], fix: dict[str, Any]) -> dict[str, Any]:
    result = dict(changes)
    for name, value in fix.items():
        known = result.get(name)
        result[name] = _merged(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return result


def _apply(config: PreTrainedConfig, changes: dict[str, Any]) -> None:
    layers = vars(config).get("num_hidden_layers")
    for name, value in changes.items():
        if isinstance(vars(config).get(name), PreTrainedConfig) and isinstance(value, dict):
            _apply(vars(config)[name], value)
        elif name != "model_type":
            setattr(config, name, value)
    kept = changes.get("num_hidden_layers")
    for name, value in vars(config).items():
        if kept and isinstance(value, (list, tuple)) and len(value) == layers:
            setattr(config, name, value[:kept])
