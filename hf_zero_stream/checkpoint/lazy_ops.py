"""Ops that few loads need, on lazy tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .lazy import LazyTensor, aten, cat, copied
from .nodes import HostTensor, View, pieces_of_rows


def new_zeros(func: Any, args: Any, kwargs: Any) -> Any:
    return _filled(args[0], args[1], 0, kwargs.get("dtype") or args[0].dtype)


def pad(func: Any, args: Any, kwargs: Any) -> Any:
    source, amounts_of = args[:2]
    value = args[2] if len(args) > 2 else kwargs.get("value", 0)
    if any(amount < 0 for amount in amounts_of):
        return NotImplemented
    result = copied(None, (source,), {})
    for number, amounts in enumerate(zip(amounts_of[::2], amounts_of[1::2], strict=True), start=1):
        dim = source.dim() - number
        shapes = [(*result.shape[:dim], amount, *result.shape[dim + 1 :]) for amount in amounts]
        before, after = (_filled(source, shape, value, source.dtype) for shape in shapes)
        if any(amounts):
            result = cat(aten.cat.default, ([before, result, after], dim), {})
    return result


def _filled(like: LazyTensor, sizes: Sequence[int], value: Any, dtype: torch.dtype) -> LazyTensor:
    constant = HostTensor.of(torch.full((1,) * len(sizes), value, dtype=dtype))
    return LazyTensor.whole(constant, like.reader).expand(tuple(sizes))


def repeat(func: Any, args: Any, kwargs: Any) -> Any:
    source, repeats = args
    sizes = [1] * (len(repeats) - source.dim()) + list(source.shape)
    pairs = [number for size in sizes for number in (1, size)]
    tiled = [number for repeat, size in zip(repeats, sizes, strict=True) for number in (repeat, size)]
    result = [repeat * size for repeat, size in zip(repeats, sizes, strict=True)]
    return source.reshape(pairs).expand(tiled).reshape(result)


def index_select(func: Any, args: Any, kwargs: Any) -> Any:
    source, dim, index = args
    if not isinstance(source, LazyTensor) or isinstance(index, LazyTensor) or index.is_meta:
        return NotImplemented
    rows = index.reshape(-1).tolist()
    if rows and not 0 <= min(rows) <= max(rows) < source.shape[dim]:
        raise IndexError(f"{func}: index out of range for dimension {dim} with size {source.shape[dim]}")
    pieces = tuple(pieces_of_rows(source.movedim(dim, 0).view_of_node, rows))
    return LazyTensor.of(View.joined(pieces, 0), source.reader).movedim(0, dim)


def index(func: Any, args: Any, kwargs: Any) -> Any:
    source, indices = args
    indexed = [dim for dim, index in enumerate(indices) if index is not None]
    if len(indexed) != 1 or (index := indices[indexed[0]]).dim() != 1 or index.dtype in (torch.bool, torch.uint8):
        return NotImplemented
    dim = indexed[0]
    if not isinstance(index, LazyTensor) and not index.is_meta:
        index = torch.where(index < 0, index + source.shape[dim], index)
    return index_select(func, (source, dim, index), {})
