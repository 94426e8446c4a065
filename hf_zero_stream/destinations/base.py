"""The interface of a load to the memory that it fills."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ..checkpoint.lazy import LazyTensor
from ..checkpoint.nodes import HostTensor, View
from ..errors import LoadError, UnsupportedError
from ..holdings.own_names import parameters
from ..planning.boxes import ParameterBox
from ..planning.plan import Target
from ..reports.text import bytes_text
from ..sources.base import Hints


SourcedTensor = tuple[Any, View]
"""A parameter, or a flat buffer, and the view that gives its values."""


class Item(NamedTuple):
    """A target, the view that fills it, and its memory.

    Attributes:
        view: gives the values; narrowed to ``target.box`` if there is one (see :func:`narrowed`).
        memory: gives the memory once the batch has begun: flat, of ``target.dtype`` and ``target.numel`` elements.
    """

    target: Target
    view: View
    memory: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Batch:
    """Targets that have memory at the same time.

    Attributes:
        begin: makes the memory; called when the batches before are finished.
        finish: called when the memory is full, for instance to move the values on. That of a collective batch may
            return what ends it: the next batch is read first, if it is collective too.
        is_collective: all ranks must finish together, and have the same batches.
        is_temporary: the memory holds the values only until the batch is finished.
        completes: whole tensors, flat, that this rank has once all batches are finished, by the parameter's name.
    """

    items: Sequence[Item]
    begin: Callable[[], object] = lambda: None
    finish: Callable[[], Callable[[], None] | None] = lambda: None
    is_collective: bool = False
    is_temporary: bool = False
    completes: Mapping[str, torch.Tensor] = field(default_factory=dict)


class Destination(Protocol):
    """The memory that one load fills, and this rank's part of it.

    A load calls, in this order:

    1. :meth:`observe` and :meth:`dtype`, before transformers makes the model's parameters lazy.
    2. :meth:`batches` (all ranks), with the lazy model. Each rank then plans its batches.
    3. :meth:`check`, with the plan. Then the ranks agree that all have got so far, and that they
       are about to load the same.
    4. :meth:`begin` (all ranks).
    5. For each batch: ``begin``; the reads, into the memory of its items; ``finish``. If the batch is collective the
       ranks agree before ``finish`` that all have read (all ranks).
    6. The ranks agree that all have come to the end. Then :meth:`finish` (all ranks).
    7. :meth:`initialise` (all ranks), for each module, if transformers initialises what the checkpoint lacks.
    8. :meth:`complete`, when transformers has tied what is to be tied.

    ``plan()`` calls :meth:`observe`, :meth:`dtype` and :meth:`batches`, on one rank.

    An error in any of them is raised on all ranks, at the next agreement. What has a body here need not be written by
    a class that inherits from this one.
    """

    device: torch.device = torch.device("cpu")
    """The device that this rank trains on."""

    into: str = "memory"
    """The kind of memory, for the report: "ZeRO-3 partitions", for instance."""

    trained_by: str = ""
    """The engine whose memory :mod:`..plugins.forecast` knows: "deepspeed", "torch" for DTensors; "": none of them."""

    stock_reader: str = ""
    """Who reads all shards when stock makes such a load, for the report: "rank 0", "each rank"; "" if not known."""

    until: str = ""
    """When the parameters' values are read, if not in this load."""

    fills_device: bool = True
    """Whether values go to :attr:`device`, and not to memory of the host from which they are brought there later."""

    hides_zero3: bool = False
    """Whether transformers must not act on an active ZeRO-3 config itself, because this destination partitions."""

    takes_dtensors: bool = False
    """Whether transformers may shard the model before it is loaded, so that parameters are DTensors."""

    takes_packed: bool = False
    """Whether parameters may be frozen bytes, which the model dequantises in its forward pass (see plugins/packed)."""

    packing_unsupported_reason: str = ""
    """The reason why they may not, if the user asked for a model that is sharded in another way; else ""."""

    trains_on: str = ""
    """The type of the device that training will use, in a plan for another machine; "": that of :attr:`device`."""

    fills_missing: bool = False
    """Whether parameters that no checkpoint fills get their memory here; if not, transformers makes it."""

    leaves_lazy: bool = False
    """Whether parameters stay lazy, for a later load to fill."""

    exchange_settings: Sequence[str] = ()
    """Settings that decide which of the values read ranks exchange, and so must be the same on all ranks."""

    hints: Hints = Hints(request_bytes=2**20)
    """The source's hints on the files that are loaded; a load sets them before it calls :meth:`batches`."""

    only_planned: bool = False
    """Whether nothing will be read; there may be no process group then. A load sets it with :attr:`hints`."""

    recast: Sequence[str] = ()
    """Parameters that got another dtype than transformers wanted for them; known after :meth:`batches`."""

    def refuse_packed(self) -> None:
        """Raise an UnsupportedError if something that was asked for does not go with frozen parameters of bytes."""
        return

    def observe(self, model: nn.Module) -> None:
        """Look at the empty `model`, whose parameters show by whom and how they were sharded."""
        return

    def dtype(self, wanted: torch.dtype | None) -> torch.dtype | None:
        """The dtype of all floating-point parameters if `wanted` was asked for; None if each has its own.

        If nothing is `wanted`: None too if it is not decided yet.
        """
        return None

    def batches(self, model: nn.Module, missing: set[str], tied: set[str]) -> Sequence[Batch]:
        """Replace the lazy tensors of `model` by those that it will train, and return the batches that fill them.

        Args:
            model: its loaded parameters and buffers are :class:`LazyTensor`; missing ones are on the meta device.
            missing: names that no checkpoint fills.
            tied: names that will be replaced by the other end of a tie, so that no memory is spent on them.
        """
        ...

    def check(self, targets: Sequence[Target]) -> None:
        """Raise, before anything is read, if the plan with these targets cannot be carried out here."""
        return

    def begin(self) -> None:
        """Make the memory that all batches use (all ranks)."""
        return

    def finish(self) -> None:
        """Do what is left when all batches are finished on all ranks (all ranks)."""
        return

    def initialise(self, initialise: Callable[[], None], module: nn.Module) -> None:
        """Call `initialise`, the model's own code for `module`, with the values that it touches in memory (all ranks).

        What it writes must end up on every rank.
        """
        initialise()

    def complete(self, model: nn.Module) -> None:
        """Take note of the model that the user gets."""
        return


