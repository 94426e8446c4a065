"""``training_state.json``: what of a training is no tensor of its parameters' shapes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from ..checkpoint.format import parse_object
from ..errors import CheckpointError
from ..holdings.slots import Slot, is_storage_kind
from ..settings.values import dtype_name, is_dtype_name
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
class Form:
    """What an optimizer keeps of a parameter (:mod:`.forms`).

    Attributes:
        each: of elementwise entries, by name: how they are (:func:`..holdings.slots.storage_kind`).
        small: all others that do not go whole, by name, as JSON has them (:func:`.forms.with_kind`).
    """

    each: Mapping[str, str] = field(default_factory=dict)
    small: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SlotPart:
    """What an optimizer keeps of a slot as a whole (:mod:`.wholes`).

    Attributes:
        tensors: by name dtype, shape, whether it is on the host, and strides if its elements are in another order.
        values: all others, by name, as JSON has them.
    """

    tensors: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class GroupRecord:
    """A group of an optimizer.

    Attributes:
        options: learning rate, weight decay, ...
        parameters: own names of those that are trained.
        shapes: of these.
        forms: the numbers of their forms.
        own: options that differed between ranks, by a digest of what each trained in this group (:mod:`.wholes`).
    """

    options: Mapping[str, Any]
    parameters: Sequence[str]
    shapes: Sequence[Sequence[int]]
    forms: Sequence[int]
    own: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def faults(self, forms: int) -> Iterable[str]:
        """The fields that are not what they must be, in a record from anywhere that has so many `forms`."""
        sizes = len(self.parameters) if isinstance(self.parameters, list) else -1
        if not _is_dict(self.options, object):
            yield "options"
        if not _are_names(self.parameters):
            yield "parameters"
        if not isinstance(self.shapes, list) or len(self.shapes) != sizes or not all(map(_is_shape, self.shapes)):
            yield "shapes"
        if (
            not isinstance(self.forms, list)
            or len(self.forms) != sizes
            or not all(_is_integer(number) and 0 <= number < forms for number in self.forms)
        ):
            yield "forms"
        if not _is_dict(self.own, dict):
            yield "own"


@dataclass(frozen=True, kw_only=True)
class StateRecord:
    """The contents of the file.

    Attributes:
        optimizer: its class.
        keys: the elementwise states, each in files of its own, beside the values.
        forms: what is kept of parameters: each different one once.
        whole: own names of the parameters of which anything belongs to a slot as a whole.
        parts: what that is, by a digest of what lies in the slot.
        beside: the names of what users keep beside parameters, each in files of its own (:mod:`..saving.beside`).
        untrained: own names of buffers and of parameters that are not trained, whose values are in the state.
        base: of adapters, digests of what is not trained and not in the state, by own names (:mod:`.base`); else None.
        base_of: where that was loaded from.
        scheduler: its class and its state.
        data: what the user gave; on rank 0, if ranks gave different things.
        of_ranks: of those of the fields `data`, `scheduler` and `scaler` that differed between ranks, what each rank
            had, by name; rank 0's is in the field itself.
        buffers: own names of the buffers that differed between ranks: each rank's values are in the state
            (:mod:`.tensors`).
        dtype: of what is trained: masters, or the parameters themselves.
        weights: the files of weights that were saved with it, beside its folder. No resume reads them.
        digests: of the files of the state, in hexadecimal, by name (:mod:`..checkpoint.digests`).
        shared: by other names of tied parameters, and of buffers that layers share, the first name of each.
        live: what torch calls tensors in wrappers, by own names.
        training: its id (:mod:`..bindings.history`).
        version: of the format.
    """

    optimizer: str
    keys: Sequence[str]
    groups: Sequence[GroupRecord]
    forms: Sequence[Form]
    whole: Sequence[str] = ()
    parts: Mapping[str, SlotPart] = field(default_factory=dict)
    beside: Sequence[str] = ()
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

    @cached_property
    def trained(self) -> frozenset[str]:
        """Own names of the parameters that are trained."""
        return frozenset(name for group in self.groups for name in group.parameters)

    @cached_property
    def places(self) -> dict[str, int]:
        """By the name of each parameter that is trained its place among all."""
        return {name: place for place, name in enumerate(chain.from_iterable(it.parameters for it in self.groups))}

    @cached_property
    def form_of(self) -> dict[str, Form]:
        """By the name of each parameter that is trained its form."""
        numbers = ((name, it) for group in self.groups for name, it in zip(group.parameters, group.forms, strict=True))
        return {name: self.forms[number] for name, number in numbers}

    @property
    def has_tensors_of_parts(self) -> bool:
        """Whether there are files of what is kept as a whole."""
        return any(part.tensors for part in self.parts.values())

    @property
    def base_digests(self) -> dict[str, Digest] | None:
        return None if self.base is None else {name: Digest.of_json(value) for name, value in self.base.items()}

    def renamed(self, rename: Callable[[str], str]) -> StateRecord:
        """This record with other names of parameters."""
        groups = [replace(group, parameters=[*map(rename, group.parameters)]) for group in self.groups]
        base = None if self.base is None else {rename(name): value for name, value in self.base.items()}
        untrained, buffers, whole = ([*map(rename, names)] for names in (self.untrained, self.buffers, self.whole))
        return replace(self, groups=groups, untrained=untrained, buffers=buffers, whole=whole, base=base)

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
            forms = [Form(**form) for form in found.pop("forms")]
            parts = {digest: SlotPart(**part) for digest, part in found.pop("parts").items()}
            record = cls(groups=groups, forms=forms, parts=parts, **found)
        except (TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{path}: its entries are not those of a training state: {error}") from error
        record._check(path)
        return record

    def _check(self, path: Path) -> None:
        faults = [name for name, is_sound in _FIELDS.items() if not is_sound(getattr(self, name))]
        groups = enumerate(self.groups)
        faults += [f"groups[{number}].{name}" for number, group in groups for name in group.faults(len(self.forms))]
        faults += [f"forms[{number}]" for number, form in enumerate(self.forms) if not _is_form(form)]
        faults += [f"parts[{digest}]" for digest, part in self.parts.items() if not _is_part(part)]
        if faults:
            raise CheckpointError(
                f"{path}: {', '.join(faults[:8])}: expected what save_state writes there. Copy the state again, or go "
                "on from an older one."
            )
        names = [name for group in self.groups for name in group.parameters]
        if len(set(names)) != len(names) or len(set(self.keys)) != len(self.keys):
            raise CheckpointError(f"{path}: expected names of parameters, each in one group, and of states, each once")
        try:
            options = [[group.options, group.own] for group in self.groups]
            small = [*(form.small for form in self.forms), *(part.values for part in self.parts.values())]
            restored([self.own, self.of_ranks, options, small])
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


def _are_names(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(name, str) for name in value)


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(_is_integer(size) and size >= 0 for size in value)


def _is_form(form: Form) -> bool:
    return (
        _is_dict(form.each, str)
        and all(_is_key(key) and is_storage_kind(kind) for key, kind in form.each.items())
        and _is_dict(form.small, object)
    )


def _is_part(part: SlotPart) -> bool:
    has_tensors = _is_dict(part.tensors, list) and all(map(_is_tensor, part.tensors.items()))
    return has_tensors and _is_dict(part.values, object)


def _is_tensor(item: tuple[str, Any]) -> bool:
    key, value = item
    return (
        _is_key(key)
        and len(value) == 4
        and is_dtype_name(value[0])
        and _is_shape(value[1])
        and isinstance(value[2], bool)
        and _is_shape(value[3])
        and len(value[3]) in (0, len(value[1]))
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
    "beside": lambda value: _are_names(value) and all(map(_is_key, value)),
    "whole": _are_names,
    "untrained": _are_names,
    "base": _is_base,
    "base_of": lambda value: isinstance(value, str),
    "scheduler": _is_scheduler,
    "scaler": lambda value: value is None or _is_dict(value, object),
    "counters": lambda value: _is_dict(value, int) and all(map(_is_integer, value.values())),
    "world_size": _is_integer,
    "batch_size": lambda value: value is None or _is_integer(value),
    "of_ranks": _are_of_ranks,
    "buffers": _are_names,
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
    return None if widest is None else dtype_name(widest)
