"""The objects in a file that ``torch.save`` wrote, looked into and not made: containers, numbers, places of tensors.

The pickle in the file is not run (see :mod:`.pickles`), so that what it would make are stand-ins. The functions here
say what a stand-in must be, and raise an error that names the place where it is something else. None of them walks
through an object deeper than it was asked to: a small pickle can describe a huge one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from math import prod
from typing import Any

import torch

from ...errors import CheckpointError
from ...plugin_api import MAX_DIMENSIONS, NotAMap, ReadableFile, TensorEntry, are_sizes, dtypes, excerpt
from .pickles import Call, Global, object_kind
from .torch_files import describe, field_of


_MAPPINGS = {Global("collections", "OrderedDict"), Global("collections", "defaultdict")}
_SIZE = Global("torch", "Size")
_WITH_ATTRIBUTES = Global("torch._tensor", "_rebuild_from_type_v2")
_TENSOR = {Global("torch", "Tensor"), Global("torch.nn.parameter", "Parameter")}

_MOST_NAME = 1024
_MOST_LOOKS = 2_000_000
"""Entries of dicts and lists that are looked at, as often as they are: a small pickle may refer to one many times."""
_MOST_PLAIN = 200_000
"""Objects in what is taken over as it is from one file: options, a scheduler's state, what the user gave."""
_BYTES_OF_OBJECT = 64
"""Bytes of a tensor in there that count as one object."""
_MOST_DEEP = 32


class NotPlain(Exception):
    """An object that is neither a number, nor a string, nor a container of such; the message names it."""


