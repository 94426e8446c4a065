"""Lazy tensors in place of the parameters of a model that is saved, and digests of values that several ranks hold.

Lazy tensors have names, dtypes and shapes, and no values. By the digests a save finds out whether values that several
ranks hold are the same on all of them.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from ..checkpoint.lazy import LazyTensor, Materialise
from ..checkpoint.nodes import HostTensor, Stored, View
from ..engine.execute import run_in_threads
from ..errors import UnsupportedError
from ..holdings.holder import holdings, refuse_meta
from ..holdings.holding import Holding
from ..holdings.introspection import has_converted_experts, has_partition, whole_of
from ..holdings.own_names import named_parameters, own_names, own_or_clean, parameters
from ..ranks.coordinator import Coordinator
from ..seams.saving import names_of_shared
from .plan import in_dtype


logger = logging.get_logger(__name__)

Held = Callable[[], Mapping[str, Holding]]
"""Gives what this rank holds of something that a training has for parameters, by their own names."""


def holdings_of_model(
    model: nn.Module, coordinator: Coordinator, dtype: torch.dtype | None, held: Held | None
) -> dict[str, Holding]:
    """This rank's holdings of the parameters of `model`, to be saved in `dtype`, or of what is `held` for them."""
    if held is None:
        ranks = {"rank": coordinator.rank, "world_size": coordinator.world_size}
        return holdings(model, masters=dtype == torch.float32, **ranks)
    of_names = held()
    return {name: of_names[name] for name, _ in named_parameters(model) if name in of_names}


def held_values(model: nn.Module, names: Collection[str], coordinator: Coordinator) -> dict[str, Holding]:
    """This rank's holdings of the values of the parameters `names`, which are own names."""
    if not names:
        return {}
    held = holdings_of_model(model, coordinator, None, None)
    return {name: holding for name, holding in held.items() if name in names}


class LazyParameters:
    """Lazy tensors in place of a model's parameters and buffers, those of floating point in `dtype`."""

    def __init__(
        self,
        model: nn.Module,
        coordinator: Coordinator,
        dtype: torch.dtype | None,
        materialise: Materialise,
        held: Held | None = None,
    ) -> None:
        self._model, self._dtype, self._materialise = model, dtype, materialise
        self._has_all = held is None
        self.copies: list[tuple[HostTensor, torch.Tensor]] = []
        """Copies that a state dict has made in host memory, and from where."""
        self.holdings = holdings_of_model(model, coordinator, dtype, held)
        # Names of one parameter have one and the same tensor: transformers must see that they are tied.
        params = dict(named_parameters(model))
        self._names = {id(params[name]): name for name in self.holdings}
        lazy = {key: self._whole(name) for key, name in self._names.items()}
        named = named_parameters(model, remove_duplicate=False)
        self.by_name = {name: lazy[id(param)] for name, param in named if id(param) in lazy}
        self._by_id = lazy

    def _whole(self, name: str) -> Any:
        holding = self.holdings[name]
        return self._lazy(View.whole(Stored(holding.box.shape, holding.dtype, name)))

    def _lazy(self, view: View) -> Any:
        return in_dtype(LazyTensor.of(view, self._materialise), self._dtype)

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
        if has_converted_experts(self._model):
            from ..holdings.deepspeed.original_experts import with_original_experts

            return with_original_experts(self._model, entries)
        return entries

    def _lacks_values(self, value: torch.Tensor) -> bool:
        """Whether an empty `value` of a state dict may be what is left of a partitioned parameter."""
        is_partitioned = any(map(has_partition, parameters(self._model)))
        return is_partitioned and all(value is not buffer for buffer in self._model.buffers())


def state_dict_without_values(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """``model.state_dict()`` with lazy tensors, which all ranks can save; reading their values raises."""
    return LazyParameters(model, Coordinator.of_default_group(), dtype, _refuse_values).state_dict()


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


def digests_of(held: Sequence[Mapping[str, Holding]], threads: int) -> dict[str, bytes]:
    """A digest of each parameter of which this rank holds all its box, and of all else that is `held` for it."""
    digests: dict[str, list[bytes]] = {name: [] for name, holding in held[0].items() if holding.is_whole}

    def work(names: Iterator[str]) -> None:
        for name in names:
            for each in held:
                with each[name].open() as values:
                    digests[name].append(digest(values))

    run_in_threads(list(digests), work, threads)
    return {name: b"".join(of_values) for name, of_values in digests.items()}


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
