"""Tensors that carry their layout but no data.

Code that renames, splits, stacks, transposes or casts checkpoint tensors takes a :class:`LazyTensor` like any other.
It pairs a node (see :mod:`.nodes`) with a *meta* tensor whose storage stands for that node's buffer. An op whose meta
result has the same meta storage is a view, which the result's sizes, strides and offset describe in full: no view op
needs code of its own. ``cat``, ``stack``, ``index_select``, copies, casts and exact elementwise ops make new nodes.
Any other op makes a node that is computed from whole inputs or, if its result depends on values, runs immediately on
real tensors. A load's report names each parameter for which this happened.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ..errors import UnsupportedError
from . import nodes
from .nodes import (
    Address,
    Copy,
    HostTensor,
    Node,
    NodeStorage,
    Own,
    Pointwise,
    View,
    no_memory,
    row_major_strides,
)


aten = torch.ops.aten

Materialise = Callable[[View], torch.Tensor]
"""Reads the values of a view; only ops that need values immediately call it."""


class LazyTensor(torch.Tensor):
    """A tensor without data: its node and its strides say where its elements would come from.

    It reports its true shape, strides and dtype, and the device that it was moved to, which is ``cpu`` at first. Its
    addresses only tell code that looks for tied tensors which lazy tensors share a node: reading from them, pickling
    it, or writing into it raises an :class:`UnsupportedError`.
    """

    _meta: torch.Tensor
    _node: Node
    _materialise: Materialise

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(
        cls, meta: torch.Tensor, node: Node, materialise: Materialise, device: torch.device | str = "cpu"
    ) -> LazyTensor:
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.size(),
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=device,
            requires_grad=False,
        )
        self._meta, self._node, self._materialise = meta, node, materialise
        return self

    @classmethod
    def of(cls, view: View, materialise: Materialise, device: torch.device | str = "cpu") -> LazyTensor:
        """A lazy tensor with the elements of `view`."""
        buffer = torch.empty(view.node.numel, dtype=view.node.dtype, device="meta")
        return cls(buffer.as_strided(view.sizes, view.strides, view.offset), view.node, materialise, device)

    @classmethod
    def whole(cls, node: Node, materialise: Materialise, device: torch.device | str = "cpu") -> LazyTensor:
        """A lazy tensor with all elements of `node`."""
        return cls(whole_meta(node.sizes, node.dtype), node, materialise, device)

    @classmethod
    def of_blocks(
        cls,
        function: Callable[..., torch.Tensor],
        inputs: tuple[LazyTensor, ...],
        *,
        sizes: tuple[int, ...],
        dtype: torch.dtype,
        blocks: tuple[int, ...],
        parts: tuple[Mapping[int, tuple[int, Fraction | int]], ...],
    ) -> LazyTensor:
        """The result of ``function(origin, *inputs)``, computed block by block (see :class:`.nodes.Blockwise`)."""
        views = tuple(tensor.view_of_node for tensor in inputs)
        return cls.whole(nodes.Blockwise(sizes, dtype, function, views, {}, blocks, parts), inputs[0]._materialise)

    def materialise(self) -> torch.Tensor:
        """Its values, read now, in a new tensor on its device."""
        return self._materialise(self.view_of_node).to(self.device)

    def in_memory(self) -> torch.Tensor:
        """Its values: if it has memory of its own, or looks into that of another, in that memory."""
        node = self._node
        if not isinstance(node, Own):
            return self.materialise()
        if node.memory is None:
            node.memory = self._materialise(View.whole(node.unwritten)).to(self.device).view(-1)
        return node.strided(*self.geometry)

    # Calls that would read memory outside of torch's dispatcher read the values now.

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        return self.in_memory().numpy(*args, **kwargs)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self.in_memory().__array__(dtype)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.in_memory().__dlpack__(*args, **kwargs)

    def tolist(self) -> Any:
        return self.materialise().tolist()

    def __format__(self, spec: str) -> str:
        return self.materialise().__format__(spec) if spec else repr(self)

    @property
    def data(self) -> LazyTensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Take the values of `value`, and its dtype and device; become a tensor with values if it is one."""
        if isinstance(value, LazyTensor):
            if isinstance(self._node, Own) and not isinstance(value._node, Own):
                value = LazyTensor.whole(Own.of(value.view_of_node), value._materialise, value.device)
            torch.Tensor.data.__set__(self, value)
            self.look_at(value)
        else:
            self.become(value)

    def look_at(self, other: LazyTensor) -> None:
        self._meta, self._node, self._materialise = other._meta, other._node, other._materialise

    def become(self, value: torch.Tensor) -> None:
        """Turn this object, to which optimizers and modules may refer, into a parameter with the values of `value`."""
        real = torch.nn.Parameter(value.detach(), requires_grad=self.requires_grad)
        copy_attributes(self, real)
        from .own import swap  # few loads need it

        swap(self, real)

    @property
    def reader(self) -> Materialise:
        """What reads its values when an op needs them."""
        return self._materialise

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """A tensor of the same node: a node's values do not change. A parameter's copy has memory of its own."""
        if id(self) in memo:
            return memo[id(self)]
        if getattr(self, "_is_param", False):
            lazy = LazyTensor.whole(Own.of(self.view_of_node), self._materialise, self.device)
            new: torch.Tensor = torch.nn.Parameter(lazy, requires_grad=self.requires_grad)
            copy_attributes(self, new)
        else:
            new = LazyTensor.of(self.view_of_node, self._materialise, self.device)
        return memo.setdefault(id(self), new)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise no_memory(self._node, "it cannot be pickled, nor saved by torch.save")

    def data_ptr(self) -> Any:
        """An address as if each node had its own memory; it can be compared and added to, but not read from."""
        start = self.untyped_storage().data_ptr()
        return Address(start + int(self._meta.storage_offset()) * self.dtype.itemsize, self._node)

    def untyped_storage(self) -> Any:
        return NodeStorage(self._node)

    storage = untyped_storage

    @property
    def node(self) -> Node:
        return self._node

    @property
    def geometry(self) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Its sizes, strides and offset in the node."""
        return tuple(self._meta.size()), self._meta.stride(), int(self._meta.storage_offset())

    @property
    def view_of_node(self) -> View:
        """The elements that it has now."""
        node = self._node
        return node.view(*self.geometry) if isinstance(node, Own) else View(node, *self.geometry)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"LazyTensor({tuple(self.shape)}, {self.dtype}, {type(self._node).__name__})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not func.is_view:
            lazy = list(lazy_among(*args, *kwargs.values()))
            reader = lazy[0]._materialise
            if any(isinstance(each._node, Own) or each._materialise != reader for each in lazy):
                from . import own  # loads need none

                return own.run(func, args, kwargs)
        return cls.run(func, args, kwargs)

    @staticmethod
    def run(func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an op, lazy where that is possible."""
        handler = HANDLERS.get(func)
        result = NotImplemented if handler is None else handler(func, args, kwargs)
        return _run_on_meta(func, args, kwargs) if result is NotImplemented else result