class TorchObjects:
    """Reads the objects of an open file of ``torch.save``, from its `root` on.

    Raises:
        CheckpointError: the file is not sound.
    """

    def __init__(self, file: ReadableFile, path: str) -> None:
        self.path = path
        self._file = file
        try:
            pickle, self._storages = describe(file, path)
        except NotAMap as reason:
            raise CheckpointError(f"{path}: {reason}, as no file of a training's state does.") from reason
        self.root = pickle.root
        self._looks = _MOST_LOOKS
        self._dicts: dict[int, Mapping[Any, Any]] = {}  # by the id of a call, which `root` keeps alive
        self._left = _MOST_PLAIN

    def fault(self, what: str, expected: str, found: Any) -> CheckpointError:
        """An error about the object `found`, which is called `what` in the file."""
        return CheckpointError(f"{self.path}: {what}: expected {expected}, found {object_kind(found)}.")

    def mapping(self, value: Any, what: str) -> Mapping[Any, Any]:
        if isinstance(value, Call) and value.function in _MAPPINGS:
            if id(value) not in self._dicts:
                self._dicts[id(value)] = dict(value.entries)
            value = self._dicts[id(value)]
        if not isinstance(value, dict):
            raise self.fault(what, "a dict", value)
        self._look(value, what)
        return value

    def _look(self, value: Sized, what: str) -> None:
        """Count what is looked at."""
        self._looks -= len(value)
        if self._looks < 0:
            raise CheckpointError(f"{self.path}: {what}: the file refers to more objects than any checkpoint's.")

    def get(self, value: Any, what: str, key: str) -> Any:
        """An entry of a dict that must have it."""
        found = self.mapping(value, what)
        if key not in found:
            raise CheckpointError(f"{self.path}: {what}: expected an entry {key!r}, found none.")
        return found[key]

    def sequence(self, value: Any, what: str) -> Sequence[Any]:
        if not isinstance(value, (list, tuple)):
            raise self.fault(what, "a list", value)
        self._look(value, what)
        return value

    def name(self, value: Any, what: str) -> str:
        if not isinstance(value, str) or not 0 < len(value) <= _MOST_NAME:
            raise self.fault(what, f"a name of at most {_MOST_NAME} characters", value)
        return value

    def count(self, value: Any, what: str) -> int:
        """A whole number that is not negative."""
        if type(value) is not int or not 0 <= value < 2**63:
            raise self.fault(what, "a number of elements", value)
        return value

    def sizes(self, value: Any, what: str) -> tuple[int, ...]:
        """Return the sizes of a tensor, whose product may be counted in 64 bits."""
        if isinstance(value, Call) and value.function == _SIZE and len(value.arguments) == 1:
            value = value.arguments[0]
        sizes = self.sequence(value, what)
        if not are_sizes(sizes):
            raise self.fault(what, f"at most {MAX_DIMENSIONS} sizes", value)
        if prod(size for size in sizes if size) >= 2**60:  # of empty tensors too: somebody multiplies without the 0
            raise CheckpointError(f"{self.path}: {what}: the sizes {excerpt(list(sizes))} overflow 64 bits.")
        return tuple(sizes)

    def attributes(self, value: Any, what: str) -> Mapping[str, Any]:
        """Return the attributes of an instance of a class, which is not made."""
        if not isinstance(value, Call) or not isinstance(value.state, dict):
            raise self.fault(what, "an object with attributes", value)
        return value.state

    def is_tensor(self, value: Any) -> bool:
        return (
            isinstance(value, Call) and value.function not in (_SIZE, *_MAPPINGS) and _plain_tensor(value) is not None
        )

    def python_attribute(self, value: Any, name: str) -> Any:
        """The attribute `name` that Python code has put on a tensor; None if there is none."""
        has_any = isinstance(value, Call) and value.function == _WITH_ATTRIBUTES and len(value.arguments) == 4
        attributes = value.arguments[3] if has_any else None
        return attributes.get(name) if isinstance(attributes, dict) else None

    def tensor(self, value: Any, what: str) -> TensorEntry:
        """Return the entry of a tensor that lies row by row and inside the file, whose number is not known here."""
        inner = _plain_tensor(value)
        if inner is None:
            raise self.fault(what, "a tensor", value)
        try:
            field = field_of(self.path, what, inner, self._storages)
        except NotAMap as reason:
            raise CheckpointError(f"{self.path}: {reason}.") from reason
        if "strides" in field:
            raise CheckpointError(f"{self.path}: {what}: expected a tensor that is stored row by row.")
        return TensorEntry(what, 0, dtypes()[field["dtype"]], tuple(field["shape"]), *field["data_offsets"])

    def number(self, value: Any, what: str) -> bool | int | float:
        """A number, or that in a tensor of one, which is read."""
        if isinstance(value, (bool, int, float)):
            return value
        stored = self.tensor(value, what)
        if stored.numel != 1:
            raise CheckpointError(f"{self.path}: {what}: expected one number, found {stored.numel}.")
        number: bool | int | float = self._values(stored).item()
        return number

    def _values(self, stored: TensorEntry) -> torch.Tensor:
        if not stored.numel:
            return torch.empty(stored.shape, dtype=stored.dtype)
        data = self._file.read(stored.start, stored.stop - stored.start)
        return torch.frombuffer(bytearray(data), dtype=stored.dtype).reshape(stored.shape)

    def plain(self, value: Any, what: str, *, exactly: bool = False) -> Any:
        """`value` as JSON has it: numbers, strings, lists, and dicts with keys of any kind.

        Tuples become lists, and tensors of one element numbers; not so if it is wanted `exactly`, and then there may
        be larger tensors too.

        Raises:
            NotPlain: there is something else in it, or more than anybody would keep.
        """

        def convert(value: Any, what: str, depth: int) -> Any:
            self._left -= 1
            if self._left < 0 or depth > _MOST_DEEP:
                raise NotPlain(f"{what} is too large")
            if isinstance(value, (bool, int, float, str, type(None))):
                return value
            if isinstance(value, Call) and value.function == _SIZE and len(value.arguments) == 1:
                value = value.arguments[0]
            if isinstance(value, (list, tuple)):
                items = [convert(item, f"an item of {what}", depth + 1) for item in value]
                return tuple(items) if exactly and isinstance(value, tuple) else items
            if isinstance(value, dict) or (isinstance(value, Call) and value.function in _MAPPINGS):
                pairs = self.mapping(value, what).items()
                if not all(isinstance(key, (str, int, float)) for key, _ in pairs):
                    raise NotPlain(f"{what} has keys that are no strings")
                return {key: convert(item, excerpt(key), depth + 1) for key, item in pairs}
            if _plain_tensor(value) is not None:
                try:
                    stored = self.tensor(value, what)
                except CheckpointError as error:
                    raise NotPlain(f"{what} is no tensor that can be read: {error}") from error
                if exactly:
                    self._left -= (stored.stop - stored.start) // _BYTES_OF_OBJECT
                    if self._left < 0:
                        raise NotPlain(f"{what} is too large")
                    return self._values(stored)
                if stored.numel == 1:
                    return self.number(value, what)
            raise NotPlain(f"{what} is {object_kind(value)}")

        return convert(value, what, 0)


def _plain_tensor(value: Any) -> Any:
    """Return the call that makes a tensor, without attributes that Python code has put on it; None if no tensor."""
    if isinstance(value, Call) and value.function == _WITH_ATTRIBUTES and len(value.arguments) == 4:
        function, kind, arguments, _ = value.arguments
        if not isinstance(kind, Global) or kind not in _TENSOR or not isinstance(arguments, tuple):
            return None
        value = Call(function, arguments)
    is_made = isinstance(value, Call) and isinstance(value.function, Global)
    return value if is_made and value.function.module in ("torch._utils", "torch._tensor") else None
