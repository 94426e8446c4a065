"""Ops that give lazy tensors in a better way than the general one of :mod:`.lazy`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .lazy import LazyTensor, first_lazy, on_meta, to_view, whole_meta
from .nodes import Copy, HostTensor, Pointwise, View, pieces_of_rows, row_major_strides


aten = torch.ops.aten


def _copy(func: Any, args: Any, kwargs: Any) -> Any:
    (source,) = args
    dtype, device = kwargs.get("dtype") or source.dtype, kwargs.get("device") or source.device
    if device.type == "meta":
        return torch.empty_strided(source.size(), source.stride(), dtype=dtype, device=device)
    view = source.view_of_node
    if dtype == source.dtype and view.strides == row_major_strides(view.sizes):
        return LazyTensor(source._meta, source._node, source.reader, device)
    node = Copy(view.sizes, dtype, view)
    return LazyTensor(whole_meta(node.sizes, dtype), node, source.reader, device)


def _cat(func: Any, args: Any, kwargs: Any) -> Any:
    tensors: Sequence[Any] = args[0]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if not all(isinstance(tensor, LazyTensor) for tensor in tensors) or len({t.dtype for t in tensors}) != 1:
        return NotImplemented  # a mix with real tensors or with type promotion: rare, and torch knows the rules
    views = [tensor.view_of_node for tensor in tensors]
    if func is aten.stack.default:
        dim %= len(views[0].sizes) + 1
        views = [
            View(v.node, (*v.sizes[:dim], 1, *v.sizes[dim:]), (*v.strides[:dim], 0, *v.strides[dim:]), v.offset)
            for v in views
        ]
    else:
        views = [view for view in views if view.sizes != (0,)]  # torch's legacy rule: such tensors are skipped
        if not views:
            return NotImplemented
        dim %= len(views[0].sizes)
    expected = (views[0].sizes[:dim], views[0].sizes[dim + 1 :])
    if any((view.sizes[:dim], view.sizes[dim + 1 :]) != expected for view in views):
        return NotImplemented  # torch itself raises, with its own message
    return LazyTensor.of(View.joined(tuple(views), dim), tensors[0].reader)


def _index_select(func: Any, args: Any, kwargs: Any) -> Any:
    source, dim, index = args
    if not isinstance(source, LazyTensor) or isinstance(index, LazyTensor) or index.is_meta:
        return NotImplemented
    rows = index.reshape(-1).tolist()
    if rows and not 0 <= min(rows) <= max(rows) < source.shape[dim]:
        raise IndexError(f"{func}: index out of range for dimension {dim} with size {source.shape[dim]}")
    pieces = tuple(pieces_of_rows(source.movedim(dim, 0).view_of_node, rows))
    return LazyTensor.of(View.joined(pieces, 0), source.reader).movedim(0, dim)


def _index(func: Any, args: Any, kwargs: Any) -> Any:
    source, indices = args
    indexed = [dim for dim, index in enumerate(indices) if index is not None]
    if len(indexed) != 1 or (index := indices[indexed[0]]).dim() != 1 or index.dtype in (torch.bool, torch.uint8):
        return NotImplemented
    dim = indexed[0]
    if not isinstance(index, LazyTensor) and not index.is_meta:
        index = torch.where(index < 0, index + source.shape[dim], index)
    return _index_select(func, (source, dim, index), {})


def _pad(func: Any, args: Any, kwargs: Any) -> Any:
    source, pad = args[:2]
    value = args[2] if len(args) > 2 else kwargs.get("value", 0)
    if any(amount < 0 for amount in pad):
        return NotImplemented
    result = _copy(func, (source,), {})
    for number, amounts in enumerate(zip(pad[::2], pad[1::2], strict=True), start=1):
        dim = source.dim() - number
        shapes = [(*result.shape[:dim], amount, *result.shape[dim + 1 :]) for amount in amounts]
        before, after = (_filled(source, shape, value, source.dtype) for shape in shapes)
        if any(amounts):
            result = _cat(aten.cat.default, ([before, result, after], dim), {})
    return result


def _filled(like: LazyTensor, sizes: Sequence[int], value: Any, dtype: torch.dtype) -> LazyTensor:
    constant = HostTensor.of(torch.full((1,) * len(sizes), value, dtype=dtype))
    return LazyTensor.whole(constant, like.reader).expand(tuple(sizes))


def _repeat(func: Any, args: Any, kwargs: Any) -> Any:
    source, repeats = args
    sizes = [1] * (len(repeats) - source.dim()) + list(source.shape)
    pairs = [number for size in sizes for number in (1, size)]
    tiled = [number for repeat, size in zip(repeats, sizes, strict=True) for number in (repeat, size)]
    result = [repeat * size for repeat, size in zip(repeats, sizes, strict=True)]
    return source.reshape(pairs).expand(tiled).reshape(result)


def _pointwise(func: Any, args: Any, kwargs: Any) -> Any:
    result = on_meta(func, args, kwargs)
    sizes = tuple(result.size())

    def expanded(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dim():
            value = value.expand(sizes)
            return value.view_of_node if isinstance(value, LazyTensor) else View.whole(HostTensor.of(value))
        return to_view(value)

    node = Pointwise(sizes, result.dtype, func, tuple(map(expanded, args)), kwargs)
    return LazyTensor.whole(node, first_lazy(args, kwargs).reader)


HANDLERS: dict[Any, Callable[[Any, Any, Any], Any]] = {
    aten._to_copy.default: _copy,
    aten.clone.default: _copy,
    aten.cat.default: _cat,
    aten.stack.default: _cat,
    aten.index_select.default: _index_select,
    aten.index.Tensor: _index,
    aten.constant_pad_nd.default: _pad,
    aten.new_zeros.default: lambda _, args, more: _filled(args[0], args[1], 0, more.get("dtype") or args[0].dtype),
    aten.repeat.default: _repeat,
    # These IEEE 754 rounds correctly: piece by piece, in vector or in scalar code, they give the same bits.
    # Transcendental functions are not among them: their vector and scalar versions differ.
    **{overload: _pointwise for op in (aten.add, aten.sub, aten.mul, aten.div) for overload in (op.Tensor, op.Scalar)},
    **{op.default: _pointwise for op in (aten.neg, aten.abs, aten.reciprocal)},
}
