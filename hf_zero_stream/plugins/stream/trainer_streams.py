"""The streams by which trainers of other libraries give their models to engines."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from ...plugin_api import is_packed, unwrapped
from .weights import WeightStream, weight_stream


_trainer_streams: WeakKeyDictionary[Any, WeightStream] = WeakKeyDictionary()


def stream_of(trainer: Any, model: Any, to: Any, only: Any = "all") -> WeightStream:
    """The stream by which `trainer` gives `model` to engines, made once: by its own names, or the hub's if packed."""
    stream = _trainer_streams.get(trainer)
    if stream is None:
        layout: Any = "hub" if is_packed(unwrapped(model)) else "model"
        stream = _trainer_streams[trainer] = weight_stream(model, to, layout=layout, only=only)
    return stream
