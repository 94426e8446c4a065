"""Pairs the tensors of a model in use with what a checkpoint has for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from ..errors import LoadError
from .base import Sourced, source_of
from .own_names import named_buffers, named_parameters
from .skeleton import whole_shape


class LiveSources(NamedTuple):
    """What to fill, by the checkpoint's names.

    Attributes:
        buffers: flat.
        repeated: other names of `parameters` that the model has tied, and for which the checkpoint has values too.
    """

    parameters: Mapping[str, Sourced]
    buffers: Mapping[str, Sourced]
    repeated: Mapping[str, Sourced]


def live_sources(live_model: nn.Module, lazy_model: nn.Module, missing: set[str]) -> LiveSources:
    """Where the tensors of `live_model` get their values from; `lazy_model` has those of the checkpoint.

    Raises:
        LoadError: a tensor of `live_model` is not there, has another shape or no memory.
    """
    live: dict[str, Any] = dict(named_buffers(live_model, remove_duplicate=False))
    live.update(named_parameters(live_model, remove_duplicate=False))
    parameters: dict[str, Sourced] = {}
    buffers: dict[str, Sourced] = {}
    repeated: dict[str, Sourced] = {}
    seen: set[int] = set()
    for name, lazy in [*lazy_model.named_parameters(), *lazy_model.named_buffers()]:
        view = None if name in missing else source_of(lazy)
        if view is None:
            continue
        found = live.get(name)
        shape = None if found is None else whole_shape(found)
        if found is None or shape != lazy.shape:
            described = "no such tensor" if shape is None else tuple(shape)
            raise LoadError(
                f"load_into: the checkpoint's {name} has shape {tuple(lazy.shape)}, the model {described}. "
                "Load a checkpoint of the same architecture and sizes."
            )
        if found.is_meta:
            raise LoadError(
                f"load_into: the model's {name} is on the meta device, without memory. Call "
                "model.to_empty(device=...) first."
            )
        if not isinstance(found, nn.Parameter):
            buffers[name] = (found.view(-1), view)
        elif id(found) in seen:
            repeated[name] = (found, view)
        else:
            seen.add(id(found))
            parameters[name] = (found, view)
    return LiveSources(parameters, buffers, repeated)