@functools.lru_cache(maxsize=4096)
def whole_meta(sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous meta tensor; all nodes of a shape share one, because making it takes longer than all the rest.

    So two inputs of an op may share a storage: the result is then a view of the first, as in every view op of aten.
    """
    return torch.empty(sizes, dtype=dtype, device="meta")


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
            return LazyTensor(meta, first._node, first._materialise, first.device)
        view_args, view_kwargs = tree_map(to_view, (tuple(args), kwargs))
        node = nodes.Opaque(tuple(meta.size()), meta.dtype, func, view_args, view_kwargs, output)
        return LazyTensor.whole(node, first._materialise)

    if has_several:
        return type(result)([to_lazy(meta, output) for output, meta in enumerate(result)])
    return to_lazy(result)


def _run_on_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Read the op's inputs whole and run it now, because its result or its shape depends on values."""
    schema, materialise = func._schema, first_lazy(args, kwargs)._materialise
    if func._schema.is_mutable:
        from .own import written_by

    for value in written_by(func, args, kwargs) if func._schema.is_mutable else ():
        raise UnsupportedError(
            f"{func} would write into a checkpoint tensor without memory: {value!r}. Make a new tensor and assign "
            "that: parameter.data = new."
        )

    def to_lazy(value: Any) -> Any:
        # A plain result would hide from the report that this parameter was materialised.
        if not isinstance(value, torch.Tensor) or schema.is_mutable:
            return value
        return LazyTensor.whole(HostTensor.of(value, f"{func} depends on values"), materialise)

    def to_value(value: Any) -> Any:
        return value.materialise() if isinstance(value, LazyTensor) else value

    real_args, real_kwargs = tree_map(to_value, (tuple(args), kwargs))
    return tree_map(to_lazy, func(*real_args, **real_kwargs))


def on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    return func(*tree_map(to_meta, tuple(args)), **tree_map(to_meta, kwargs))


def first_lazy(args: Any, kwargs: Any) -> LazyTensor:
    return next(lazy_among(*args, *kwargs.values()))


def lazy_among(*values: Any) -> Iterator[LazyTensor]:
    """The lazy tensors among `values`, and in lists of them."""
    # Not by tree_iter, which takes longer than the view op that asks.
    for value in values:
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, LazyTensor):
                yield item


def to_meta(value: Any) -> Any:
    if isinstance(value, LazyTensor):
        return value._meta
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def to_view(value: Any) -> Any:
    return value.view_of_node if isinstance(value, LazyTensor) else value


def copy_attributes(old: torch.Tensor, new: torch.Tensor) -> None:
    """Python attributes that model code or transformers put on a tensor, such as ``_is_hf_initialized``."""
    for name, value in vars(old).items():
        if name not in LazyTensor.__annotations__ and name != "_is_param":
            setattr(new, name, value)


def copied(func: Any, args: Any, kwargs: Any) -> Any:
    (source,) = args
    dtype, device = kwargs.get("dtype") or source.dtype, kwargs.get("device") or source.device
    if device.type == "meta":
        return torch.empty_strided(source.size(), source.stride(), dtype=dtype, device=device)
    view = source.view_of_node
    if dtype == source.dtype and view.strides == row_major_strides(view.sizes):
        return LazyTensor(source._meta, source._node, source.reader, device)
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


def _rare(name: str) -> Callable[..., Any]:
    def handler(func: Any, args: Any, kwargs: Any) -> Any:
        from . import lazy_ops  # few loads need it

        return getattr(lazy_ops, name)(func, args, kwargs)

    return handler


HANDLERS: dict[Any, Callable[[Any, Any, Any], Any]] = {
    aten._to_copy.default: copied,
    aten.clone.default: copied,
    aten.cat.default: cat,
    aten.stack.default: cat,
    aten.index_select.default: _rare("index_select"),
    aten.index.Tensor: _rare("index"),
    aten.constant_pad_nd.default: _rare("pad"),
    aten.new_zeros.default: _rare("new_zeros"),
    aten.repeat.default: _rare("repeat"),
    # These IEEE 754 rounds correctly: piece by piece, in vector or in scalar code, they give the same bits.
    # Transcendental functions are not among them: their vector and scalar versions differ.
    **{overload: _pointwise for op in (aten.add, aten.sub, aten.mul, aten.div) for overload in (op.Tensor, op.Scalar)},
    **{op.default: _pointwise for op in (aten.neg, aten.abs, aten.reciprocal)},
}