def narrowed(view: View, box: ParameterBox) -> View:
    """The part of a parameter's `view` that `box` describes; nothing is copied."""
    for dim, intervals in enumerate(box.intervals):
        pieces = tuple(view.narrow(dim, start, stop - start) for start, stop in intervals)
        view = pieces[0] if len(pieces) == 1 else View.joined(pieces, dim)
    return view


def source_of(tensor: torch.Tensor) -> View | None:
    """The view that gives a parameter's or buffer's values; None if it was not loaded."""
    if isinstance(tensor, LazyTensor):
        return tensor.view_of_node
    if tensor.is_meta:
        return None
    return View.whole(HostTensor.of(tensor, "a conversion op made it from values"))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory could not be allocated, in Python, by torch on a CPU or on a device."""
    on_cpu = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return on_cpu or isinstance(error, (MemoryError, torch.OutOfMemoryError))


@contextmanager
def allocating(name: str, nbytes: int, device: torch.device | str, rank: int) -> Iterator[None]:
    """Raise a LoadError, which names the `nbytes` bytes wanted for `name`, if memory runs out inside."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise LoadError(
            f"out of memory on rank {rank}: {bytes_text(nbytes)} for {name} on {device}. Use more ranks or "
            "offload_param, or free what else is there; plan() says beforehand what a rank needs."
        ) from error


def lacks_values(tensor: torch.Tensor) -> bool:
    """Whether `tensor`, or one that it holds, is lazy, on the meta device or not initialised."""
    if isinstance(tensor, (LazyTensor, UninitializedParameter, UninitializedBuffer)) or tensor.is_meta:
        return True
    if type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return False
    flatten = getattr(tensor, "__tensor_flatten__", None)  # torch's own protocol for wrappers
    held = vars(tensor).values() if flatten is None else [getattr(tensor, name) for name in flatten()[0]]
    return any(lacks_values(value) for value in held if isinstance(value, torch.Tensor))


def refuse_wrapped(tensors: Iterable[tuple[str, torch.Tensor]], doing: str, instead: str) -> None:
    """Raise an UnsupportedError (``{doing}: ... {instead}``) for a wrapper tensor: its bytes are not its values."""
    for name, tensor in tensors:
        if hasattr(type(tensor), "__tensor_flatten__") and not isinstance(tensor, LazyTensor):
            raise UnsupportedError(
                f"{doing}: expected plain tensors or ZeRO partitions; {name} is a {type(tensor).__name__}, which "
                f"holds other tensors in its place. {instead}"
            )


def fill_whole(model: nn.Module) -> None:
    """Give all lazy parameters of `model` their values, on this rank alone, because they are going to be used."""
    for reader in dict.fromkeys(param.reader for param in parameters(model) if isinstance(param, LazyTensor)):
        cast(Any, reader).fill_whole(model)  # a Deferral, of a module that imports this one
