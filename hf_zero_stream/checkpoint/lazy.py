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
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from importlib import import_module
from typing import Any

import torch

from ..errors import UnsupportedError
from . import nodes
from .format import file_dtype_name
from .nodes import (
    Address,
    HostTensor,
    Node,
    NodeStorage,
    View,
    WritableParameter,
    no_memory_error,
)


operations: list[Callable[[Any, Any, Any], Any]] = []
"""Runs an op on lazy tensors, given the op and its arguments: :mod:`.lazy_ops` puts itself here, at the first op."""

Materialise = Callable[[View], torch.Tensor]
"""Reads the values of a view; only ops that need values immediately call it."""


class LazyTensor(torch.Tensor):
    """A tensor without data: its node and its strides say where its elements would come from.

    It reports its true shape, strides and dtype, and the device that it was moved to, which is ``cpu`` at first. Its
    addresses only tell code that looks for tied tensors which lazy tensors share a node: reading from them, pickling
    it, or writing into it raises an :class:`UnsupportedError`.
    """

    _meta: torch.Tensor
    node: Node
    reader: Materialise
    """Reads the values when an op needs them."""

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
        self._meta, self.node, self.reader = meta, node, materialise
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
        return cls.whole(nodes.Blockwise(sizes, dtype, function, views, {}, blocks, parts), inputs[0].reader)

    def materialise(self) -> torch.Tensor:
        """Read the values now, into a new tensor on this tensor's device."""
        return self.reader(self.view_of_node).to(self.device)

    def in_memory(self) -> torch.Tensor:
        """The values: in their memory, if this is a writable parameter or a view of one; else in a new tensor."""
        node = self.node
        if not isinstance(node, WritableParameter):
            return self.materialise()
        if node.memory is None:
            node.memory = self.reader(View.whole(node.unwritten)).to(self.device).view(-1)
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
            if isinstance(self.node, WritableParameter) and not isinstance(value.node, WritableParameter):
                value = LazyTensor.whole(WritableParameter.of(value.view_of_node), value.reader, value.device)
            torch.Tensor.data.__set__(self, value)
            self.adopt_view(value)
        else:
            self.become(value)

    def adopt_view(self, other: LazyTensor) -> None:
        self._meta, self.node, self.reader = other._meta, other.node, other.reader

    def become(self, value: torch.Tensor) -> None:
        """Turn this object, to which optimizers and modules may refer, into a parameter with the values of `value`."""
        real = torch.nn.Parameter(value.detach(), requires_grad=self.requires_grad)
        copy_attributes(self, real)
        swap(self, real)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """A tensor of the same node: a node's values do not change. A parameter's copy has memory of its own."""
        if id(self) in memo:
            return memo[id(self)]
        if getattr(self, "_is_param", False):
            lazy = LazyTensor.whole(WritableParameter.of(self.view_of_node), self.reader, self.device)
            new: torch.Tensor = torch.nn.Parameter(lazy, requires_grad=self.requires_grad)
            copy_attributes(self, new)
        else:
            new = LazyTensor.of(self.view_of_node, self.reader, self.device)
        return memo.setdefault(id(self), new)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise no_memory_error(self.node, "it cannot be pickled, nor saved by torch.save")

    def data_ptr(self) -> Any:
        """An address as if each node had its own memory; it can be compared and added to, but not read from."""
        start = self.untyped_storage().data_ptr()
        return Address(start + int(self._meta.storage_offset()) * self.dtype.itemsize, self.node)

    def untyped_storage(self) -> Any:
        return NodeStorage(self.node)

    storage = untyped_storage

    @property
    def geometry(self) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """The sizes, strides and offset of this tensor in its node."""
        return tuple(self._meta.size()), self._meta.stride(), int(self._meta.storage_offset())

    @property
    def view_of_node(self) -> View:
        """A view of the elements that this tensor has now."""
        node = self.node
        return node.view(*self.geometry) if isinstance(node, WritableParameter) else View(node, *self.geometry)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"LazyTensor({tuple(self.shape)}, {self.dtype}, {type(self.node).__name__})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not operations:
            import_module(f"{__package__}.lazy_ops")
        return operations[0](func, args, kwargs or {})


