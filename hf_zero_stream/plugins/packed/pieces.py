"""Computes the matrix of a program a piece at a time, so that what dequantising takes beside the matrix is small.

Plain torch functions make tables of indices, values in fp32 and the like, several times the size of what they give. Of
each node only the slab is computed that a piece needs: some indices along the node's outermost dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor, prod

import torch

from ...checkpoint.nodes import Blockwise, Cat, Computed, Copy, HostTensor, Node, Opaque, Pointwise, View


PIECE_NUMEL = 2**18
"""About how many elements of a matrix are computed at a time."""

_ALIGNMENT = 128
"""Pieces begin at multiples of it, as blocks of most formats do; else a block is computed for both its pieces."""


@dataclass(eq=False, slots=True)
class Input(Node):
    """Stands for the elements of a region: the input `number` of a program."""

    number: int


def computed(view: View, inputs: Sequence[torch.Tensor], *dtypes: torch.dtype) -> torch.Tensor:
    """What `view` gives, contiguous, cast to each of `dtypes` in turn, from the flat `inputs`."""
    cuttable = [dim for dim, size in enumerate(view.sizes) if size > 1 and view.strides[dim] > 0]
    if not cuttable or _needs_whole(view):
        return _cast(_values(view, inputs), dtypes).contiguous()
    dim = max(cuttable, key=lambda dim: view.strides[dim])
    size = view.sizes[dim]
    step = max(1, PIECE_NUMEL * size // view.numel // _ALIGNMENT) * _ALIGNMENT
    result = torch.empty(view.sizes, dtype=dtypes[-1], device=inputs[0].device)
    for begin in range(0, size, step):
        count = min(step, size - begin)
        result.narrow(dim, begin, count).copy_(_cast(_values(view.narrow(dim, begin, count), inputs), dtypes))
    return result


def _cast(values: torch.Tensor, dtypes: Sequence[torch.dtype]) -> torch.Tensor:
    for dtype in dtypes:
        values = values.to(dtype)
    return values


def _needs_whole(view: View) -> bool:
    """Whether a function needs whole inputs: each piece would call it anew."""
    return isinstance(view.node, Opaque) or any(map(_needs_whole, view.node.inputs()))


def _values(view: View, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    node = view.node
    if not view.numel:
        return torch.empty(view.sizes, dtype=node.dtype, device=inputs[0].device)
    match node:
        case Input():
            return _strided(inputs[node.number], view, 0)
        case HostTensor():
            return _strided(node.tensor.to(inputs[0].device), view, 0)
    dim = next((dim for dim, size in enumerate(node.sizes) if size > 1), 0)
    if not node.sizes:
        return _strided(_slab(node, 0, 0, 0, inputs)[0], view, 0)
    row = prod(node.sizes[dim + 1 :])
    first, last = bounds(view)
    slab, begin = _slab(node, dim, first // row, last // row + 1, inputs)
    return _strided(slab, view, begin * row)


def _strided(values: torch.Tensor, view: View, origin: int) -> torch.Tensor:
    """`view` of a node whose elements from number `origin` on are `values`."""
    return values.as_strided(view.sizes, view.strides, values.storage_offset() + view.offset - origin)


def _slab(node: Node, dim: int, begin: int, end: int, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, int]:
    """The values of `node` at the indices from `begin` to `end` along `dim`, contiguous, and the index of the first.

    It may be before `begin`. All dimensions before `dim` have one index; a node without dimensions is whole.
    """

    def narrowed(view: View) -> View:
        return view.narrow(dim, begin, end - begin) if view.sizes else view

    match node:
        case Copy():
            return _values(narrowed(node.source), inputs).to(node.dtype).contiguous(), begin
        case Cat():
            pieces = pieces_of(node, begin, end) if node.dim == dim else list(map(narrowed, node.pieces))
            made = [_values(piece, inputs) for piece in pieces]
            return (made[0].contiguous() if len(made) == 1 else torch.cat(made, node.dim)), begin
        case Pointwise():
            result: torch.Tensor = node.result(lambda view: _values(narrowed(view), inputs))
            return result.contiguous(), begin
        case Blockwise():
            return _blocks(node, dim, begin, end, inputs)
        case Computed():
            result = node.result(lambda view: _values(view, inputs))
            if isinstance(node, Opaque) and node.output is not None:
                result = result[node.output]
            return result.contiguous(), 0
        case _:
            raise TypeError(f"a {type(node).__name__} is no part of a program")


def _blocks(
    node: Blockwise, dim: int, begin: int, end: int, inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, int]:
    block = node.blocks[dim]
    begin, end = begin // block * block, min(-(-end // block) * block, node.sizes[dim])
    origin = tuple(begin if each == dim else 0 for each in range(len(node.sizes)))
    slices = []
    for view, part in zip(node.args, node.parts, strict=True):
        if dim in part:
            of_input, ratio = part[dim]
            first, stop = floor(begin * Fraction(ratio)), ceil(end * Fraction(ratio))
            view = view.narrow(of_input, first, min(stop, view.sizes[of_input]) - first)
        # Functions look at bytes as elements of other dtypes, for which strides count also where there is one index.
        slices.append(_values(view, inputs).reshape(-1).view(view.sizes))
    sizes = (*node.sizes[:dim], end - begin, *node.sizes[dim + 1 :])
    return node.function(origin, *slices)[tuple(map(slice, sizes))].contiguous(), begin


def bounds(view: View) -> tuple[int, int]:
    """The numbers of the first and of the last element of the node that `view` touches; strides are not negative."""
    return view.offset, view.offset + sum(
        (size - 1) * stride for size, stride in zip(view.sizes, view.strides, strict=True)
    )


def pieces_of(node: Cat, begin: int, end: int) -> list[View]:
    """What is joined at the indices from `begin` to `end` along the dimension of `node`."""
    pieces = []
    for piece, start in zip(node.pieces, node.starts, strict=False):
        first, stop = max(begin, start), min(end, start + piece.sizes[node.dim])
        if first < stop:
            pieces.append(piece.narrow(node.dim, first - start, stop - first))
    return pieces
