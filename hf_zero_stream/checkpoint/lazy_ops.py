"""Ops on lazy tensors.

Views need no code: their result on meta tensors says all. Some ops make nodes that a load can evaluate piece by piece.
A parameter that code may write into (:class:`.nodes.WritableParameter`) reads its values once an op writes; from then
on all tensors of that node share this memory, as in torch. Results of other ops keep the values of before, and are
lazy too, with nodes of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ..errors import UnsupportedError
from . import nodes
from .lazy import LazyTensor, first_lazy, lazy_among, operations, whole_meta
from .nodes import Copy, HostTensor, Pointwise, View, WritableParameter, pieces_of_rows, row_major_strides


aten = torch.ops.aten


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an op, lazy where that is possible."""
    if not func.is_view:
        lazy = list(lazy_among(*args, *kwargs.values()))
        if any(isinstance(each.node, WritableParameter) for each in lazy):
            return _run_on_writable(func, args, kwargs)
        if any(each.reader != lazy[0].reader for each in lazy):
            args, kwargs = _with_current_values(args, kwargs)
    return _run(func, args, kwargs)


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    handler = HANDLERS.get(func)
    result = NotImplemented if handler is None else handler(func, args, kwargs)
    return _run_on_meta(func, args, kwargs) if result is NotImplemented else result


