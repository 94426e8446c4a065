"""``names.json``: what a conversion of a training state must know of what is not trained."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..checkpoint.state_folder import NAMES
from ..holdings.marks import is_adapted, whole_shape
from ..holdings.own_names import named_buffers, named_parameters, own_names
from ..holdings.slots import MASTER
from ..holdings.training import Training
from ..seams.saving import stored_names
from .layout import persistent_buffers


def names_of(training: Training, keys: Sequence[str], exact: Collection[str] = ()) -> Mapping[str, Any]:
    """What a conversion must know to give all tensors of the model, by DeepSpeed's names.

    That is, by the model's name for it, the name in the files of weights and the shape: of buffers, of what is frozen,
    and of what is trained, if it has no masters. And other names of tied parameters and of buffers that layers
    share (`shared`), and the names that torch has for tensors in wrappers (`live`), by which DeepSpeed goes.
    """
    model, own = training.model, own_names(training.model)
    trained = {member.name: list(member.box.shape) for slot in training.slots for member in slot.members}
    first: dict[int, str] = {}
    shared: dict[str, str] = {}
    live: dict[str, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(param), name) != name:
            shared[name] = first[id(param)]
    persistent = persistent_buffers(model)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if own.get(name, name) in persistent and first.setdefault(id(buffer), name) != name:
            shared[name] = first[id(buffer)]
    for name, _ in [*model.named_parameters(), *model.named_buffers(remove_duplicate=False)]:
        if own.get(name, name) != name:
            live.setdefault(own[name], name)
    frozen = {
        name: list(whole_shape(param))
        for name, param in named_parameters(model)
        if name not in trained and not param.requires_grad
    }
    named = named_buffers(model, remove_duplicate=False)
    buffers = {name: list(buffer.shape) for name, buffer in named if persistent.get(name) == name}
    if is_adapted(model):  # of the base, only what is `exact`ly in the state is saved
        in_state = {name: [None, shape] for name, shape in frozen.items() if name in exact}
        return {"shared": shared, "live": live, "frozen": in_state, "left_out": len(frozen) - len(in_state)}
    noted = {"buffers": buffers, "frozen": frozen, "trained": {} if MASTER in keys else trained}
    stored = stored_names(model, {name: shape for shapes in noted.values() for name, shape in shapes.items()})
    found: dict[str, Any] = {
        kind: {name: [stored.get(name), shape] for name, shape in shapes.items()} for kind, shapes in noted.items()
    }
    return found | {"shared": shared, "live": live}


def write_names(place: Path, names: Mapping[str, Any]) -> None:
    """Write :func:`names_of` into the folder `place` of a state."""
    (place / NAMES).write_text(json.dumps(names, indent=1) + "\n", encoding="utf-8")
