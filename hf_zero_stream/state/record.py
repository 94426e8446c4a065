"""``training_state.json``: what of a training is no tensor of its parameters' shapes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..destinations.slots import Slot, is_number
from ..errors import CheckpointError, UnsupportedError


__all__ = [
    "FILE",
    "LATEST",
    "GroupRecord",
    "StateRecord",
    "numbers_of",
    "plain",
    "restored",
    "shard_of_key",
    "write_latest",
]

FILE = "training_state.json"
LATEST = "latest"
"""The file in the folder of a checkpoint that names the folder of its training state, as DeepSpeed's does."""

_FORMAT = "hf_zero_stream training state"
_VERSION = 1


@dataclass(frozen=True)
class GroupRecord:
    """A group of an optimizer.

    Attributes:
        options: learning rate, weight decay, ...
        parameters: names of those that are trained, in the model.
        numbers: what the optimizer keeps of each of them that is one number, as `step`: by name, one for all
            parameters, or a list with one for each.
        shapes: of the parameters; may be empty if they are not known.
    """

    options: Mapping[str, Any]
    parameters: Sequence[str]
    numbers: Mapping[str, Any]
    shapes: Sequence[Sequence[int]] = ()


@dataclass(frozen=True, kw_only=True)
class StateRecord:
    """What is in the file.

    Attributes:
        optimizer: its class.
        keys: the elementwise states, each in files of its own.
        scheduler: its class and its state.
        data: what the user gave.
    """

    optimizer: str
    keys: Sequence[str]
    groups: Sequence[GroupRecord]
    scheduler: Mapping[str, Any] | None = None
    scaler: Mapping[str, Any] | None = None
    counters: Mapping[str, int] = field(default_factory=dict)
    world_size: int = 1
    batch_size: int | None = None
    data: Any = None

    def to_json(self) -> str:
        return json.dumps({"format": _FORMAT, "version": _VERSION, **asdict(self)}, indent=1, allow_nan=True) + "\n"

    @classmethod
    def read(cls, path: Path) -> StateRecord:
        """Raises a CheckpointError if the file is not what :meth:`to_json` writes."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: expected the record of a state; it cannot be read: {error}") from error
        if not isinstance(found, dict) or found.pop("format", None) != _FORMAT:
            raise CheckpointError(f'{path}: expected "format": "{_FORMAT}". Give a folder that save_state wrote.')
        if (version := found.pop("version", None)) != _VERSION:
            raise CheckpointError(f"{path}: expected version {_VERSION}; got {version!r}. Update hf_zero_stream.")
        try:
            groups = [GroupRecord(**group) for group in found.pop("groups")]
            record = cls(groups=groups, **found)
        except (TypeError, KeyError) as error:
            raise CheckpointError(f"{path}: its entries are not those of a training state: {error}") from error
        record._check(path)
        return record

    def _check(self, path: Path) -> None:
        expected = {"optimizer": str, "keys": list, "counters": dict, "world_size": int}
        for name, kind in expected.items():
            if not isinstance(getattr(self, name), kind):
                raise CheckpointError(f"{path}: {name}: expected {kind.__name__}; got {getattr(self, name)!r}")
        names = [name for group in self.groups for name in group.parameters]
        if not all(isinstance(name, str) for name in [*names, *self.keys]) or len(set(names)) != len(names):
            raise CheckpointError(f"{path}: expected names of parameters, each in one group")


def write_latest(folder: Path, tag: str) -> None:
    """Name the newest state of `folder`."""
    draft = folder / f"{LATEST}.draft"
    draft.write_text(tag, encoding="utf-8")
    os.replace(draft, folder / LATEST)


_PAIRS = "(key, value)"  # JSON has only strings as keys


def plain(value: Any, what: str) -> Any:
    """`value` as JSON has it: numbers, strings, lists and dicts; raises an UnsupportedError for anything else."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    if isinstance(value, (list, tuple)):
        return [plain(item, what) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, (str, int, float)) for key in value):
        pairs = [[key, plain(item, what)] for key, item in value.items()]
        return dict(pairs) if all(isinstance(key, str) for key in value) else {_PAIRS: pairs}
    raise UnsupportedError(
        f"{what}: expected numbers, strings, lists and dicts, which can be written as JSON; got "
        f"{type(value).__name__}. Nothing that must be pickled is saved. Leave it out, and make it anew when you load."
    )


def restored(value: Any) -> Any:
    """What :func:`plain` was given, but for tuples, which are lists."""
    if isinstance(value, list):
        return [restored(item) for item in value]
    if isinstance(value, dict):
        if list(value) == [_PAIRS]:
            return {key: restored(item) for key, item in value[_PAIRS]}
        return {key: restored(item) for key, item in value.items()}
    return value


def numbers_of(slots: Iterable[Slot]) -> dict[str, Any]:
    """What the slots of one group keep that is one number."""
    of_slots = []
    for slot in slots:
        numbers = {key: value for key, value in slot.entries.items() if is_number(value)}
        of_slots += [numbers] * len(slot.members)
    found: dict[str, Any] = {}
    for key in {key: None for entries in of_slots for key in entries}:
        values = [plain(entries.get(key), key) for entries in of_slots]
        found[key] = values[0] if all(value == values[0] for value in values) else values
    return found


def shard_of_key(shard: str, first: str, key: str) -> str:
    """The name of the shard that has of `key` what the one named `shard` has of the key `first`."""
    folder, name = os.path.split(shard)
    return os.path.join(folder, name.replace(f".{first}", f".{key}", 1))  # transformers' name for a variant
