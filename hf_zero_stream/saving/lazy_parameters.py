"""Lazy tensors in place of the parameters of a model that is saved, and digests of values that several ranks hold.

Lazy tensors have names, dtypes and shapes, and no values. By the digests a save finds out whether values that several
ranks hold are the same on all of them.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from ..checkpoint.lazy import LazyTensor, Materialise
from ..checkpoint.nodes import HostTensor, Stored, View, sources_of
from ..engine.execute import run_in_threads
from ..errors import SaveError, UnsupportedError
from ..holdings.holder import holdings, refuse_meta
from ..holdings.holding import Holding
from ..holdings.introspection import has_converted_experts, has_partition, whole_of, with_original_experts
from ..holdings.own_names import named_parameters, own_names, own_or_clean, parameters
from ..ranks.coordinator import Coordinator
from ..seams.saving import names_of_shared
from .plan import in_dtype


logger = logging.get_logger(__name__)

Holds = Callable[[], Mapping[str, Holding]]
"""Gives what this rank holds of something, by name."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What is saved of a model.

    Attributes:
        dtype: of what is of floating point; None: as it is held.
        held: what is saved under the own names of parameters in place of their values; None: the values.
        instead: of some parameters, what is saved in place of values; in the parameters' dtypes, if `dtype` is None.
        prefix: what the names of all that begin with in a plan.
        also: what is saved too, by its names in a plan, which are those in the files.
    """

    dtype: torch.dtype | None = None
    held: Holds | None = None
    instead: Holds | None = None
    prefix: str = ""
    also: Holds | None = None

    def holdings(self, model: nn.Module, coordinator: Coordinator) -> dict[str, Holding]:
        """This rank's holdings of all that, by its names in a plan."""
        if self.held is None:
            ranks = {"rank": coordinator.rank, "world_size": coordinator.world_size}
            found = holdings(model, masters=self.dtype == torch.float32, **ranks)
        else:
            held = self.held()
            found = {name: held[name] for name, _ in named_parameters(model) if name in held}
        if self.instead is not None:
            found |= {name: it for name, it in self.instead().items() if name in found}
        return {f"{self.prefix}{name}": it for name, it in found.items()} | (
            {} if self.also is None else {**self.also()}
        )


def held_values(model: nn.Module, names: Collection[str], coordinator: Coordinator) -> dict[str, Holding]:
    """This rank's holdings of the values of the parameters `names`, which are own names."""
    if not names:
        return {}
    return {name: it for name, it in Selection().holdings(model, coordinator).items() if name in names}


