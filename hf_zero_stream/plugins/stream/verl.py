"""verl's FSDP engine gives its weights to a rollout: by a weight stream, where it would gather each parameter.

All that takes weights from verl takes them from there: engines beside the training, and verl's checkpoint engines.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from ...plugin_api import is_alone, is_dtensor, named_parameters, shards_modules
from .merging import base_of
from .weights import WeightStream, weight_stream


_ENGINE = "verl.workers.engine.fsdp.transformer_impl"

_streams: WeakKeyDictionary[Any, WeightStream] = WeakKeyDictionary()
"""The streams, by the engine whose weights they are."""


def get_per_tensor_param(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """``FSDPEngine.get_per_tensor_param`` (all ranks): what gives names and tensors, and no config of adapters."""
    model = self.module
    adapts = hasattr(model, "peft_config")
    fits = shards_modules(model) and not is_alone() and isinstance(base_of(model), PreTrainedModel)
    if not fits or self._qat_enabled or (adapts and not self.model_config.lora.get("merge", False)):
        return original(self, *args, **kwargs)
    stream = _streams.get(self)
    if stream is None:
        stream = _streams[self] = weight_stream(model, "all", layout="model")
    of_verl = sys.modules[_ENGINE]
    state = model.state_dict(keep_vars=True)
    if adapts:
        state = of_verl.normalize_peft_param_name(state)
    following = _following(stream, of_verl.convert_weight_keys(state, model))
    if following is None:
        return original(self, *args, **kwargs)
    if adapts:
        return _tensors(stream, following, torch.bfloat16), None  # as verl casts what it has merged
    return of_verl.unfuse_moe_params(_tensors(stream, following), self.model_config.hf_config.model_type), None


_Following = Mapping[str, Sequence[tuple[str, torch.Tensor | None]]]
"""Maps the name of a streamed tensor, or nothing, to verl's items from then on; None stands for that tensor."""


def _following(stream: WeightStream, state: Mapping[str, torch.Tensor]) -> _Following | None:
    """Match `stream` with verl's `state`, which has persistent buffers too, and tied weights twice.

    None if the stream lacks any that ranks share, or has others.
    """
    own = {id(param): name for name, param in named_parameters(stream.model)}
    streamed = {each.name for each in stream.metadata}
    found: dict[str, list[tuple[str, torch.Tensor | None]]] = defaultdict(list)
    last = ""
    for name, value in state.items():
        its_own = own.get(id(value), "")
        if its_own in streamed:
            last = its_own
            found[last].append((name, None))
        elif is_dtensor(value):
            return None
        else:
            found[last].append((name, value.detach()))
    return found if found.keys() >= streamed else None


def _tensors(
    stream: WeightStream, following: _Following, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    yield from ((name, value) for name, value in following.get("", ()) if value is not None)
    for own, tensor in chain.from_iterable(stream):
        for name, value in following[own]:
            if value is None:
                value = tensor if dtype is None else tensor.to(dtype)
            yield name, value
