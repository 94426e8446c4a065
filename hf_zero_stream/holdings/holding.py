"""What a rank holds of the tensors of a model, and the kinds of tensors.

A kind says how its tensors are told, and in which memory their values lie; :mod:`.holder` says what this rank holds of
them. There is one list for parameters, and one for buffers. A tensor that is of no kind, or whose memory does not hold
its values one after the other, is refused by name: there is no default. Users add kinds of memory of their own to
:data:`.holder.HOLDERS`, which are asked first.

The entries of an optimizer and the options of its groups are held to the same rule: :func:`.slots.elementwise_keys`
refuses the tensors of which a state cannot keep the values, and :func:`..state.forms.with_kind` all other values that
would not come back as they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ..checkpoint.format import file_dtype_name
from ..checkpoint.lazy import LazyTensor
from ..errors import UnsupportedError
from ..planning.boxes import ParameterBox
from ..planning.plan import Target, partition_range
from .introspection import autotp_shards, has_partition, is_cut, is_dtensor, local_of
from .own_names import named_buffers, named_parameters


class Holding(NamedTuple):
    """The elements of a parameter that this rank holds: some of one box of it, counted in row-major order.

    The boxes that ranks hold of one parameter are equal or disjoint, and together they are all of it.

    Attributes:
        box: may be empty. That of a ZeRO partition is the whole parameter.
        start: first element of the box that this rank gives.
        stop: one past the last; equal to `start` where it gives none.
        open: a context with the flat values that are held, from element :attr:`first` on.
        is_whole: this rank holds all elements of the box, as other ranks do; their values are compared.
        is_swapped: the values come out of a swap file each time they are opened.
        is_gathered: a ``GatheredParameters`` around the save holds them, and they may be new on one rank only.
        is_zero: all values are zero, and nothing has memory for them yet.
        digests: by dtype, those that were computed of values which cannot change; None where they can.
    """

    box: ParameterBox
    dtype: torch.dtype
    start: int
    stop: int
    open: Callable[[], AbstractContextManager[torch.Tensor]]
    is_whole: bool = False
    is_swapped: bool = False
    is_gathered: bool = False
    is_zero: bool = False
    digests: dict[torch.dtype, tuple[int, int]] | None = None

    @property
    def first(self) -> int:
        """The number of the first element that is held."""
        return 0 if self.is_whole else self.start


class LocalShard(NamedTuple):
    """The box of a parameter that this rank holds, as number `copy` of the `copies` ranks of its mesh that hold it.

    Attributes:
        is_on_other_meshes: another mesh of ranks may hold the same data; one of these meshes has rank 0. Of tensor
            parallelism under FSDP2, what only FSDP2 shards is on a mesh of its own for each rank of the former.
        part: of a flat part of the box: the elements that there is memory for, the first that lies in it, and one past
            the last; the rest is padding. None: all of the box.
    """

    box: ParameterBox
    copy: int = 0
    copies: int = 1
    is_on_other_meshes: bool = False
    part: tuple[int, int, int] | None = None

    @classmethod
    def whole(cls, shape: Sequence[int]) -> LocalShard:
        """All of a parameter of this `shape`."""
        return cls(ParameterBox.whole(shape))

    @property
    def share(self) -> tuple[int, int]:
        """The first element of the box that this rank gives when it is saved, and one past the last."""
        _, start, stop = self.part or partition_range(self.box.numel, self.copy, self.copies)
        return start, stop

    def target(self, name: str, dtype: torch.dtype, elements: tuple[int, int] | None = None) -> Target:
        """The target of all that is held of parameter `name`, or of these elements of its box."""
        start, stop = elements or (0, self.box.numel)
        numel, start, stop = (stop - start, start, stop) if elements or self.part is None else self.part
        box = None if self.box.is_whole else self.box
        return Target(name, dtype, numel, start, stop, box, is_copy=self.copy > 0 or self.is_on_other_meshes)

    def holding(self, param: torch.Tensor) -> Holding:
        """What a save is told of `param`, of which the memory of this rank is this shard."""
        values = partial(open_flat, local_of(param))
        return Holding(self.box, param.dtype, *self.share, values, is_whole=self.copies > 1)


class Holder(Protocol):
    """One kind of memory that parameters may lie in. A plug-in names it, or it is added to :data:`.holder.HOLDERS`."""

    def __call__(
        self, model: nn.Module, params: Mapping[str, nn.Parameter], *, masters: bool, rank: int, world_size: int
    ) -> Mapping[str, Holding]:
        """Return this rank's holdings of the `params` that lie in memory of this kind, by name.

        The same names on all ranks, also where a rank holds no element. Parameters of other kinds are left out.

        Args:
            params: parameters of `model`, each once.
            masters: the fp32 values that an optimizer trains, where there are any, in place of the model's own.

        Raises:
            UnsupportedError: the values cannot be reached; the message says what to do.
        """
        ...


def open_flat(param: torch.Tensor) -> AbstractContextManager[torch.Tensor]:
    """A context with the flat values that a parameter has by then."""
    return nullcontext(param.detach().contiguous().view(-1))


def cut_shard_of(name: str, param: Any) -> LocalShard:
    """The elements of parameter `name` that AutoTP has left to this rank, which other ranks may hold too.

    Raises:
        UnsupportedError: DeepSpeed does not say which elements they are, or ranks hold some of them in common.
    """
    shard: LocalShard = autotp_shards().shard_of(name, param)
    return shard


class Kind(NamedTuple):
    """A kind of parameters or buffers.

    Attributes:
        name: for messages.
        is_one: whether a tensor is of this kind; the first kind that says so has it.
        memory: the memory that the values of a tensor lie in, on this rank.
    """

    name: str
    is_one: Callable[[Any], bool]
    memory: Callable[[Any], torch.Tensor]


def _partition(param: Any) -> torch.Tensor:
    partition: torch.Tensor = param.ds_tensor
    return partition


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _is_whole(tensor: Any) -> bool:
    return not hasattr(tensor, "placements")


def _is_on_each_rank(buffer: Any) -> bool:
    """Not so a parameter that is registered as a buffer too, where ranks share parameters."""
    return _is_whole(buffer) and not has_partition(buffer) and not is_cut(buffer)


PARAMETERS = (
    Kind("a partition of ZeRO-3", has_partition, _partition),
    Kind("a part that AutoTP has left", is_cut, _itself),
    Kind("a shard (DTensor)", is_dtensor, local_of),
    Kind("a plain tensor", _is_whole, _itself),
)
"""Weights that stay quantised are parameters of bytes of these kinds, whose meaning :mod:`..plugins.packed` knows."""

BUFFERS = (
    Kind("a DTensor that each rank has in full", is_dtensor, local_of),
    Kind("a plain tensor", _is_on_each_rank, _itself),
)
"""Persistent buffers, of which rank 0's are written. Several names of one buffer, or of one memory, are saved once."""