class LazyParameters:
    """Lazy tensors in place of the parameters and buffers of a model, or of what a :class:`Selection` has for them.

    Attributes:
        holdings: this rank's, by their names in the plan.
        copies: copies that a state dict has made in host memory, and from where.
    """

    def __init__(
        self,
        model: nn.Module,
        coordinator: Coordinator,
        selection: Selection,
        materialise: Materialise,
        copies: list[tuple[HostTensor, torch.Tensor]] | None = None,
    ) -> None:
        self._model, self._dtype, self._materialise = model, selection.dtype, materialise
        self._has_all = selection.held is None
        self.copies = [] if copies is None else copies
        self.holdings = selection.holdings(model, coordinator)
        self._offered: set[str] = set()
        # Names of one parameter have one and the same tensor: transformers must see that they are tied.
        named = {name: f"{selection.prefix}{name}" for name, _ in named_parameters(model)}
        self._own = {name: planned for name, planned in named.items() if planned in self.holdings}
        params = dict(named_parameters(model))
        self._names = {id(params[name]): planned for name, planned in self._own.items()}
        self._dtypes = {planned: params[name].dtype for name, planned in self._own.items() if selection.instead}
        lazy = {key: self._whole(planned) for key, planned in self._names.items()}
        every = named_parameters(model, remove_duplicate=False)
        self._by_name = {name: lazy[id(param)] for name, param in every if id(param) in lazy}
        self._by_id = lazy

    @property
    def numel(self) -> int:
        """How many elements the parameters have between all ranks."""
        return sum(prod(self.holdings[planned].box.shape) for planned in self._own.values())

    def entries(self, given: Mapping[str, Any] | None = None, *, buffers: Collection[str] = ()) -> dict[str, Any]:
        """``model.state_dict()``, or what is `given`, with lazy tensors whose values all ranks can gather together.

        Beside what is held in place of values there are `buffers`, by the names of the state dict.
        """
        if given is None:
            return self._offering(self.state_dict(buffers=buffers))
        entries: dict[str, Any] = {}
        for name, value in given.items():
            view = value.view_of_node if isinstance(value, LazyTensor) else value  # rank 0 sends views
            entries[name] = entry = LazyTensor.of(view, self._materialise) if isinstance(view, View) else value
            expected = self._by_name[name].numel() if name in self._by_name else 0
            if expected and isinstance(entry, torch.Tensor) and entry.numel() == 0:
                raise SaveError(
                    f"{name}: expected {expected} elements in the state dict that is to be saved; got none. "
                    "model.state_dict() does not hold the values of a ZeRO-3 model: use the state dict that "
                    "save_pretrained is given, or gather the parameters (deepspeed.zero.GatheredParameters)."
                )
        return self._offering(entries)

    def own_entries(self, *, buffers: Collection[str] = ()) -> dict[str, Any]:
        """Give :meth:`entries` by own names; of the names of a tied parameter, the first one only."""
        entries = self.state_dict(keeps_adapters=False, buffers=buffers)
        tied = self._by_name.keys() - self._own
        return self._offering({name: entry for name, entry in entries.items() if name not in tied})

    def other_entries(self) -> dict[str, Any]:
        """What is saved beside what the model's parameters have, by its names in the plan."""
        apart = self.holdings.keys() - self._own.values()
        return {name: self._whole(name) for name in self.holdings if name in apart}

    @property
    def own_names(self) -> set[str]:
        """The names by which a load looks for what is held; those of converted experts are made anew."""
        return set() if has_converted_experts(self._model) or self._has_all else {*self._own}

    def _offering(self, entries: dict[str, Any]) -> dict[str, Any]:
        self._offered |= stored_names(
            entry.view_of_node for entry in entries.values() if isinstance(entry, LazyTensor)
        )
        return entries

    @property
    def expected(self) -> set[str]:
        """The names in the plan of what must be saved: all that is held in place of values, else what entries had."""
        return self._offered if self._has_all else {*self.holdings}

    def _whole(self, name: str) -> Any:
        """All of what has this name in the plan."""
        holding = self.holdings[name]
        return self._lazy(View.whole(Stored(holding.box.shape, holding.dtype, name)), self._dtypes.get(name))

    def _lazy(self, view: View, dtype: torch.dtype | None = None) -> Any:
        return in_dtype(LazyTensor.of(view, self._materialise), self._dtype or dtype)

    def state_dict(self, *, keeps_adapters: bool = True, buffers: Collection[str] = ()) -> dict[str, Any]:
        """``model.state_dict()`` with lazy tensors, by own names; or what is held in place of values, and `buffers`.

        With `keeps_adapters`, names have PEFT's parts, by which it and transformers save.
        """
        memories: dict[tuple[int, torch.dtype], HostTensor] = {}

        def in_host_memory(values: torch.Tensor) -> HostTensor:
            node = HostTensor.of(values)
            if node.tensor.data_ptr() != values.data_ptr():
                self.copies.append((node, values))
            return node

        def copied(values: torch.Tensor) -> HostTensor:
            node = HostTensor.of(values.clone())
            self.copies.append((node, values))
            return node

        def view_of(buffer: torch.Tensor) -> View:
            # One node for all that share a memory: transformers puts these into one shard, and saves equal ones once.
            storage = buffer.untyped_storage()
            if storage.data_ptr() == 0 or storage.nbytes() % buffer.dtype.itemsize:  # none, or of other dtypes, too
                return View.whole(in_host_memory(buffer))
            key = (storage.data_ptr(), buffer.dtype)
            if key not in memories:
                memories[key] = in_host_memory(torch.empty(0, dtype=buffer.dtype, device=buffer.device).set_(storage))
            return View(memories[key], tuple(buffer.shape), buffer.stride(), int(buffer.storage_offset()))

        kept = own_names(self._model, keeps_adapters=True)
        names = kept if keeps_adapters else own_names(self._model)
        names = {kept[name]: own for name, own in names.items()} | names

        def own(key: str) -> str:
            clean = own_or_clean(names, key)  # activation checkpointing takes only its own part out of such names
            return names.get(clean, clean)

        entries: dict[str, Any] = {}
        given = [(key, own(key), value) for key, value in self._model.state_dict(keep_vars=True).items()]
        left_out, cloned = names_of_shared(self._model, {name: value for _, name, value in given}, own)
        for key, name, value in given:
            if name in left_out:
                continue
            if id(value) in self._by_id:
                entries[name] = self._whole(self._names[id(value)]) if name in cloned else self._by_id[id(value)]
            elif not self._has_all and name not in buffers:
                continue
            elif isinstance(value, torch.Tensor) and value.numel() == 0 and self._lacks_values(value):
                raise UnsupportedError(
                    f"{type(self._model).__name__}.state_dict() gives for {key} neither a parameter nor a buffer of "
                    "the model, and no values: it is not PyTorch's own, and what it copies from is empty under "
                    "ZeRO-3. Let it return the parameters themselves (keep_vars=True)."
                )
            elif isinstance(value, torch.Tensor):  # a buffer; every rank has its own values, and rank 0's are written
                refuse_meta({name: value})
                whole = whole_of(name, value)
                entries[name] = self._lazy(View.whole(copied(whole)) if name in cloned else view_of(whole))
            elif value is not None:  # of a module's get_extra_state
                logger.warning_once(f"{key} is a {type(value).__name__}. Files of weights hold tensors, and not this.")
        return with_original_experts(self._model, entries)

    def _lacks_values(self, value: torch.Tensor) -> bool:
        """Whether an empty `value` of a state dict may be what is left of a partitioned parameter."""
        is_partitioned = any(map(has_partition, parameters(self._model)))
        return is_partitioned and all(value is not buffer for buffer in self._model.buffers())


