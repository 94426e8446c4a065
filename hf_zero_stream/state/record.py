"""``training_state.json``: what of a training is no tensor of its parameters' shapes."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.format import parse_object
from ..errors import CheckpointError
from ..holdings.slots import Slot, is_storage_kind
from ..sources.base import is_plain_name
from .digests import Digest
from .plain import restored


FILE = "training_state.json"
LATEST = "latest"
"""The file in the folder of a checkpoint that names the folder of its training state, as DeepSpeed's does."""

CLIENT = "client_state"
"""Where a record's `data` has what the user gave to ``engine.save_checkpoint``."""

_FORMAT = "hf_zero_stream training state"
_VERSION = 2
_DIGEST = re.compile("[0-9a-f]{16}")
_OF_RANKS = ("data", "scheduler", "scaler")


@dataclass(frozen=True)
class GroupRecord:
    """A group of an optimizer.

    Attributes:
        options: learning rate, weight decay, ...
        parameters: own names of those that are trained.
        numbers: what the optimizer keeps of each of them that is one number, as `step`: by name, one for all
            parameters, or a list with one for each.
        shapes: of the parameters; may be empty if they are not known.
        lacking: what the optimizer keeps of some of the parameters only, by name: the others.
        kinds: of those `numbers` that are tensors, their dtypes, and ``host`` if only they are there, by name.
        others: what it keeps beside, such as None, by name: each value that there is, and the names of the parameters
            that have it; None for all of them.
        tensors: elementwise states that differ from what is trained, by name: how
            (:func:`..holdings.slots.storage_kind`), and of which parameters.
        in_blocks: what it keeps in blocks (:mod:`.blocks`), by name: of which parameters.
        parts: each slot that is kept in blocks, on whatever rank: a digest of what lies in it, and for each name in it
            dtype, shape, and whether only it is on the host.
    """

    options: Mapping[str, Any]
    parameters: Sequence[str]
    numbers: Mapping[str, Any]
    shapes: Sequence[Sequence[int]] = ()
    lacking: Mapping[str, Sequence[str]] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)
    others: Mapping[str, Sequence[Sequence[Any]]] = field(default_factory=dict)
    tensors: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict)
    in_blocks: Mapping[str, Sequence[str]] = field(default_factory=dict)
    parts: Sequence[Sequence[Any]] = ()

    def renamed(self, rename: Callable[[str], str]) -> GroupRecord:
        """This record with other names of parameters."""

        def names(of: Sequence[str]) -> list[str]:
            return [*map(rename, of)]

        return replace(
            self,
            parameters=names(self.parameters),
            lacking={key: names(of) for key, of in self.lacking.items()},
            others={
                key: [[written, None if of is None else names(of)] for written, of in values]
                for key, values in self.others.items()
            },
            tensors={key: {kind: names(of) for kind, of in of_key.items()} for key, of_key in self.tensors.items()},
            in_blocks={key: names(of) for key, of in self.in_blocks.items()},
        )

    def faults(self) -> Iterable[str]:
        """The fields that are not what they must be, in a record from anywhere."""
        sizes = len(self.parameters) if isinstance(self.parameters, list) else -1
        if not _is_dict(self.options, object):
            yield "options"
        if not isinstance(self.parameters, list) or not all(isinstance(name, str) for name in self.parameters):
            yield "parameters"
        if not _is_dict(self.numbers, object) or not all(
            all(map(is_plain_number, values)) and len(values) == sizes
            if isinstance(values, list)
            else is_plain_number(values)
            for values in self.numbers.values()
        ):
            yield "numbers"
        if (
            not isinstance(self.shapes, list)
            or len(self.shapes) not in (0, sizes)
            or not all(map(_is_shape, self.shapes))
        ):
            yield "shapes"
        if not _is_dict(self.lacking, list) or not all(map(_are_names, self.lacking.values())):
            yield "lacking"
        if not _is_dict(self.in_blocks, list) or not all(map(_are_names, self.in_blocks.values())):
            yield "in_blocks"
        if not isinstance(self.parts, (list, tuple)) or not all(map(_is_part, self.parts)):
            yield "parts"
        if not _is_dict(self.kinds, str) or not all(map(_is_kind_of_number, self.kinds.values())):
            yield "kinds"
        if not _is_dict(self.others, list) or not all(map(_is_other, chain.from_iterable(self.others.values()))):
            yield "others"
        if not _is_dict(self.tensors, dict) or not all(
            is_storage_kind(kind) and _are_names(names)
            for of_key in self.tensors.values()
            for kind, names in of_key.items()
        ):
            yield "tensors"


