"""Writing into lazy parameters, as code does between ``from_pretrained`` and ``accelerator.prepare``.

Such a parameter is a :class:`.LazyTensor` of a node of its own (:class:`.nodes.Own`). An op that writes into it, or
into a view of it, reads its values first; from then on all tensors of that node share this memory, as in torch. What
other ops make of it keeps the values of before, and is lazy too, with a node of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from .lazy import LazyTensor, first_lazy, lazy_among
from .nodes import HostTensor, Own


def become_written(params: Iterable[torch.Tensor]) -> None:
    """Turn each of `params` that code has written into, or into whose memory, into a parameter with values."""
    for param in params:
        if isinstance(param, LazyTensor) and isinstance(param.node, Own) and param.node.memory is not None:
            param.become(param.in_memory())


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an op, which is no view, of lazy tensors with nodes of their own, or of several readers."""
    if not any(isinstance(lazy.node, Own) for lazy in lazy_among(*args, *kwargs.values())):
        return LazyTensor.run(func, *settled(args, kwargs))
    result = func.decompose(*args, **kwargs)
    if result is NotImplemented:
        result = _write(func, args, kwargs)
    if result is not NotImplemented:
        return result
    name = func._overloadpacket.__name__
    if name.endswith("_like") or name.startswith("new_"):  # no values count
        return _on(lambda lazy: torch.empty(lazy.shape, dtype=lazy.dtype, device=lazy.device), func, args, kwargs)
    if torch.Tag.nondeterministic_seeded in func.tags:  # random numbers are drawn now, once
        return _on(LazyTensor.materialise, func, args, kwargs)
    results = LazyTensor.run(func, *settled(args, kwargs))

    def owned(value: Any) -> Any:
        if not isinstance(value, LazyTensor):
            return value
        return LazyTensor.whole(Own.of(value.view_of_node), value.reader, value.device)

    return tree_map(owned, results)


def _on(value_of: Callable[[LazyTensor], torch.Tensor], func: Any, args: Any, kwargs: Any) -> Any:
    def value(argument: Any) -> Any:
        return value_of(argument) if isinstance(argument, LazyTensor) else argument

    return func(*tree_map(value, tuple(args)), **tree_map(value, kwargs))


def _write(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an op that writes into memory of their own; NotImplemented if it is no such op."""
    written = written_by(func, args, kwargs)
    if func is torch.ops.aten.set_.source_Tensor and all(isinstance(value, LazyTensor) for value in args):
        target, source = args  # of one shape, as where torch parametrises a module
        if (target.shape, target.dtype) == (source.shape, source.dtype):
            target.look_at(source)
            return target
    if not written or torch.Tag.inplace_view in func.tags or not all(isinstance(one.node, Own) for one in written):
        return NotImplemented
    targets = {id(one) for one in written}
    return _on(lambda lazy: lazy.in_memory() if id(lazy) in targets else lazy.materialise(), func, args, kwargs)


def settled(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Arguments for an op that does not write: their values are those of now, and one reader reads all of them.

    Lazy tensors of several models have a reader each, and what one of them reads means something else to another.
    """
    reader = first_lazy(args, kwargs).reader

    def settle(value: Any) -> Any:
        if not isinstance(value, LazyTensor):
            return value
        if value.reader != reader:
            return LazyTensor.whole(HostTensor.of(value.materialise()), reader, value.device)
        return LazyTensor.of(value.view_of_node, reader, value.device) if isinstance(value.node, Own) else value

    settled_args, settled_kwargs = tree_map(settle, (tuple(args), kwargs))
    return settled_args, settled_kwargs


def written_by(func: Any, args: Any, kwargs: Any) -> list[LazyTensor]:
    """The lazy tensors that this op writes into."""
    if not func._schema.is_mutable:
        return []
    named = zip(func._schema.arguments, args, strict=False)
    by_name = ((argument, kwargs[argument.name]) for argument in func._schema.arguments if argument.name in kwargs)
    pairs = [(argument.alias_info, value) for argument, value in (*named, *by_name)]
    return list(lazy_among(*(value for alias, value in pairs if alias is not None and alias.is_write)))


def swap(lazy: torch.Tensor, real: torch.Tensor) -> None:
    """Turn the object `lazy` into `real`; what follows the object, its finalisers and hooks, goes on doing so.

    :func:`torch.utils.swap_tensors` swaps nothing that has a finaliser, and leaves hooks with the other object.
    """
    called_back = [reference.__callback__ for reference in weakref.getweakrefs(lazy)]
    followers = [each for each in called_back if isinstance(each, weakref.finalize)]
    noted = [(each.atexit, known) for each in followers if (known := each.detach()) is not None]
    hooks: Any = lazy._backward_hooks
    torch.utils.swap_tensors(lazy, real)
    if hooks is not None:
        lazy._backward_hooks = hooks
    for atexit, (_, function, args, kwargs) in noted:
        weakref.finalize(lazy, function, *args, **kwargs).atexit = atexit
