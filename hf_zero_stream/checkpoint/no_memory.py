"""What a lazy tensor has in place of memory: addresses and a storage that can be compared, but not read from."""

from __future__ import annotations

import functools
from typing import Any

from ..errors import UnsupportedError
from .nodes import Node


def no_memory(node: Node, so: str) -> UnsupportedError:
    """The error for code that needs `node`'s memory; `so` says what therefore cannot be done."""
    return UnsupportedError(
        f"This tensor of {node.numel} elements of {node.dtype} is lazy: inside hf_zero_stream.streaming() it has a "
        f"shape and a dtype, and no memory. So {so}. Save it with save_pretrained(..., state_dict=...) on all ranks; "
        "for the values themselves use deepspeed.zero.GatheredParameters, or ask for the state dict outside of "
        "streaming()."
    )


@functools.total_ordering
class Address:
    """A number in place of an address: it can be compared and computed with, but not read from."""

    def __init__(self, value: int, node: Node) -> None:
        self._value = value
        self._node = node

    def __add__(self, other: Any) -> Address:
        return Address(self._value + other, self._node)

    __radd__ = __add__

    def __sub__(self, other: Any) -> int:
        return self._value - _number(other)

    def __mod__(self, other: int) -> int:
        return self._value % other  # for code that asks whether a tensor is aligned

    def __eq__(self, other: object) -> bool:
        if isinstance(other, int) and other == 0 and self._value:
            int(self)  # raises: safetensors compares with 0 before it reads
        return self._value == _number(other)

    def __lt__(self, other: Any) -> bool:
        return self._value < _number(other)

    def __hash__(self) -> int:
        return hash(self._value)

    def __int__(self) -> int:
        raise no_memory(self._node, "nothing can be read from it")

    __index__ = __int__
    _as_parameter_ = property(__int__)  # ctypes asks for it


def _number(value: Any) -> Any:
    return value._value if isinstance(value, Address) else value


class NodeStorage:
    """In place of a node's ``UntypedStorage``: the methods that read no values."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def data_ptr(self) -> int:
        # No storage is larger than 2**63, so those of two nodes cannot overlap; an empty one is at 0, as in torch.
        return id(self._node) << 64 if self._node.numel else 0

    def nbytes(self) -> int:
        return self._node.numel * self._node.dtype.itemsize

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise no_memory(self._node, f"its storage has no {name}")

    def __getitem__(self, index: Any) -> Any:
        return self.__getattr__("bytes")
