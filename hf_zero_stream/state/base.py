"""The base of adapters: what of it a state may leave out, because the checkpoint has it, and what is saved with it.

Adapters train beside a base that is frozen. A resume loads the base as a new training does. So a state leaves out
those of its values that are seen to be in the checkpoint that the base was loaded from: of the same shape, with the
same digest. All else that is not trained is in the state: rows of resized embeddings, new heads, buffers, a base that
was changed by hand or merged, frozen adapters.

The digests of what was left out are recorded. A resume compares them with the base that it finds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from ..errors import ConfigError
from ..holdings.introspection import PACKED, is_adapted, is_packed, lies_in_files
from ..holdings.own_names import modules, named_parameters, own_names
from ..holdings.slots import Training
from ..ranks.coordinator import Coordinator
from ..saving.lazy_parameters import digests_of, held_values
from ..saving.parameters import refuse_or_say_differing
from ..saving.write import threads_of
from ..settings.values import dtype_named
from .digests import Digest, digests_in_memory, in_checkpoint, note_in_checkpoint, places_of
from .record import StateRecord
from .tensors import names_in


logger = logging.get_logger(__name__)

_said: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()
"""The tensors that a warning has named as saved with the adapters of a model."""


def split_base(
    training: Training, apart: Collection[str], coordinator: Coordinator
) -> tuple[list[str], dict[str, Digest]]:
    """Split the base: what is not shown to be in its checkpoint, and the digests of the rest (all ranks).

    Buffers that are `apart` differ between ranks. Quantised values do not lie in a checkpoint as they do in memory:
    they are left out, and a resume compares them.
    """
    model = training.model
    names = _untrained(model, {*apart, *(member.name for slot in training.slots for member in slot.members)})
    _refuse_unlike_replicas(model, names, coordinator)
    digests = digests_in_memory(model, names, coordinator, threads_of(coordinator))
    quantised = quantised_names(model)
    sought = {name: [it] for name, it in digests.items() if name not in quantised and torch.Size(it.shape).numel()}
    in_files = {name for name, param in named_parameters(model) if lies_in_files(param)}
    note_in_checkpoint(model, {name: it for name, (it,) in sought.items() if name in in_files}, {})
    shown, reason = in_checkpoint(model, sought, coordinator)
    left = sorted(sought.keys() - shown)
    if coordinator.is_main and left and _said.get(model) != frozenset(left):
        _said[model] = frozenset(left)
        nbytes = sum(digests[name].nbytes for name in left)
        why = reason or f"they are not in {places_of(model)} as they are in memory"
        logger.warning(
            f"save_state: {len(left)} tensors that are not trained ({nbytes / 2**20:.1f} MiB) are saved with the "
            f"adapters, because {why}: {', '.join(left[:8])}."
        )
    # Of what is apart, rank 0's values are for tools that read states, as those in weights are.
    return sorted([*left, *apart]), {name: digest for name, digest in digests.items() if name not in left}


def _refuse_unlike_replicas(model: nn.Module, names: Collection[str], coordinator: Coordinator) -> None:
    """Raise an UnsupportedError, on all ranks, if those that hold all of a box of a parameter have other values of it.

    A digest of the base is made of a part from each rank, so that it would miss what differs in the part of another.
    """
    with coordinator.reporting():
        held = held_values(model, names, coordinator)
        mine = {} if coordinator.is_alone else digests_of(held, threads_of(coordinator))
    first: dict[Any, bytes] = {}
    differing: dict[str, list[int]] = {}
    for rank, of_rank in enumerate(coordinator.all_gather({(it, held[it].box): mine[it] for it in mine})):
        for (name, box), digest in of_rank.items():
            if first.setdefault((name, box), digest) != digest:
                differing.setdefault(name, []).append(rank)
    if differing:
        refuse_or_say_differing(differing, "a training", coordinator)


def has_base(model: nn.Module, record: StateRecord) -> bool:
    """Whether the state of `record` leaves out what is not trained, or must, as `model` has adapters."""
    return record.base is not None or is_adapted(model)


def refuse_other_base(model: nn.Module, record: StateRecord, place: Path, coordinator: Coordinator) -> None:
    """Raise a ConfigError, on all ranks, unless `model` has the base that the adapters of `record` were trained on."""
    saved = record.base_digests
    if saved is None:
        raise ConfigError(
            f"{place}: expected a state of adapters, with digests of their base; found one without. Load it into the "
            "model without adapters, or give the state that was saved of them."
        )
    names = _untrained(model, record.trained | {*record.buffers})
    in_memory = digests_in_memory(model, names, coordinator, threads_of(coordinator))
    different = {name for name, digest in saved.items() if in_memory.get(name) != digest}
    recast = {
        name
        for name in different & in_memory.keys()
        if in_memory[name].dtype != saved[name].dtype and in_memory[name].shape == saved[name].shape
    }
    if recast:
        of_both = {name: (in_memory[name], saved[name]) for name in recast}
        different -= _same_in_other_dtype(model, of_both, coordinator)
    quantised = quantised_names(model)
    if others := sorted(different - quantised):
        raise ConfigError(
            f"{place}: its adapters were trained on another base: {len(others)} of {len(saved)} tensors that are not "
            f"trained have other values, shapes or names than when it was saved, among them {', '.join(others[:8])}. "
            f"The base was loaded from {record.base_of}, and now from {places_of(model)}. Load the base that the "
            "adapters were trained on, and change it as then; or put the adapters on this one with "
            "PeftModel.from_pretrained and begin a new training."
        )
    if coordinator.is_main and different:
        logger.warning(
            f"{place}: {len(different)} quantised tensors of the base have other bytes than when the state was "
            f"saved, among them {min(different)}: it was quantised otherwise, or on another device."
        )
    new = sorted(in_memory.keys() - saved.keys() - {*record.untrained})
    if coordinator.is_main and new:
        logger.warning(
            f"{place}: the state knows nothing of {len(new)} tensors that are not trained, among them {new[0]}. They "
            "stay as they are."
        )
    same = {name: in_memory[name] for name in saved if name not in different}
    note_in_checkpoint(model, same, {name: digest for name, digest in in_memory.items() if name not in same})


def _same_in_other_dtype(
    model: nn.Module, recast: Mapping[str, tuple[Digest, Digest]], coordinator: Coordinator
) -> set[str]:
    """The names of which the digests, in memory and saved, are of the same values in two dtypes (all ranks).

    Where the saved dtype holds less, what is in memory is cast to it. Else both are looked for in the checkpoint.
    """
    narrower = {}
    for name, (mine, saved) in recast.items():
        dtypes = dtype_named(mine.dtype), dtype_named(saved.dtype)
        if all(dtype.is_floating_point for dtype in dtypes) and torch.promote_types(*dtypes) == dtypes[0]:
            narrower[name] = dtypes[1]
    cast = digests_in_memory(model, narrower, coordinator, threads_of(coordinator), narrower)
    same = {name for name, digest in cast.items() if digest == recast[name][1]}
    left = {name: [*digests] for name, digests in recast.items() if name not in same}
    return same | (in_checkpoint(model, left, coordinator)[0] if left else set())


def _untrained(model: nn.Module, trained: Collection[str]) -> set[str]:
    """Own names of all that a state dict of `model` has, but for what is `trained`."""
    return names_in(model) - {*trained}


def quantised_names(model: nn.Module) -> set[str]:
    """Own names of the tensors of modules that hold any in a quantised form."""
    found: set[str] = set()
    names = own_names(model)
    for prefix, module in quantised_modules(model):
        packs = PACKED in vars(module)
        tensors = [*module.named_parameters(recurse=packs), *module.named_buffers(recurse=packs)]
        found |= {names.get(f"{prefix}.{key}" if prefix else key, key) for key, _ in tensors}
    return found


def quantised_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a quantised model that hold tensors in a quantised form."""
    if not is_packed(model) and not any(getattr(it, "hf_quantizer", None) for it in _pretrained(model)):
        return
    for prefix, module in model.named_modules(remove_duplicate=False):
        own = [*module._parameters.values(), *module._buffers.values()]
        if PACKED in vars(module) or any(each is not None and not _is_plain(each.dtype) for each in own):
            yield prefix, module


def _pretrained(model: nn.Module) -> list[PreTrainedModel]:
    return [module for module in modules(model) if isinstance(module, PreTrainedModel)]


def _is_plain(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > 1