@functools.lru_cache(maxsize=4096)
def whole_meta(sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous meta tensor; all nodes of a shape share one, because making it takes longer than all the rest.

    So two inputs of an op may share a storage: the result is then a view of the first, as in every view op of aten.
    """
    return torch.empty(sizes, dtype=dtype, device="meta")


def first_lazy(args: Any, kwargs: Any) -> LazyTensor:
    return next(lazy_among(*args, *kwargs.values()))


def lazy_among(*values: Any) -> Iterator[LazyTensor]:
    """The lazy tensors among `values`, and in lists of them."""
    # Not by tree_iter, which takes longer than the view op that asks.
    for value in values:
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, LazyTensor):
                yield item


def copy_attributes(old: torch.Tensor, new: torch.Tensor) -> None:
    """Python attributes that model code or transformers put on a tensor, such as ``_is_hf_initialized``."""
    for name, value in vars(old).items():
        if name not in LazyTensor.__annotations__ and name != "_is_param":
            setattr(new, name, value)


def swap(lazy: torch.Tensor, real: torch.Tensor) -> None:
    """Turn the object `lazy` into `real`; its finalisers and hooks stay with the object.

    :func:`torch.utils.swap_tensors` swaps nothing that has a finaliser, and leaves hooks with the other object. Raises
    an UnsupportedError if something else refers to more of the tensor than to the object.
    """
    called_back = [reference.__callback__ for reference in weakref.getweakrefs(lazy)]
    followers = [each for each in called_back if isinstance(each, weakref.finalize)]
    noted = [(each.atexit, known) for each in followers if (known := each.detach()) is not None]
    hooks = {name: getattr(lazy, name) for name in ("_backward_hooks", "_post_accumulate_grad_hooks")}
    try:
        torch.utils.swap_tensors(lazy, real)
        for name, of_object in hooks.items():
            if of_object is not None:
                setattr(lazy, name, of_object)
    except RuntimeError as error:
        raise UnsupportedError(
            f"A parameter of shape {tuple(lazy.shape)} was lazy when something took hold of it that a tensor of other "
            f"values cannot replace ({error}). Where hf_zero_stream.streaming() leaves a model lazy until it is "
            "prepared, prepare it before you give its parameters to what steps or exchanges gradients in the backward "
            "pass; or load it outside of streaming()."
        ) from error
    finally:
        for atexit, (_, function, args, kwargs) in noted:
            weakref.finalize(lazy, function, *args, **kwargs).atexit = atexit


def materialise_written(params: Iterable[torch.Tensor]) -> None:
    """Turn each of `params` that code has written into, or into whose memory, into a parameter with values."""
    for param in params:
        if (
            isinstance(param, LazyTensor)
            and isinstance(param.node, WritableParameter)
            and param.node.memory is not None
        ):
            param.become(param.in_memory())


class CheckpointSlice:
    """One tensor, like ``safetensors.safe_open(...).get_slice``; indexing it gives a :class:`LazyTensor`."""

    __slots__ = ("_materialise", "_view")

    def __init__(self, view: View, materialise: Materialise) -> None:
        self._view = view
        self._materialise = materialise

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor = LazyTensor.of(self._view, self._materialise)
        return tensor if index is Ellipsis else tensor[index]

    def get_shape(self) -> list[int]:
        return list(self._view.sizes)

    def get_dtype(self) -> str:
        return file_dtype_name(self._view.node.dtype)


class AbsentSlice(CheckpointSlice):
    """A tensor that the checkpoint's index promises and no shard holds; `is_wanted` once somebody indexed it."""

    def __init__(self) -> None:
        nothing = HostTensor.of(torch.empty(0, dtype=torch.float32))
        super().__init__(View.whole(nothing), lambda view: torch.empty(0))
        self.is_wanted = False

    def __getitem__(self, index: Any) -> torch.Tensor:
        self.is_wanted = True
        return super().__getitem__(...)  # empty: the load reports the missing tensor before the model is used
