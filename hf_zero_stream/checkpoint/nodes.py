"""Nodes and views, of which lazy tensors are made: row-major logical buffers, and strided views of them.

A node never holds a checkpoint's data. It says where each of its elements comes from: a tensor in a shard, a copy of a
view in another dtype, a concatenation of views, an exact elementwise function, or (the last resort) a function that
needs its whole inputs. In a save, the sources are the model's parameters. All offsets, sizes and strides are in
elements, as in torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, chain
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import UnsupportedError
from .format import TensorEntry


if TYPE_CHECKING:
    import torch


def row_major_strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    if not sizes:
        return ()
    return tuple(accumulate(reversed(sizes[1:]), lambda stride, size: stride * size, initial=1))[::-1]


@dataclass(eq=False, slots=True)
class Node:
    """A row-major buffer of `sizes`, of elements of `dtype`."""

    sizes: tuple[int, ...]
    dtype: torch.dtype

    joint_batches: ClassVar[str] = ""
    """``module:function`` that makes the batches in which all ranks of a load compute this node's elements together.

    It is called with a list of (name, node, function to be given all elements, flat) of such parameters, with the
    coordinator and the device. Empty: each rank makes its own.
    """

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    def inputs(self) -> Sequence[View]:
        """The views that this node's elements come from."""
        return ()


@dataclass(eq=False, slots=True)  # not frozen: that makes each of a hundred thousand take three times as long
class View:
    """Elements of a node's buffer, addressed as ``offset + sum(index[d] * strides[d])``."""

    node: Node
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    @property
    def is_row_major(self) -> bool:
        """Whether the elements lie one after the other in the buffer, in the order of their indices."""
        return self.strides == row_major_strides(self.sizes)

    @classmethod
    def whole(cls, node: Node) -> View:
        return cls(node, node.sizes, row_major_strides(node.sizes))

    @classmethod
    def joined(cls, pieces: tuple[View, ...], dim: int) -> View:
        """Views of one dtype, joined along dimension `dim`."""
        starts = tuple(accumulate((piece.sizes[dim] for piece in pieces), initial=0))
        sizes = (*pieces[0].sizes[:dim], starts[-1], *pieces[0].sizes[dim + 1 :])
        return cls.whole(Cat(sizes, pieces[0].node.dtype, dim, pieces, starts))

    def narrow(self, dim: int, start: int, length: int) -> View:
        """`length` indices along dimension `dim`, from `start` on."""
        sizes = (*self.sizes[:dim], length, *self.sizes[dim + 1 :])
        return View(self.node, sizes, self.strides, self.offset + start * self.strides[dim])


def pieces_of_rows(view: View, rows: Sequence[int]) -> Iterator[View]:
    """`rows` of `view`, those at equal distances together."""
    begin = 0
    while begin < len(rows):
        end = begin + 1
        step = max(1, rows[end] - rows[begin]) if end < len(rows) else 1
        while end < len(rows) and rows[end] - rows[end - 1] == step:
            end += 1
        strides = (view.strides[0] * step, *view.strides[1:])
        sizes = (end - begin, *view.sizes[1:])
        yield View(view.node, sizes, strides, view.offset + rows[begin] * view.strides[0])
        begin = end
    if not rows:
        yield view.narrow(0, 0, 0)


@dataclass(eq=False, slots=True)
class FileTensor(Node):
    """A tensor of a shard."""

    entry: TensorEntry


@dataclass(eq=False, slots=True)
class Stored(Node):
    """A parameter of a live model; several ranks may each hold part of its elements."""

    name: str


@dataclass(eq=False, slots=True)
class HostTensor(Node):
    """Values in host memory, flat: given by the caller, memory-mapped, or computed by an op.

    `reason` says why values from a shard had to be materialised; it is empty for all others.
    """

    tensor: torch.Tensor
    reason: str = ""

    @classmethod
    def of(cls, tensor: torch.Tensor, reason: str = "") -> HostTensor:
        """The values of `tensor`; copied only from another order or device."""
        flat = tensor.detach().cpu().contiguous().view(-1)
        return cls(tuple(tensor.shape), tensor.dtype, flat, reason)


@dataclass(eq=False, slots=True)
class Copy(Node):
    """`source`, cast to this node's dtype."""

    source: View

    def inputs(self) -> Sequence[View]:
        return (self.source,)


@dataclass(eq=False, slots=True)
class WritableParameter(Node):
    """A parameter's own memory, which code may write into (see :mod:`.lazy_ops`); no :class:`View` looks at it.

    Its values are those of `unwritten` until there is `memory`, which is flat.
    """

    unwritten: Copy
    memory: torch.Tensor | None = None

    @classmethod
    def of(cls, source: View) -> WritableParameter:
        copy = Copy(source.sizes, source.node.dtype, source)
        return cls(copy.sizes, copy.dtype, copy)

    def view(self, sizes: tuple[int, ...], strides: tuple[int, ...], offset: int) -> View:
        """A view of the elements as they are now: later writes do not change them."""
        if self.memory is None:
            return View(self.unwritten, sizes, strides, offset)
        return View.whole(HostTensor.of(self.strided(sizes, strides, offset).clone()))

    def strided(self, sizes: tuple[int, ...], strides: tuple[int, ...], offset: int) -> torch.Tensor:
        assert self.memory is not None
        return self.memory.as_strided(sizes, strides, self.memory.storage_offset() + offset)