_UNINITIALISED = (UninitializedParameter, UninitializedBuffer)

_Unreadable = tuple[tuple[str, Callable[[Any], bool]], ...]
"""Why the bytes of a tensor's memory are not its values, or are none that a file can have."""

_NESTED = ("it is a nested tensor", lambda it: bool(it.is_nested))

_OF_SUBCLASSES: _Unreadable = (
    ("it has no shape and no values yet (a lazy module)", lambda it: isinstance(it, _UNINITIALISED)),
    _NESTED,
    ("it holds other tensors in its place", lambda it: hasattr(type(it), "__tensor_flatten__")),
    (
        "its class computes what is read from it (__torch_dispatch__)",
        lambda it: type(it).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__,
    ),
)

_OF_ALL: _Unreadable = (
    _NESTED,
    ("it is sparse, or in a layout of its own", lambda it: it.layout != torch.strided),
    ("it is quantised by torch, and its scales lie elsewhere", lambda it: bool(it.is_quantized)),
    ("it is quantised by DeepSpeed, and its scales lie elsewhere", lambda it: hasattr(it, "ds_quant_scale")),
    ("its memory has other signs than its values (a conjugate view)", lambda it: it.is_conj() or it.is_neg()),
    ("safetensors has no such dtype", lambda it: not file_dtype_name(it.dtype)),
)


