"""transformers' loop over checkpoint keys: made fast, and able to work on lazy tensors."""

from __future__ import annotations

from typing import Any

from transformers import core_model_loading

from ..checkpoint.lazy import LazyTensor
from .session import Original, Session, in_session


@in_session
def copy_converter(session: Session, original: Original, value: Any, *args: Any) -> Any:
    """transformers copies a converter for each checkpoint key, and throws away all copies but a target's first.

    So the same copy is returned until it has collected a tensor. For the 45,000 tensors of DeepSeek-V3, the copies
    would take more than half of the planning time.
    """
    if not isinstance(value, core_model_loading.WeightConverter):
        return original(value, *args)
    template, spare = session.spares.get(id(value), (value, None))
    if spare is None or spare.collected_tensors:
        spare = original(value, *args)
        session.spares[id(value)] = (template, spare)
    return spare


@in_session
def convert(session: Session, original: Original, self: Any, layer_name: str, *args: Any, **kwargs: Any) -> Any:
    """Run a converter again on real tensors if one of its ops (``numpy()``) cannot work on lazy ones."""
    collected = {pattern: list(tensors) for pattern, tensors in self.collected_tensors.items()}
    try:
        return original(self, layer_name, *args, **kwargs)
    except core_model_loading.SkipParameters:
        for pattern, tensors in collected.items():
            # A converter collects functions that return tensors, or tensors.
            values = (tensor() if callable(tensor) else tensor for tensor in tensors)
            self.collected_tensors[pattern] = [it.materialise() if isinstance(it, LazyTensor) else it for it in values]
        kwargs["loading_info"].conversion_errors.pop(layer_name, None)
        return original(self, layer_name, *args, **kwargs)