@dataclass(eq=False, slots=True)
class Cat(Node):
    """`pieces` joined along dimension `dim`: piece `i` begins at index ``starts[i]``; one more entry is the end."""

    dim: int
    pieces: tuple[View, ...]
    starts: tuple[int, ...]

    def inputs(self) -> Sequence[View]:
        return self.pieces


@dataclass(eq=False, slots=True)
class Computed(Node):
    """The result of `function(*args, **kwargs)`, whose lazy arguments are :class:`View`."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def inputs(self) -> Sequence[View]:
        arguments = (*self.args, *self.kwargs.values())
        items = (value if isinstance(value, (list, tuple)) else (value,) for value in arguments)
        return [item for item in chain.from_iterable(items) if isinstance(item, View)]

    def result(self, value_of: Callable[[View], torch.Tensor]) -> Any:
        """Call `function` with the values that `value_of` gives for the views among its arguments."""
        from torch.utils._pytree import tree_map  # headers are looked at without torch

        def value(argument: Any) -> Any:
            return value_of(argument) if isinstance(argument, View) else argument

        args, kwargs = tree_map(value, (self.args, dict(self.kwargs)))
        return self.function(*args, **kwargs)


@dataclass(eq=False, slots=True)
class Pointwise(Computed):
    """An exact elementwise function: any piece of it can be computed from the same piece of its inputs.

    Every View among the arguments has been expanded to `sizes`, except 0-dimensional ones: those keep their shape,
    because torch promotes dtypes differently for them.
    """


@dataclass(eq=False, slots=True)
class Blockwise(Computed):
    """A function whose result can be computed block by block, each from slices of its inputs; all args are Views.

    `blocks[d]` is a block's length along dimension `d` of the result. ``parts[i][d] = (dim, ratio)``: each element
    along it comes from `ratio` elements along dimension `dim` of input `i`, for instance 1/2 if an element there packs
    two values, 1/128 if it is the scale of 128 values. An input's other dimensions are needed whole.

    The function gets the index of the first wanted element, and the slices. Its result may go beyond `sizes`, where an
    input's last element is not full.
    """

    blocks: tuple[int, ...]
    parts: tuple[Mapping[int, tuple[int, Fraction | int]], ...]


@dataclass(eq=False, slots=True)
class Opaque(Computed):
    """A function that needs its whole inputs; `output` picks one of several results (None: there is one)."""

    output: int | None = None

    @property
    def reason(self) -> str:
        return f"{self.function} needs whole tensors"


Leaf = FileTensor | Stored | HostTensor | Computed
"""Nodes that give elements of their own; the others only pass on those of their inputs."""


def sources_of(views: Iterable[View]) -> Iterator[tuple[Node, bool]]:
    """The nodes without inputs that `views` come from; and whether that is through a function or a cast."""
    seen: set[tuple[int, bool]] = set()
    nodes = [(view.node, False) for view in views]
    while nodes:
        node, is_changed = nodes.pop()
        if (id(node), is_changed) in seen:
            continue
        seen.add((id(node), is_changed))
        if not node.inputs():
            yield node, is_changed
        changes = isinstance(node, Computed) or (isinstance(node, Copy) and node.dtype != node.source.node.dtype)
        nodes.extend((view.node, is_changed or changes) for view in node.inputs())


def is_computed(view: View) -> bool:
    """Whether its elements are more than copies of others, cast to another dtype."""
    return isinstance(view.node, Computed) or any(map(is_computed, view.node.inputs()))


def entries_of(views: Iterable[View]) -> Iterator[TensorEntry]:
    """The tensors of shards that `views` come from, each once."""
    nodes = dict.fromkeys(node for node, _ in sources_of(views))
    return (node.entry for node in nodes if isinstance(node, FileTensor))


def no_memory_error(node: Node, so: str) -> UnsupportedError:
    """The error for code that needs `node`'s memory; `so` says what cannot be done without."""
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
        raise no_memory_error(self._node, "nothing can be read from it")

    __index__ = __int__
    _as_parameter_ = property(__int__)  # ctypes asks for it


def _number(value: Any) -> Any:
    return value._value if isinstance(value, Address) else value


class NodeStorage:
    """A node's ``UntypedStorage``, with the methods that read no values alone."""

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
        raise no_memory_error(self._node, f"its storage has no {name}")

    def __getitem__(self, index: Any) -> Any:
        return self.__getattr__("bytes")