@dataclass(frozen=True, kw_only=True)
class StateRecord:
    """The contents of the file.

    Attributes:
        optimizer: its class.
        keys: the elementwise states, each in files of its own, beside the values.
        untrained: own names of buffers and of parameters that are not trained, whose values are in the state.
        base: of adapters, digests of what is not trained and not in the state, by own names (:mod:`.base`); else None.
        base_of: where that was loaded from.
        scheduler: its class and its state.
        data: what the user gave; on rank 0, if ranks gave different things.
        of_ranks: of those of the fields `data`, `scheduler` and `scaler` that differed between ranks, what each rank
            had, by name; rank 0's is in the field itself.
        buffers: own names of the buffers that differed between ranks: each rank's values are in the state
            (:mod:`.buffers`).
        dtype: of what is trained: masters, or the parameters themselves.
        weights: the files of weights that were saved with it, beside its folder. No resume reads them.
        digests: of the files of the state, in hexadecimal, by name (:mod:`.file_digests`).
        shared: by other names of tied parameters, and of buffers that layers share, the first name of each.
        live: what torch calls tensors in wrappers, by own names.
        training: its id (:mod:`..holdings.history`).
        version: of the format.
    """

    optimizer: str
    keys: Sequence[str]
    groups: Sequence[GroupRecord]
    untrained: Sequence[str] = ()
    base: Mapping[str, Sequence[Any]] | None = None
    base_of: str = ""
    scheduler: Mapping[str, Any] | None = None
    scaler: Mapping[str, Any] | None = None
    counters: Mapping[str, int] = field(default_factory=dict)
    world_size: int = 1
    batch_size: int | None = None
    data: Any = None
    of_ranks: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    buffers: Sequence[str] = ()
    dtype: str | None = None
    weights: Sequence[str] = ()
    digests: Mapping[str, str] = field(default_factory=dict)
    shared: Mapping[str, str] = field(default_factory=dict)
    live: Mapping[str, str] = field(default_factory=dict)
    training: str = ""
    version: int = _VERSION

    @property
    def trained(self) -> frozenset[str]:
        """Own names of the parameters that are trained."""
        return frozenset(name for group in self.groups for name in group.parameters)

    @property
    def has_parts(self) -> bool:
        """Whether anything is kept in blocks, in files of its own."""
        return any(group.parts for group in self.groups)

    @property
    def base_digests(self) -> dict[str, Digest] | None:
        return None if self.base is None else {name: Digest.of_json(value) for name, value in self.base.items()}

    def renamed(self, rename: Callable[[str], str]) -> StateRecord:
        """This record with other names of parameters."""
        groups = [group.renamed(rename) for group in self.groups]
        base = None if self.base is None else {rename(name): value for name, value in self.base.items()}
        untrained, buffers = [*map(rename, self.untrained)], [*map(rename, self.buffers)]
        return replace(self, groups=groups, untrained=untrained, buffers=buffers, base=base)

    @property
    def own(self) -> dict[str, Any]:
        """What each rank may have of its own."""
        return {name: getattr(self, name) for name in _OF_RANKS}

    def with_own_of(self, ranks: Sequence[Mapping[str, Any]]) -> StateRecord:
        """This record of rank 0's with what all ranks have of their own."""
        of_ranks = {name: [of_rank[name] for of_rank in ranks] for name in _OF_RANKS}
        apart = {name: values for name, values in of_ranks.items() if len({*map(json.dumps, values)}) > 1}
        return replace(self, **ranks[0], of_ranks=apart)

    def for_rank(self, rank: int) -> StateRecord:
        """This record as `rank` goes on with it: with what it had, or if it was not there, what rank 0 had."""
        own = {name: values[rank] for name, values in self.of_ranks.items() if rank < len(values)}
        return replace(self, **own)

    def to_json(self) -> str:
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1, allow_nan=True) + "\n"

    @classmethod
    def read(cls, path: Path) -> StateRecord:
        """Raises a CheckpointError if the file is not what :meth:`to_json` writes."""
        try:
            found = parse_object(path.read_bytes(), str(path))
        except OSError as error:
            raise CheckpointError(f"{path}: expected the record of a state; it cannot be read: {error}") from error
        if found.pop("format", None) != _FORMAT:
            raise CheckpointError(f'{path}: expected "format": "{_FORMAT}". Give a folder that save_state wrote.')
        if (version := found.get("version")) != _VERSION:
            raise CheckpointError(
                f"{path}: expected version {_VERSION}; got {version!r}. Another version of hf_zero_stream saved this "
                "state: go on from it with that one."
            )
        try:
            groups = [GroupRecord(**group) for group in found.pop("groups")]
            record = cls(groups=groups, **found)
        except (TypeError, KeyError) as error:
            raise CheckpointError(f"{path}: its entries are not those of a training state: {error}") from error
        record._check(path)
        return record

    def _check(self, path: Path) -> None:
        faults = [name for name, is_sound in _FIELDS.items() if not is_sound(getattr(self, name))]
        faults += [f"groups[{number}].{name}" for number, group in enumerate(self.groups) for name in group.faults()]
        if faults:
            raise CheckpointError(
                f"{path}: {', '.join(faults[:8])}: expected what save_state writes there. Copy the state again, or go "
                "on from an older one."
            )
        names = [name for group in self.groups for name in group.parameters]
        if len(set(names)) != len(names) or len(set(self.keys)) != len(self.keys):
            raise CheckpointError(f"{path}: expected names of parameters, each in one group, and of states, each once")
        try:
            groups = [[group.options, group.others] for group in self.groups]
            restored([self.own, self.of_ranks, groups])
        except (TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{path}: expected dicts as save_state writes them: {error}") from error


def _is_dict(value: Any, kind: type) -> bool:
    return isinstance(value, dict) and all(isinstance(item, kind) for item in value.values())


def _is_base(value: Any) -> bool:
    try:
        return value is None or all(isinstance(Digest.of_json(it), Digest) for it in value.values())
    except (AttributeError, TypeError, ValueError):
        return False


def _is_integer(value: Any) -> bool:
    return type(value) is int and abs(value) < 2**63


def is_plain_number(value: Any) -> bool:
    """Whether `value` is None, or a number that JSON has as it is."""
    return value is None or isinstance(value, bool) or _is_integer(value) or _is_no_nan(value)


def _is_no_nan(value: Any) -> bool:
    return isinstance(value, float) and not math.isnan(value)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_kind_of_number(value: str) -> bool:
    return isinstance(getattr(torch, value.removesuffix(" host"), None), torch.dtype)


def _is_other(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and (value[1] is None or _are_names(value[1]))


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(_is_integer(size) and size >= 0 for size in value)


def _is_part(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and isinstance(value[0], str)
        and _is_dict(value[1], list)
        and all(
            _is_key(key)
            and len(it) == 3
            and isinstance(it[0], str)
            and _is_kind_of_number(it[0])
            and _is_shape(it[1])
            and isinstance(it[2], bool)
            for key, it in value[1].items()
        )
    )


def _is_scheduler(value: Any) -> bool:
    return value is None or (
        _is_dict(value, object)
        and isinstance(value.get("class"), str)
        and isinstance(value.get("state"), dict)
        and _is_integer(value.get("steps_per_step", 1))
    )


def _are_of_ranks(value: Any) -> bool:
    return _is_dict(value, list) and all(
        name in _OF_RANKS and all(map(_FIELDS.get(name, lambda _: True), of_ranks)) for name, of_ranks in value.items()
    )


def _is_file_digest(item: tuple[str, Any]) -> bool:
    name, digest = item
    return is_plain_name(name) and isinstance(digest, str) and bool(_DIGEST.fullmatch(digest))


def _is_near(name: Any) -> bool:
    return isinstance(name, str) and all(map(is_plain_name, name.split("/")))  # PEFT has folders of adapters


def _is_key(value: Any) -> bool:
    """Whether `value` can be the name of a state, which is a part of its files' names."""
    return isinstance(value, str) and value.isidentifier()


_FIELDS: Mapping[str, Callable[[Any], bool]] = {
    "optimizer": lambda value: isinstance(value, str),
    "keys": lambda value: isinstance(value, list) and all(map(_is_key, value)),
    "untrained": lambda value: isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value),
    "base": _is_base,
    "base_of": lambda value: isinstance(value, str),
    "scheduler": _is_scheduler,
    "scaler": lambda value: value is None or _is_dict(value, object),
    "counters": lambda value: _is_dict(value, int) and all(map(_is_integer, value.values())),
    "world_size": _is_integer,
    "batch_size": lambda value: value is None or _is_integer(value),
    "of_ranks": _are_of_ranks,
    "buffers": lambda value: isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value),
    "dtype": lambda value: value is None or isinstance(value, str),
    "weights": lambda value: isinstance(value, (list, tuple)) and all(_is_near(it) for it in value),
    "digests": lambda value: isinstance(value, dict) and all(map(_is_file_digest, value.items())),
    "training": lambda value: isinstance(value, str),
    "shared": lambda value: _is_dict(value, str),
    "live": lambda value: _is_dict(value, str),
}
"""Conditions on the fields of a record from anywhere."""


def is_tag(name: str) -> bool:
    """Whether `name` can be that of a state's folder."""
    return is_plain_name(name) and len(name) < 250


def write_latest(folder: Path, tag: str) -> None:
    """Name the newest state of `folder`."""
    draft = folder / f"{LATEST}.draft"
    draft.write_text(tag, encoding="utf-8")
    os.replace(draft, folder / LATEST)


def dtype_of(slots: Iterable[Slot]) -> str | None:
    """The widest dtype of what is trained."""
    dtypes = {slot.values.dtype for slot in slots}
    widest = max(dtypes, key=lambda dtype: (dtype.itemsize, str(dtype)), default=None)
    return None if widest is None else str(widest).removeprefix("torch.")
