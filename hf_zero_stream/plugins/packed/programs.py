"""Programs that dequantise one matrix: its lazy tensor's nodes, split into tensors of the checkpoint and a rule.

transformers dequantises on lazy tensors, so that a lazy weight already says which bytes of which tensors it comes from
and by which functions. A *program* is that rule with numbered inputs in place of the tensors: run on their bytes in a
forward pass, it gives the very values that loading the dequantised weight would have given. The matrices of a
mixture's experts have one program, and each has inputs of its own.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import torch

from ...plugin_api import (
    Blockwise,
    Cat,
    Computed,
    Copy,
    FileTensor,
    HostTensor,
    MemoryEvaluator,
    Node,
    Opaque,
    Pointwise,
    Stored,
    View,
    is_computed,
    row_major_strides,
)


PIECE_NUMEL = 2**18
"""About how many elements of a matrix are computed at a time, so that what this takes beside the matrix is small.

Plain torch functions make tables of indices, values in fp32 and the like, several times the size of what they give.
"""

_CONSTANT_NUMEL = 64
"""Values of this many elements at most may be part of a program."""


class NotPackable(Exception):
    """A weight cannot be kept as the bytes that it comes from; the message says why."""


class NotQuantised(NotPackable):
    """A weight's values are in the file as they are."""


class Neighbours(NamedTuple):
    """Neighbouring elements of a tensor of the checkpoint, all of which a matrix needs; or of a constant."""

    source: FileTensor | HostTensor
    first: int
    numel: int


@dataclass(frozen=True)
class Program:
    """The rule by which one matrix comes from its inputs; `signature` is equal for programs that do the same."""

    result: View
    signature: Hashable

    def run(self, inputs: Sequence[torch.Tensor], *dtypes: torch.dtype) -> torch.Tensor:
        """The matrix, of the sizes of `result`, from flat inputs of the dtypes of their regions.

        It is cast to each of `dtypes` in turn.
        """
        view, device = self.result, inputs[0].device
        limit = view.numel if _needs_whole(view) else PIECE_NUMEL
        matrix = torch.empty(view.sizes, dtype=dtypes[-1], device=device)
        evaluator = MemoryEvaluator(lambda node: inputs[int(node.name)], device, limit)
        evaluator.fill(matrix.view(-1), view, dtypes)
        return matrix

    @property
    def does_nothing(self) -> bool:
        """Whether the matrix is no more than a copy of its inputs."""
        return not is_computed(self.result)


def taken_apart(view: View, *, takes_constants: bool = False) -> tuple[Program, list[Neighbours]]:
    """The program of the matrix that `view` gives, and the regions that are its inputs, in order.

    `takes_constants`: a value in memory is an input too, as it may differ from one matrix to the next, and no part of
    the program. Raises NotPackable if an input is not made of neighbouring elements, or is no tensor of a file.
    """
    regions: list[Neighbours] = []
    result, signature = _apart(view, regions, takes_constants)
    return Program(result, signature), regions


def _apart(view: View, regions: list[Neighbours], takes_constants: bool) -> tuple[View, Hashable]:
    node = view.node
    if isinstance(node, FileTensor) or (takes_constants and isinstance(node, HostTensor) and node.numel == 1):
        return _input(view, node, regions)
    node, offset = _touched_rows(view, node)
    layout = (view.sizes, view.strides, offset)
    new: Node
    rule: Hashable
    match node:
        case HostTensor():
            if node.numel > _CONSTANT_NUMEL:
                raise NotPackable(f"{node.numel} of its values are in memory, and not in a file")
            new, rule = node, (str(node.dtype), tuple(node.tensor.tolist()))
        case Copy():
            source, rule = _apart(node.source, regions, takes_constants)
            new = replace(node, source=source)
        case Cat():
            apart = [_apart(piece, regions, takes_constants) for piece in node.pieces]
            new = replace(node, pieces=tuple(piece for piece, _ in apart))
            rule = (node.dim, node.starts, tuple(each for _, each in apart))
        case Computed():
            args: list[Any] = []
            rules: list[Hashable] = []
            for arg in node.args:
                new_arg, of_arg = arg, _identity(arg)
                if isinstance(arg, View):
                    new_arg, of_arg = _apart(arg, regions, takes_constants)
                if isinstance(arg, (list, tuple)) and any(isinstance(item, View) for item in arg):
                    raise NotPackable(f"{node.function} takes a list of tensors")
                args.append(new_arg)
                rules.append(of_arg)
            if any(isinstance(value, View) for value in node.kwargs.values()):
                raise NotPackable(f"{node.function} takes a tensor by its name")
            new = replace(node, args=tuple(args))
            output = node.output if isinstance(node, Opaque) else None
            rule = (_identity(node.function), tuple(rules), _identity(node.kwargs), output)
        case _:
            raise NotPackable(f"a {type(node).__name__} has no bytes in a file")
    kind = (type(node).__name__, node.sizes, str(node.dtype))
    return View(new, view.sizes, view.strides, offset), (kind, layout, rule)


