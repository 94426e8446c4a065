"""Reads a pickle without running it: an opcode loop that makes inert stand-ins in place of classes and calls.

A pickle is a program. Here nothing in it is imported, called or looked up: a global stays a pair of names, and a call
stays a function's names beside its arguments. What comes out are plain containers and numbers, and :class:`Global`,
:class:`Call` and :class:`Persistent` objects. The opcodes are taken apart by Python's own ``pickletools``, which runs
nothing either. Nodes are bounded, and nothing here recurses.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pickle import HIGHEST_PROTOCOL
from typing import Any, NamedTuple

from ..errors import CheckpointError
from .untrusted_json import excerpt


MOST_BYTES = 512 * 2**20
"""Of a pickle; those of checkpoints of a hundred thousand tensors have 20 MB."""

_FRAME_BYTES = 1 + 8
"""Of the opcode that begins a frame, with its argument."""

MOST_NODES = 20_000_000
"""Objects that a pickle may make."""


@dataclass(frozen=True, slots=True)
class Global:
    """What a pickle would import."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False, slots=True)
class Call:
    """What a pickle would call, or make an instance of, and what it would put into the result.

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


@dataclass(frozen=True, eq=False, slots=True)
class Persistent:
    """What a pickle would ask its loader for, by this id."""

    id: Any


class Pickle(NamedTuple):
    """What a pickle describes.

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


class _Mark:
    """Separates the items of a container on the stack."""


def read_pickle(
    data: bytes, what: str, opcodes: AbstractSet[str] | None = None, *, objects_as_keys: bool = False
) -> Pickle:
    """What the pickle at the beginning of `data` describes; it may use these `opcodes` only.

    With `objects_as_keys`, dicts may have keys that would be made by a call; no two of them are equal here.

    Raises:
        CheckpointError: `what` is no sound pickle, or is larger than any checkpoint's.
    """
    if len(data) > MOST_BYTES:
        raise CheckpointError(f"{what}: expected a pickle of at most {MOST_BYTES} bytes; got {len(data)}")
    machine = _Machine(objects_as_keys)
    try:
        for name, argument, position in _opcodes(data):
            if opcodes is not None and name not in opcodes:
                raise CheckpointError(f"the opcode {name} is in no such file")
            if name == "STOP":
                (root,) = machine.stack
                return Pickle(root, position + 1, machine.globals, machine.calls, machine.persistents)
            machine.step(name, argument)
    except CheckpointError as error:
        raise CheckpointError(f"{what}: {error}") from error
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, UnicodeError) as error:
        raise CheckpointError(f"{what}: this is no sound pickle: {type(error).__name__}: {error}") from error
    raise CheckpointError(f"{what}: this pickle does not end")


def _opcodes(data: bytes) -> Iterator[tuple[str, Any, int]]:
    """(name, argument, position) of each opcode.

    Raises:
        ValueError: there is a fault that ``pickletools`` passes over. Where an opcode lies across the end of a frame,
            Python's unpickler in C loses bytes, and goes on.
    """
    began = frame_end = 0
    for opcode, argument, place in pickletools.genops(data):
        position = place or 0
        if began < frame_end < position:
            raise ValueError("an opcode across the end of a frame")
        if opcode.name == "FRAME":
            if position < frame_end:
                raise ValueError("a frame in a frame")
            frame_end = position + _FRAME_BYTES + (argument or 0)
            if frame_end > len(data):
                raise ValueError("a frame that goes on behind the end")
        elif opcode.name == "PROTO" and (argument or 0) > HIGHEST_PROTOCOL:
            raise ValueError(f"protocol {argument}, which Python does not read")
        yield opcode.name, argument, position
        began = position


def kind_of(value: Any) -> str:
    """What an object is, for messages; containers are not written out, since shared ones have no end of items."""
    if isinstance(value, (str, int, float, type(None))):
        return excerpt(value)
    if isinstance(value, Call):
        return f"a call of {kind_of(value.function)}" if isinstance(value.function, Global) else "a call"
    return excerpt(str(value)) if isinstance(value, Global) else f"a {type(value).__name__}"


