"""The seams of ``save_pretrained``: transformers decides what is saved under which name in which shard, we write it.

transformers' own function runs in a temporary folder, on a state dict of lazy tensors. It reverses its renames and
conversions, splits the tensors into shards and writes config, generation config, custom code and index. We replace the
function that writes a shard by one that only notes its arguments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import StateDictSplit
from torch import nn
from transformers import PreTrainedModel, modeling_utils
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ..bindings.install import override_methods
from ..bindings.table import installed
from ..checkpoint.format import TensorEntry
from ..checkpoint.lazy import LazyTensor
from ..checkpoint.safetensors import NotedShard
from ..holdings.introspection import forget_quantizer, has_partition, is_packed
from ..registry import PatchScope, tool
from ..settings.scope import set_in_context
from ..settings.values import dtype_name


@dataclass(frozen=True)
class _SaveLayout:
    """The shards so far, and the tensors that packed weights hold: their bytes, and how the header describes them."""

    shards: list[NotedShard]
    packed: Mapping[str, tuple[TensorEntry, LazyTensor]]
    in_one_shard: bool


_current_layout: ContextVar[_SaveLayout | None] = ContextVar("hf_zero_stream_noted_shards", default=None)


def save_file(original: Callable[..., Any], tensors: Any, filename: Any, metadata: Any = None, **kwargs: Any) -> Any:
    if (layout := _current_layout.get()) is None:
        return original(tensors, filename, metadata=metadata, **kwargs)
    packed = {name: layout.packed[name][0] for name in tensors if name in layout.packed}
    layout.shards.append(NotedShard(Path(filename).name, tensors, metadata or {}, packed))
    return None


def split(original: Callable[..., Any], state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Add what packed weights hold, under the names of the checkpoint, which transformers is done converting."""
    if (layout := _current_layout.get()) is not None:
        state_dict.update({name: lazy for name, (_, lazy) in layout.packed.items()})
        if layout.in_one_shard:  # of tens of thousands of tensors, splitting them takes longer than all else
            return StateDictSplit({}, {SAFE_WEIGHTS_NAME: list(state_dict)}, {})
    return original(state_dict, *args, **kwargs)


def is_laying_out() -> bool:
    """Whether this thread is inside :func:`lay_out_pretrained`, where ``save_pretrained`` is transformers' own."""
    return _current_layout.get() is not None


def unwrap_model(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """A PreTrainedModel is no wrapper; to find that out, accelerate would import DeepSpeed, which takes seconds."""
    return model if is_laying_out() and isinstance(model, PreTrainedModel) else original(model, *args, **kwargs)


def lay_out_pretrained(
    model: PreTrainedModel,
    folder: Path,
    state_dict: dict[str, Any],
    parameters: Mapping[str, torch.Tensor],
    num_parameters: int,
    dtype: torch.dtype | None,
    *,
    own_code: bool = True,
    in_one_shard: bool = False,
    **kwargs: Any,
) -> list[NotedShard]:
    """Have ``model.save_pretrained`` write everything but the shards into `folder`, and return the shards.

    Args:
        state_dict: every entry of the model's state dict, lazy.
        parameters: lazy tensors with the whole shapes of the model's parameters, which partitioned ones do not show.
        num_parameters: number of elements of all parameters, for the index.
        dtype: written to the config as the dtype of the weights; default: the model's own.
        own_code: run the ``save_pretrained`` of the model's class; false if that is what calls this.
        in_one_shard: do not split the tensors, whatever their size.
    """
    forget_quantizer(model)
    packed = tool("take_packed", "packed", "saving packed weights")(model, state_dict) if is_packed(model) else {}
    layout = _SaveLayout([], packed, in_one_shard)
    methods = {
        "num_parameters": lambda *_, **__: num_parameters,
        "should_save_on_this_rank": lambda *_: True,  # transformers asks since 5.15
        # Of a sharded model: the lazy tensors are whole, and ranks come together later.
        "gather_sharded_state_dict_for_save": lambda model, state_dict, *_, **__: state_dict,
        "barrier_after_gathered_checkpoint_save": lambda *_: None,
        "get_parameter": lambda name: (
            parameters[name] if name in parameters else type(model).get_parameter(model, name)
        ),
    }
    with set_in_context(_current_layout, layout), override_methods(model, **methods), installed(PatchScope.SAVE):
        save = model.save_pretrained if own_code else partial(PreTrainedModel.save_pretrained, model)
        save(folder, is_main_process=True, state_dict=state_dict, **kwargs)
    if dtype is not None:
        note_dtype(folder / "config.json", dtype)
    return layout.shards


def names_of_shared(model: Any, state_dict: Mapping[str, Any], own: Callable[[str], str]) -> tuple[set[str], set[str]]:
    """Of tensors that modules share and the model does not tie: the names that are left out; those that are cloned.

    A script uses a layer twice, or ties a head by hand. transformers refuses to save that, but stock does not ask it:
    below ZeRO-3 DeepSpeed and FSDP2 clone each tensor of a state dict. At stage 3 DeepSpeed goes through the modules,
    each of which names a child once; what it names twice there, transformers leaves out if it could be a tie, and
    refuses else. Here that is cloned.

    Args:
        state_dict: all entries, by own names; `own` gives these for torch's names.
    """
    first: dict[int, str] = {}
    tensors = {name: value for name, value in state_dict.items() if isinstance(value, torch.Tensor)}
    shared = {name: other for name, value in tensors.items() if (other := first.setdefault(id(value), name)) != name}
    if not shared or not isinstance(model, PreTrainedModel):
        return set(), set()
    if not any(map(has_partition, tensors.values())):
        ties = getattr(model, "all_tied_weights_keys", None) or {}
        return set(), {name for name, other in shared.items() if not {name, other} & {*ties}}
    named = {own(name) for name in _names_by_children(model)}
    ties = modeling_utils._get_tied_weight_keys(model)
    left_out = shared.keys() - named

    def may_be_tie(*names: str) -> bool:
        return any(re.search(pattern, name) for pattern in ties for name in names)

    return left_out, {name for name, other in shared.items() if name not in left_out and not may_be_tie(name, other)}


def _names_by_children(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """The names of parameters and buffers as DeepSpeed's ``_zero3_consolidated_16bit_state_dict`` comes to them."""
    yield from (f"{prefix}{name}" for name in (*module._parameters, *module._buffers))
    for name, child in module.named_children():
        yield from _names_by_children(child, f"{prefix}{name}.")


def reverse_all_conversions(model: PreTrainedModel) -> None:
    """Have ``save_pretrained`` reverse all conversions of the model's type, if its load has used none.

    Of a load of the model's own names there is nothing to reverse, as transformers sees it.
    """
    if not getattr(model, "_weight_conversions", None):
        vars(model).pop("_weight_conversions", None)


def index_name(variant: str | None) -> str:
    """The file name of the index of a sharded checkpoint."""
    return modeling_utils._add_variant(SAFE_WEIGHTS_INDEX_NAME, variant)


def note_dtype(path: Path, dtype: torch.dtype) -> None:
    """Write `dtype` into a ``config.json`` as that of the weights."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)  # the name of earlier versions
    config["dtype"] = dtype_name(dtype)
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
