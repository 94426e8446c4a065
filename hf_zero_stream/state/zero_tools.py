"""DeepSpeed's tools on folders of ours: ``zero_to_fp32`` answers, and what cannot load a state says what it is.

Beside a state of a ZeRO training lie our :mod:`.zero_to_fp32` as a script, where DeepSpeed puts its own, and
:mod:`..pickled.deepspeed_names`. Beside every state lies a file with the names of what is not trained.
"""

from __future__ import annotations

import io
import json
import os
import stat
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.deepspeed_names import entries_of_deepspeed
from ..errors import CheckpointError
from ..holdings.marks import is_adapted, whole_shape
from ..holdings.own_names import named_buffers, named_parameters, own_names
from ..holdings.slots import MASTER
from ..holdings.training import Training
from ..loading.dry_load import lazily_loaded, load_of_layouts
from ..saving.pending import finish_pending
from ..seams.saving import stored_names
from ..settings.config import StreamingConfig
from ..settings.scope import active_configs
from . import zero_to_fp32
from .layout import persistent_buffers
from .record import CLIENT, FILE, StateRecord


SCRIPT = "zero_to_fp32.py"

_TO_TORCH = """#!/usr/bin/env python
from zero_to_fp32 import main

main(asks_dtype=True)
"""


def has_zero(trained: Any) -> bool:
    """Whether `trained` is an engine with ZeRO, for whose states there are DeepSpeed's tools."""
    return bool(getattr(trained, "zero_optimization", bool)())


def names_of(training: Training, keys: Sequence[str], exact: Collection[str] = ()) -> Mapping[str, Any]:
    """What :mod:`.zero_to_fp32` and a conversion must know to give all tensors of the model, by DeepSpeed's names.

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
    (place / zero_to_fp32.NAMES).write_text(json.dumps(names, indent=1) + "\n", encoding="utf-8")


def write_scripts(folder: Path) -> None:
    """Write the scripts that DeepSpeed writes, into the folder where it does."""
    source = Path(zero_to_fp32.__file__).read_text(encoding="utf-8")
    for name, text in ((SCRIPT, source), ("zero_to_torch.py", _TO_TORCH)):
        path = folder / name
        path.write_text(text, encoding="utf-8")
        path.chmod(path.stat().st_mode | stat.S_IEXEC)


def tensors_of_model(folder: str, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Tensors of the weights in `folder`, by the names and in the layout that they have in the model.

    Raises:
        CheckpointError: a model of the folder's config has none of these names.
    """
    with closing(load_of_layouts(StreamingConfig())) as load:
        model, _, _ = lazily_loaded(folder, load, local_files_only=True)
        lazy: dict[str, Any] = {**dict(model.named_parameters()), **dict(model.named_buffers(remove_duplicate=False))}
        if missing := [name for name in names if name not in lazy]:
            raise CheckpointError(
                f"{folder}: it has no values for {', '.join(missing[:8])} ({len(missing)} in all). Load the state "
                "into the training, and save the model."
            )
        return {name: lazy[name].materialise() for name in names}


def _state_in(folder: Any) -> str | None:
    """The folder of the state that a function of DeepSpeed's is to read, inside ``streaming()``, if it is ours."""
    return None if not active_configs() or entries_of_deepspeed(folder) else zero_to_fp32.state_in(os.fspath(folder))


def state_dict(original: Callable[..., Any], folder: Any, exclude_frozen_parameters: Any, *args: Any) -> Any:
    """What the public functions of DeepSpeed's module all call, wherever they have been imported."""
    state = _state_in(folder)
    if state is None:
        return original(folder, exclude_frozen_parameters, *args)
    return zero_to_fp32.state_dict_of(state, bool(exclude_frozen_parameters), tensors_of_model)


def get_state_dict(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if active_configs():
        finish_pending(raises=False)  # the state that is asked for may not be complete
    return original(*args, **kwargs)


def model_state_file(original: Callable[..., Any], checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
    """Of a state, the contents that Lightning's converter loads by itself, to keep what is saved beside an engine."""
    state = _state_in(checkpoint_dir)
    if state is None:
        return original(checkpoint_dir, *args, **kwargs)
    data = StateRecord.read(Path(state, FILE)).data_for(0)
    return _file_of(data.get(CLIENT, {}) if isinstance(data, dict) else {})


def optim_files(original: Callable[..., Any], checkpoint_dir: Any, *args: Any, **kwargs: Any) -> Any:
    """The same of what that converter only looks into."""
    if _state_in(checkpoint_dir) is None:
        return original(checkpoint_dir, *args, **kwargs)
    return [_file_of({"optimizer_state_dict": {"zero_stage": 3}})]


def _file_of(content: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return file
