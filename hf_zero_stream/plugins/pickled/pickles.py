"""Reads a pickle without running it: Python's own unpickler, with inert stand-ins for classes and calls.

A pickle is a program. Here nothing in it is imported, called or looked up: a global stays a pair of names, and a call
stays a function's names beside its arguments. What comes out are plain containers and numbers, and :class:`Global`,
:class:`Call` and :class:`Persistent` objects.

It is the unpickler in Python, because the one in C cannot be bounded: a memo index of 4 bytes makes it allocate
gigabytes, and a tuple of tuples as a key takes its hash function for ever, or the stack.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...errors import CheckpointError
from ...plugin_api import excerpt


MOST_BYTES = 512 * 2**20
"""Most bytes of a pickle; those of checkpoints of a hundred thousand tensors have 20 MB."""

MOST_NODES = 20_000_000
"""Most opcodes of a pickle, and so most objects that it may make."""


@dataclass(frozen=True, slots=True)
class Global:
    """An object that a pickle would import."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False, slots=True)
class Call:
    """A call or an instance that a pickle would make, and what it would put into the result.

    Attributes:
        state: what BUILD would set.
        entries: (key, value) that would be set by its ``__setitem__``.
        members: what would be appended or added.
    """

    function: Any
    arguments: tuple[Any, ...]
    state: Any = None
    entries: list[tuple[Any, Any]] = field(default_factory=list)
    members: list[Any] = field(default_factory=list)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.entries.append((key, value))

    def append(self, member: Any) -> None:
        self.members.append(member)

    add = append


@dataclass(frozen=True, eq=False, slots=True)
class Persistent:
    """An object that a pickle would ask its loader for, by this id."""

    id: Any


class Pickle(NamedTuple):
    """The contents of a pickle.

    Attributes:
        size_bytes: of the pickle itself; something else may follow it.
        globals: all that it names, whether or not `root` leads to them.
        calls: likewise.
        persistents: likewise.
    """

    root: Any
    size_bytes: int
    globals: list[Global]
    calls: list[Call]
    persistents: list[Persistent]


_KEYS = (str, bytes, int, float, type(None), Global)

_NOT_READ = {
    *("PERSID", "INST", "OBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4", "DICT", "FROZENSET"),
    *("BYTEARRAY8", "NEXT_BUFFER", "READONLY_BUFFER"),
}
"""Opcodes that are in no checkpoint; of protocol 0 and 5, most of them."""


def read_pickle(
    data: bytes, what: str, opcodes: AbstractSet[str] | None = None, *, objects_as_keys: bool = False
) -> Pickle:
    """Read the pickle at the beginning of `data`, and make no object of it; it may use these `opcodes` only.

    With `objects_as_keys`, dicts may have keys that would be made by a call; no two of them are equal here.

    Raises:
        CheckpointError: `what` is no sound pickle, or is larger than any checkpoint's.
    """
    if len(data) > MOST_BYTES:
        raise CheckpointError(f"{what}: expected a pickle of at most {MOST_BYTES} bytes; got {len(data)}")
    unpickler = _Unpickler(data, opcodes, objects_as_keys)
    try:
        root = unpickler.load()
    except CheckpointError as error:
        raise CheckpointError(f"{what}: {error}") from error
    except EOFError as error:
        raise CheckpointError(f"{what}: this pickle does not end") from error
    except _FAULTS as error:
        raise CheckpointError(f"{what}: this is no sound pickle: {type(error).__name__}: {error}") from error
    return Pickle(root, unpickler.file.tell(), unpickler.globals, unpickler.calls, unpickler.persistents)


_FAULTS = (pickle.UnpicklingError, ValueError, LookupError, TypeError, AttributeError, OverflowError, struct.error)