def _input(view: View, node: FileTensor | HostTensor, regions: list[Neighbours]) -> tuple[View, Hashable]:
    if not view.numel:
        raise NotPackable("it has no elements")
    first, last = bounds(view)
    numel = last + 1 - first
    if numel != prod(size for size, stride in zip(view.sizes, view.strides, strict=True) if stride):
        assert isinstance(node, FileTensor), "a constant has one element"
        raise NotPackable(f"it takes elements of {node.entry.name} that do not lie side by side")
    region = Neighbours(node, first, numel)
    if region not in regions:
        regions.append(region)
    number = regions.index(region)
    new = View(Stored((numel,), node.dtype, str(number)), view.sizes, view.strides, view.offset - first)
    return new, ("input", number, str(node.dtype), numel, new.sizes, new.strides, new.offset)


def _touched_rows(view: View, node: Node) -> tuple[Node, int]:
    """`node` without the indices along its first dimension that `view` does not touch, and the view's offset in it."""
    if not node.sizes or node.sizes[0] == 1 or not view.numel:
        return node, view.offset
    row = row_major_strides(node.sizes)[0]
    first, last = bounds(view)
    begin, count = first // row, last // row + 1 - first // row
    if count == node.sizes[0]:
        return node, view.offset
    sizes = (count, *node.sizes[1:])
    narrowed: Node
    match node:
        case Copy():
            narrowed = replace(node, sizes=sizes, source=node.source.narrow(0, begin, count))
        case Cat() if node.dim == 0:
            narrowed = View.joined(tuple(pieces_of(node, begin, begin + count)), 0).node
        case Cat():
            pieces = tuple(piece.narrow(0, begin, count) for piece in node.pieces)
            narrowed = replace(node, sizes=sizes, pieces=pieces)
        case Pointwise():
            args = tuple(
                arg.narrow(0, begin, count) if isinstance(arg, View) and arg.sizes else arg for arg in node.args
            )
            narrowed = replace(node, sizes=sizes, args=args)
        case Blockwise() if node.blocks[0] == 1 and all(part.get(0, (0, 0))[1] == 1 for part in node.parts):
            args = tuple(arg.narrow(part[0][0], begin, count) for arg, part in zip(node.args, node.parts, strict=True))
            narrowed = replace(node, sizes=sizes, args=args)
        case _:
            return node, view.offset
    return narrowed, view.offset - begin * row


def _identity(value: Any) -> Hashable:
    """Equal for values, and for functions with what they enclose, that do the same."""
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.device)):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(map(_identity, value))
    if isinstance(value, Mapping):
        return tuple((name, _identity(each)) for name, each in value.items())
    if isinstance(value, functools.partial):
        return _identity((value.func, value.args, value.keywords))
    code = getattr(value, "__code__", None)
    if code is not None:
        return code, tuple(_identity(cell.cell_contents) for cell in value.__closure__ or ())
    same: Any = value if callable(value) else type(value)
    return same


def _needs_whole(view: View) -> bool:
    """Whether a function needs whole inputs: each piece would call it anew."""
    return isinstance(view.node, Opaque) or any(map(_needs_whole, view.node.inputs()))


def bounds(view: View) -> tuple[int, int]:
    """The numbers of the first and of the last element of the node that `view` touches; strides are not negative."""
    return view.offset, view.offset + sum(
        (size - 1) * stride for size, stride in zip(view.sizes, view.strides, strict=True)
    )


def pieces_of(node: Cat, begin: int, end: int) -> list[View]:
    """Return the views that are joined at the indices from `begin` to `end` along the dimension of `node`."""
    pieces = []
    for number in range(max(0, bisect_right(node.starts, begin) - 1), len(node.pieces)):
        piece, start = node.pieces[number], node.starts[number]
        if start >= end:
            break
        first, stop = max(begin, start), min(end, start + piece.sizes[node.dim])
        if first < stop:
            pieces.append(piece.narrow(node.dim, first - start, stop - first))
    return pieces
