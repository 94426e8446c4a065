"""transformers' loop over checkpoint keys: what differs in it while the tensors are lazy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import core_model_loading

from .. import patching
from ..checkpoint.lazy import LazyTensor
from .session import Session


__all__ = ["REPLACEMENTS"]


def _convert(original: Callable[..., Any], self: Any, layer_name: str, *args: Any, **kwargs: Any) -> Any:
    """A converter, run once more on real tensors where one of its ops cannot work on lazy ones (``numpy()``)."""
    if Session.streaming() is None:
        return original(self, layer_name, *args, **kwargs)
    collected = {pattern: list(tensors) for pattern, tensors in self.collected_tensors.items()}
    try:
        return original(self, layer_name, *args, **kwargs)
    except core_model_loading.SkipParameters:
        for pattern, tensors in collected.items():
            # What is collected are functions that give a tensor.
            values = [tensor() if callable(tensor) else tensor for tensor in tensors]
            self.collected_tensors[pattern] = [
                value.materialise() if isinstance(value, LazyTensor) else value for value in values
            ]
        kwargs["loading_info"].conversion_errors.pop(layer_name, None)
        return original(self, layer_name, *args, **kwargs)


def _tqdm(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if Session.streaming() is not None and args:
        return args[0]  # nothing is loaded in that loop; our own bar counts bytes
    return original(*args, **kwargs)


def _deepcopy(original: Callable[..., Any], value: Any, *args: Any) -> Any:
    """transformers copies a converter for each checkpoint key, and throws away all copies but a target's first.

    A copy in which nothing was collected is as good as new: it is handed out again until it is used. For the 45,000
    tensors of DeepSeek-V3 that is more than half of the planning time.
    """
    session = Session.streaming()
    if session is None or not isinstance(value, core_model_loading.WeightConverter):
        return original(value, *args)
    template, spare = session.spares.get(id(value), (value, None))
    if spare is None or spare.collected_tensors:
        spare = original(value, *args)
        session.spares[id(value)] = (template, spare)
    return spare


def _spawn_materialize(original: Callable[..., Any], thread_pool: Any, *args: Any, **kwargs: Any) -> Any:
    # A lazy tensor is made in microseconds: handing it to a thread takes longer.
    return original(thread_pool if Session.streaming() is None else None, *args, **kwargs)


REPLACEMENTS: dict[tuple[Any, str], patching.Replacement] = {
    (core_model_loading.WeightConverter, "convert"): _convert,
    (core_model_loading, "deepcopy"): _deepcopy,
    (core_model_loading, "spawn_materialize"): _spawn_materialize,
    (core_model_loading, "tqdm"): _tqdm,
}