def object_kind(value: Any) -> str:
    """Name an object in a message; containers are not written out, since shared ones have no end of items."""
    if isinstance(value, (bool, int, float, str, bytes, type(None))):
        return excerpt(value)
    if isinstance(value, Call):
        return f"what {excerpt(str(value.function))} makes" if isinstance(value.function, Global) else "an object"
    if isinstance(value, (list, tuple, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    return excerpt(str(value)) if isinstance(value, Global) else "an object"


class _Opcodes(dict[int, Callable[["_Unpickler"], None]]):
    """The handlers of opcodes; counts the opcodes."""

    left = MOST_NODES

    def __getitem__(self, code: int) -> Callable[[_Unpickler], None]:
        self.left -= 1
        if self.left < 0:
            raise CheckpointError(f"expected at most {MOST_NODES} opcodes in a pickle")
        return super().__getitem__(code)

    def __missing__(self, code: int) -> Callable[[_Unpickler], None]:
        raise CheckpointError(f"the opcode {_NAMES.get(code, code)} is in no file of torch's")


_InPython: Any = pickle._Unpickler  # of whose attributes nobody gives types


class _Unpickler(_InPython):
    """Makes stand-ins, and hashes no key but strings, numbers and flat tuples of them."""

    def __init__(self, data: bytes, opcodes: AbstractSet[str] | None, objects_as_keys: bool) -> None:
        self.file = io.BytesIO(data)
        super().__init__(self.file)
        self.dispatch = _Opcodes(
            (code, self._own.get(name, step))
            for code, step in _InPython.dispatch.items()
            if (name := _NAMES[code]) not in _NOT_READ and (opcodes is None or name in opcodes)
        )
        self._size_bytes = len(data)
        self._keys = (*_KEYS, Call) if objects_as_keys else _KEYS
        self.globals: list[Global] = []
        self.calls: list[Call] = []
        self.persistents: list[Persistent] = []

    def find_class(self, module: str, name: str) -> Any:
        self.globals.append(Global(module, name))
        return self.globals[-1]

    def persistent_load(self, pid: Any) -> Any:
        self.persistents.append(Persistent(pid))
        return self.persistents[-1]

    def _call(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if not isinstance(function, (Global, Call)) or not isinstance(arguments, tuple):
            raise TypeError(f"a call of a {type(function).__name__}, with a {type(arguments).__name__}")
        self.calls.append(Call(function, arguments))
        self.append(self.calls[-1])

    def _empty_set(self) -> None:
        self.calls.append(Call(Global("builtins", "set"), ()))
        self.append(self.calls[-1])

    def _build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if not isinstance(target, Call) or target.state is not None:
            raise TypeError(f"a state for a {type(target).__name__}, or a second one")
        if isinstance(state, dict):
            state = dict(state)  # what it is now
            self.dispatch.left -= len(state)
        target.state = state

    def _set_items(self) -> None:
        self._set(self.pop_mark())

    def _set_item(self) -> None:
        self._set([self.stack.pop(-2), self.stack.pop()])

    def _set(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, (dict, Call)) or len(items) % 2:
            raise TypeError(f"items for a {type(target).__name__}, or a key without a value")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # The hash of deep tuples would recurse, and that of shared ones take for ever.
            if not all(isinstance(part, self._keys) for part in (key if isinstance(key, tuple) else (key,))):
                raise TypeError(f"a {type(key).__name__} as a key")
            target[key] = value

    def _frame(self) -> None:
        (size,) = struct.unpack("<Q", self.read(8))
        if size > self._size_bytes - self.file.tell():
            raise ValueError("a frame that goes on behind the end")
        self._unframer.load_frame(size)

    def _stop(self) -> None:
        if len(self.stack) != 1 or self.metastack:
            raise ValueError("it ends with another number of values than one")
        self.load_stop()

    _own = {
        **dict.fromkeys(("REDUCE", "NEWOBJ"), _call),
        **{"EMPTY_SET": _empty_set, "BUILD": _build, "FRAME": _frame, "STOP": _stop},
        **{"SETITEM": _set_item, "SETITEMS": _set_items},
    }
    """Opcodes that do something else than in Python."""


_NAMES = {
    value[0]: name
    for name, value in vars(pickle).items()
    if name.isupper() and type(value) is bytes and len(value) == 1
}
"""The names of opcodes, by code."""