def _run_on_writable(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an op, which is no view, of lazy tensors among which are writable parameters."""
    result = func.decompose(*args, **kwargs)
    if result is NotImplemented:
        result = _write(func, args, kwargs)
    if result is not NotImplemented:
        return result
    name = func._overloadpacket.__name__
    if name.endswith("_like") or name.startswith("new_"):  # no values count
        return _run_with_values(
            lambda lazy: torch.empty(lazy.shape, dtype=lazy.dtype, device=lazy.device), func, args, kwargs
        )
    if torch.Tag.nondeterministic_seeded in func.tags:  # random numbers are drawn now, once
        return _run_with_values(LazyTensor.materialise, func, args, kwargs)
    results = _run(func, *_with_current_values(args, kwargs))

    def writable(value: Any) -> Any:
        if not isinstance(value, LazyTensor):
            return value
        return LazyTensor.whole(WritableParameter.of(value.view_of_node), value.reader, value.device)

    return tree_map(writable, results)


def _run_with_values(value_of: Callable[[LazyTensor], torch.Tensor], func: Any, args: Any, kwargs: Any) -> Any:
    def value(argument: Any) -> Any:
        return value_of(argument) if isinstance(argument, LazyTensor) else argument

    return func(*tree_map(value, tuple(args)), **tree_map(value, kwargs))


def _write(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an op that writes into writable parameters; NotImplemented if it is no such op."""
    written = _written_by(func, args, kwargs)
    if func is torch.ops.aten.set_.source_Tensor and all(isinstance(value, LazyTensor) for value in args):
        target, source = args  # of one shape, as where torch parametrises a module
        if (target.shape, target.dtype) == (source.shape, source.dtype):
            target.adopt_view(source)
            return target
    if (
        not written
        or torch.Tag.inplace_view in func.tags
        or not all(isinstance(one.node, WritableParameter) for one in written)
    ):
        return NotImplemented
    targets = {id(one) for one in written}
    return _run_with_values(
        lambda lazy: lazy.in_memory() if id(lazy) in targets else lazy.materialise(), func, args, kwargs
    )


def _with_current_values(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Arguments for an op that does not write: they keep the values that they have now, and share one reader.

    Readers of different models number files differently.
    """
    reader = first_lazy(args, kwargs).reader

    def current(value: Any) -> Any:
        if not isinstance(value, LazyTensor):
            return value
        if value.reader != reader:
            return LazyTensor.whole(HostTensor.of(value.materialise()), reader, value.device)
        return (
            LazyTensor.of(value.view_of_node, reader, value.device)
            if isinstance(value.node, WritableParameter)
            else value
        )

    current_args, current_kwargs = tree_map(current, (tuple(args), kwargs))
    return current_args, current_kwargs


def _written_by(func: Any, args: Any, kwargs: Any) -> list[LazyTensor]:
    """The lazy tensors that this op writes into."""
    if not func._schema.is_mutable:
        return []
    named = zip(func._schema.arguments, args, strict=False)
    by_name = ((argument, kwargs[argument.name]) for argument in func._schema.arguments if argument.name in kwargs)
    pairs = [(argument.alias_info, value) for argument, value in (*named, *by_name)]
    return list(lazy_among(*(value for alias, value in pairs if alias is not None and alias.is_write)))


def _run_on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """The general case: a view if the meta result shares storage, else an opaque node or a result on real tensors."""
    # Composite ops arrive whole where autograd is switched off around us (our own handlers, torch.inference_mode).
    result = func.decompose(*args, **kwargs)
    if result is not NotImplemented:
        return result
    if func._schema.is_mutable:
        return _run_on_values(func, args, kwargs)
    try:
        # Most are views of one tensor by numbers, thousands of them in a model of experts.
        if func.is_view and isinstance(args[0], LazyTensor):
            result = func(args[0]._meta, *args[1:], **kwargs)
        else:
            result = on_meta(func, args, kwargs)
    except (RuntimeError, NotImplementedError):
        return _run_on_values(func, args, kwargs)

    has_several = isinstance(result, (list, tuple))
    if not all(isinstance(meta, torch.Tensor) and meta.is_meta for meta in (result if has_several else (result,))):
        return _run_on_values(func, args, kwargs)
    first = first_lazy(args, kwargs)
    storage = first._meta.untyped_storage()._cdata

    def to_lazy(meta: torch.Tensor, output: int | None = None) -> LazyTensor:
        if meta.untyped_storage()._cdata == storage and meta.dtype == first.dtype:
            return LazyTensor(meta, first.node, first.reader, first.device)
        view_args, view_kwargs = tree_map(to_view, (tuple(args), kwargs))
        node = nodes.Opaque(tuple(meta.size()), meta.dtype, func, view_args, view_kwargs, output)
        return LazyTensor.whole(node, first.reader)

    if has_several:
        return type(result)([to_lazy(meta, output) for output, meta in enumerate(result)])
    return to_lazy(result)


def _run_on_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Read the op's inputs whole and run it now, because its result or its shape depends on values."""
    schema, materialise = func._schema, first_lazy(args, kwargs).reader
    for value in _written_by(func, args, kwargs):
        raise UnsupportedError(
            f"{func} would write into a checkpoint tensor without memory: {value!r}. Make a new tensor and assign "
            "that: parameter.data = new."
        )

    def to_lazy(value: Any) -> Any:
        # A plain result would hide from the report that this parameter was materialised.
        if not isinstance(value, torch.Tensor) or schema.is_mutable:
            return value
        return LazyTensor.whole(HostTensor.of(value, f"{func} depends on values"), materialise)

    return tree_map(to_lazy, _run_with_values(LazyTensor.materialise, func, args, kwargs))


def on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*tree_map(to_meta, tuple(args)), **tree_map(to_meta, kwargs))


def to_meta(value: Any) -> Any:
    if isinstance(value, LazyTensor):
        return value._meta
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def to_view(value: Any) -> Any:
    return value.view_of_node if isinstance(value, LazyTensor) else value


def copied(func: Any, args: Any, kwargs: Any) -> Any:
    (source,) = args
    dtype, device = kwargs.get("dtype") or source.dtype, kwargs.get("device") or source.device
    if device.type == "meta":
        return torch.empty_strided(source.size(), source.stride(), dtype=dtype, device=device)
    view = source.view_of_node
    if dtype == source.dtype and view.strides == row_major_strides(view.sizes):
        return LazyTensor(source._meta, source.node, source.reader, device)
    node = Copy(view.sizes, dtype, view)
    return LazyTensor(whole_meta(node.sizes, dtype), node, source.reader, device)


def cat(func: Any, args: Any, kwargs: Any) -> Any:
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


def _new_zeros(func: Any, args: Any, kwargs: Any) -> Any:
    return _filled(args[0], args[1], 0, kwargs.get("dtype") or args[0].dtype)


def _pad(func: Any, args: Any, kwargs: Any) -> Any:
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


def _repeat(func: Any, args: Any, kwargs: Any) -> Any:
    source, repeats = args
    sizes = [1] * (len(repeats) - source.dim()) + list(source.shape)
    pairs = [number for size in sizes for number in (1, size)]
    tiled = [number for repeat, size in zip(repeats, sizes, strict=True) for number in (repeat, size)]
    result = [repeat * size for repeat, size in zip(repeats, sizes, strict=True)]
    return source.reshape(pairs).expand(tiled).reshape(result)


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


HANDLERS: dict[Any, Callable[[Any, Any, Any], Any]] = {
    aten._to_copy.default: copied,
    aten.clone.default: copied,
    aten.cat.default: cat,
    aten.stack.default: cat,
    aten.index_select.default: _index_select,
    aten.index.Tensor: _index,
    aten.constant_pad_nd.default: _pad,
    aten.new_zeros.default: _new_zeros,
    aten.repeat.default: _repeat,
    # These IEEE 754 rounds correctly: piece by piece, in vector or in scalar code, they give the same bits.
    # Transcendental functions are not among them: their vector and scalar versions differ.
    **{overload: _pointwise for op in (aten.add, aten.sub, aten.mul, aten.div) for overload in (op.Tensor, op.Scalar)},
    **{op.default: _pointwise for op in (aten.neg, aten.abs, aten.reciprocal)},
}


operations.append(run)