def why_unreadable(tensor: Any) -> str:
    """Why the memory of `tensor` does not hold its values as a file would; "" if it does."""
    if isinstance(tensor, LazyTensor):  # it gets its values when they are needed
        return ""
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        for why, is_so in _OF_SUBCLASSES:
            if is_so(tensor):
                return why
    for why, is_so in _OF_ALL:
        if is_so(tensor):
            return why
    return ""


def kind_of(tensor: Any, kinds: Iterable[Kind]) -> Kind | None:
    """The kind of `tensor`; None if nobody knows it."""
    for kind in kinds:
        if kind.is_one(tensor):
            return kind
    return None


def refuse_unknown(
    tensors: Mapping[str, Any],
    kinds: Iterable[Kind],
    doing: str = "what ranks hold",
    instead: str = "Put a plain tensor in its place.",
) -> None:
    """Raise an UnsupportedError (``{doing}: ... {instead}``) for tensors of none of these `kinds`."""
    kinds = tuple(kinds)
    for name, tensor in tensors.items():
        kind = kind_of(tensor, kinds)
        memory = tensor if kind is None else kind.memory(tensor)
        why = "it is of no kind that is known" if kind is None else why_unreadable(memory)
        if why:
            is_plain = memory is tensor or type(memory) is torch.Tensor
            inside = "" if is_plain else f" with a {type(memory).__name__} in it"
            raise UnsupportedError(
                f"{doing}: expected {', or '.join(each.name for each in kinds)}; found {name}, a "
                f"{_described(tensor)}{inside}: {why}. {instead}"
            )


def _described(tensor: Any) -> str:
    """The type of `tensor`; some have no dtype yet."""
    dtype = "" if isinstance(tensor, _UNINITIALISED) else f" of {tensor.dtype}"
    return f"{type(tensor).__name__}{dtype}"


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that a state dict of `model` has."""
    return named_buffers(model, by_own_names=False, only_persistent=True)


def refuse_shared_memory(model: nn.Module, doing: str, instead: str) -> None:
    """Raise an UnsupportedError (``{doing}: ... {instead}``) if a parameter shares memory with something else.

    That is another parameter, or a persistent buffer: a view. What is one tensor under two names shares nothing. Files
    would have the values twice, and nothing that says so; transformers refuses it too. It saves ties that the model's
    class declares, and buffers that share the memory of buffers.
    """
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    declared = {*tied.keys(), *tied.values()}
    spans: dict[tuple[torch.device, int], list[tuple[int, int, str, bool]]] = defaultdict(list)
    for name, tensor in [*named_parameters(model, by_own_names=False), *persistent_buffers(model)]:
        is_alone = has_partition(tensor) or is_dtensor(tensor) or isinstance(tensor, LazyTensor)
        if is_alone or name in declared or why_unreadable(tensor) or tensor.is_meta or not tensor.numel():
            continue  # others are refused, or have no memory that could be shared
        start = tensor.data_ptr()
        if tensor.is_contiguous():
            stop = start + tensor.nbytes
        else:
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            stop = start + (last + 1) * tensor.element_size()
        place = tensor.device, tensor.untyped_storage().data_ptr()
        spans[place].append((start, stop, name, isinstance(tensor, nn.Parameter)))
    for sharing in spans.values():
        stop, owner, is_before = 0, "", False
        for start, end, name, is_parameter in sorted(sharing):
            if start < stop and (is_parameter or is_before):
                raise UnsupportedError(
                    f"{doing}: expected parameters with memory of their own; {owner} and {name} are views of the same "
                    f"memory. Make them one parameter, declare the tie (_tied_weights_keys), or clone one. {instead}"
                )
            if end > stop:
                stop, owner, is_before = end, name, is_parameter