def state_dict_without_values(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """``model.state_dict()`` with lazy tensors, which all ranks can save; reading their values raises."""
    return LazyParameters(model, Coordinator.of_default_group(), Selection(dtype=dtype), _refuse_values).state_dict()


def _refuse_values(view: View) -> torch.Tensor:
    raise UnsupportedError(
        "This state dict is lazy: accelerator.get_state_dict() gives such a one inside streaming(), and a "
        "save_pretrained of a model's own is given one. Its tensors can be saved, by all ranks, with "
        "save_pretrained(..., state_dict=...), and their values are not there. For the values themselves use "
        "deepspeed.zero.GatheredParameters, or call accelerator.get_state_dict() outside streaming()."
    )


_ROW = 128  # numbers in a row
_BLOCK = 2**16  # numbers that are summed at once on a CPU: they stay in its cache from one step to the next
_DEVICE_BLOCK = 2**19  # on an accelerator: each thread needs 12 MiB of its memory beside what it sums


def digests_of(held: Mapping[str, Holding], threads: int) -> dict[str, bytes]:
    """A digest of each of those of which this rank holds all of a box."""
    digests: dict[str, bytes] = {name: b"" for name, holding in held.items() if holding.is_whole}

    def work(names: Iterator[str]) -> None:
        for name in names:
            with held[name].open() as values:
                digests[name] = digest(values)

    run_in_threads(list(digests), work, threads)
    return digests


def stored_names(views: Iterable[View]) -> set[str]:
    """The names in the plan of what `views` come from."""
    return {node.name for node, _ in sources_of(views) if isinstance(node, Stored)}


def digest(values: torch.Tensor) -> bytes:
    """The same 8 bytes for the same bytes, in much less time than writing them takes, on CPU and GPU.

    The bytes are taken as 64-bit numbers, in rows. Each row becomes a sum with odd, random weights for the lower and
    the upper half of each number, modulo 2**64 (multilinear hashing: Lemire and Kaser, "Strongly universal string
    hashing is fast", 2014). Only these sums are hashed. Rows that change places, signs that flip or single values that
    differ give other sums, but for one chance in billions.
    """
    data = values.detach().contiguous().view(-1).view(torch.uint8)
    tail = data.numel() % (8 * _ROW)
    numbers = data[: data.numel() - tail]
    if numbers.storage_offset() % 8 or numbers.data_ptr() % 8:
        numbers = numbers.clone()
    lower, upper = _weights(str(numbers.device))
    block = _BLOCK if values.device.type == "cpu" else _DEVICE_BLOCK
    blocks = numbers.view(torch.int64).view(numbers.numel() // 8 // _ROW, _ROW).split(block // _ROW)
    sums = torch.cat([(rows * lower).addcmul_(rows >> 32, upper).sum(1) for rows in blocks])
    state = hashlib.blake2b(f"{values.dtype} {values.numel()}".encode(), digest_size=8)
    for part in (sums, data[data.numel() - tail :]):
        state.update(part.cpu().numpy().tobytes())
    return state.digest()


@functools.cache
def _weights(device: str) -> torch.Tensor:
    """The weights of the lower and of the upper halves; the same on all ranks and devices."""
    generator = torch.Generator().manual_seed(2014)
    bounds = torch.iinfo(torch.int64)
    drawn = torch.randint(bounds.min, bounds.max, (2, _ROW), generator=generator, dtype=torch.int64) | 1
    return drawn.to(device)