class _Machine:
    """The stack and the memo of a pickle that is read."""

    def __init__(self, objects_as_keys: bool) -> None:
        self._keys = (*_KEYS, Call) if objects_as_keys else _KEYS
        self.stack: list[Any] = []
        self.globals: list[Global] = []
        self.calls: list[Call] = []
        self.persistents: list[Persistent] = []
        self._memo: dict[int, Any] = {}
        self._nodes = 0

    def step(self, name: str, argument: Any) -> None:
        self._nodes += 1
        if self._nodes > MOST_NODES:
            raise CheckpointError(f"expected at most {MOST_NODES} opcodes in a pickle")
        if name in _VALUES:
            if name in _OLD_STRINGS and not argument.isascii():
                raise ValueError("a string of bytes that are no text")  # pickletools decodes all, others do not
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name]())
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            self._memo[argument] = self._top()
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = self._top()
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            self.stack.append(self._memo[argument])
        elif name in _STEPS:
            _STEPS[name](self, argument)
        else:
            raise CheckpointError(f"the opcode {name} is in no checkpoint")

    def pop(self) -> Any:
        value = self.stack.pop()
        if isinstance(value, _Mark):
            raise ValueError("a mark where a value should be")
        return value

    def _top(self) -> Any:
        if isinstance(self.stack[-1], _Mark):
            raise ValueError("a mark where a value should be")
        return self.stack[-1]

    def pop_to_mark(self) -> list[Any]:
        for position in range(len(self.stack) - 1, -1, -1):
            if isinstance(self.stack[position], _Mark):
                items = self.stack[position + 1 :]
                del self.stack[position:]
                return items
        raise ValueError("there is no mark")

    def push_tuple(self, count: int) -> None:
        items = [self.pop() for _ in range(count)]
        self.stack.append(tuple(reversed(items)))

    def set_items(self, items: list[Any]) -> None:
        if len(items) % 2:
            raise ValueError("a key without a value")
        target, pairs = self._top(), list(zip(items[::2], items[1::2], strict=True))
        if not isinstance(target, (dict, Call)):
            raise TypeError(f"items for a {type(target).__name__}")
        for key, value in pairs:
            self._check_key(key)
            if isinstance(target, dict):
                target[key] = value
            else:
                target.entries.append((key, value))

    def _check_key(self, key: Any) -> None:
        """Raise unless `key` is a string, a number, or a tuple of them: the hash of deep tuples would recurse."""
        items = key if isinstance(key, tuple) else (key,)
        if not all(isinstance(item, self._keys) for item in items):
            raise TypeError(f"a {type(key).__name__} as a key")

    def append(self, items: list[Any]) -> None:
        target = self._top()
        if isinstance(target, Call):
            target.members += items
        elif isinstance(target, list):
            target += items
        else:
            raise TypeError(f"members for a {type(target).__name__}")

    def call(self) -> None:
        arguments, function = self.pop(), self.pop()
        if not isinstance(arguments, tuple):
            raise TypeError(f"arguments in a {type(arguments).__name__}")
        self.push_call(function, arguments)

    def push_call(self, function: Any, arguments: tuple[Any, ...]) -> None:
        if not isinstance(function, (Global, Call)):
            raise TypeError(f"a call of a {type(function).__name__}")
        self.calls.append(Call(function, arguments))
        self.stack.append(self.calls[-1])

    def build(self) -> None:
        state = self.pop()
        target = self._top()
        if not isinstance(target, Call) or target.state is not None:
            raise TypeError(f"a state for a {type(target).__name__}, or a second one")
        target.state = dict(state) if isinstance(state, dict) else state  # what it is now

    def push_global(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise TypeError("a global whose names are no strings")
        self.globals.append(Global(module, name))
        self.stack.append(self.globals[-1])


def _stack_global(machine: _Machine, _: Any) -> None:
    name, module = machine.pop(), machine.pop()
    machine.push_global(module, name)


def _global(machine: _Machine, names: Any) -> None:
    module, _, name = names.partition(" ")
    machine.push_global(module, name)


def _persistent(machine: _Machine, _: Any) -> None:
    machine.persistents.append(Persistent(machine.pop()))
    machine.stack.append(machine.persistents[-1])


def _dict(machine: _Machine, _: Any) -> None:
    items = machine.pop_to_mark()
    machine.stack.append({})
    machine.set_items(items)


def _set_item(machine: _Machine, _: Any) -> None:
    value, key = machine.pop(), machine.pop()
    machine.set_items([key, value])


_VALUES = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "STRING", "BINSTRING", "SHORT_BINSTRING"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
}
"""Opcodes that push their argument."""

_OLD_STRINGS = {"STRING", "BINSTRING", "SHORT_BINSTRING"}

_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_TUPLE": tuple,
    "MARK": _Mark,
}

_STEPS: dict[str, Callable[[_Machine, Any], Any]] = {
    "PROTO": lambda machine, _: None,
    "FRAME": lambda machine, _: None,
    "POP": lambda machine, _: machine.stack.pop(),
    "POP_MARK": lambda machine, _: machine.pop_to_mark(),
    "DUP": lambda machine, _: machine.stack.append(machine.stack[-1]),
    "TUPLE": lambda machine, _: machine.stack.append(tuple(machine.pop_to_mark())),
    "TUPLE1": lambda machine, _: machine.push_tuple(1),
    "TUPLE2": lambda machine, _: machine.push_tuple(2),
    "TUPLE3": lambda machine, _: machine.push_tuple(3),
    "LIST": lambda machine, _: machine.stack.append(machine.pop_to_mark()),
    "DICT": _dict,
    "EMPTY_SET": lambda machine, _: machine.push_call(Global("builtins", "set"), ()),
    "FROZENSET": lambda machine, _: machine.push_call(Global("builtins", "frozenset"), (machine.pop_to_mark(),)),
    "APPEND": lambda machine, _: machine.append([machine.pop()]),
    "APPENDS": lambda machine, _: machine.append(machine.pop_to_mark()),
    "ADDITEMS": lambda machine, _: machine.append(machine.pop_to_mark()),
    "SETITEM": _set_item,
    "SETITEMS": lambda machine, _: machine.set_items(machine.pop_to_mark()),
    "GLOBAL": _global,
    "STACK_GLOBAL": _stack_global,
    "REDUCE": lambda machine, _: machine.call(),
    "NEWOBJ": lambda machine, _: machine.call(),
    "BUILD": lambda machine, _: machine.build(),
    "BINPERSID": _persistent,
}
