"""Trainings of PEFT's models: of these only what is trained, and buffers, are saved and loaded, by their own names."""

from __future__ import annotations

from functools import partial

from torch import nn

from ..errors import UnsupportedError
from ..holdings.own_names import adapter_names, named_parameters, own_names
from ..holdings.slots import MASTER
from ..holdings.training import Training
from ..ranks.coordinator import Coordinator
from ..saving.count import anything
from ..saving.lazy_parameters import held_values
from ..saving.preparation import SaveItem
from ..seams.adapter_saving import lay_out_adapters


def keys_of(keys: list[str]) -> list[str]:
    """The states `keys`, and the values that are trained: no file of weights has them under the model's names."""
    return [*(key for key in keys if key != MASTER), MASTER]


def refuse_unreachable(training: Training) -> None:
    """Raise an UnsupportedError if new masters could not be brought into the model."""
    if not training.can_copy_masters or any(slot.is_swapped for slot in training.slots):
        raise UnsupportedError(
            "Adapters, and what is trained beside a base that is left out, have no place in a training state if their "
            "values or masters lie in swap files (offload to NVMe). Keep them in memory: they are small."
        )


def weights(model: nn.Module, coordinator: Coordinator) -> SaveItem:
    """Give the item that PEFT's own ``save_pretrained`` saves: the adapters."""
    adapters = adapter_names(model)
    names = {name for name, param in named_parameters(model) if param.requires_grad or name in adapters}
    own, kept = own_names(model), own_names(model, keeps_adapters=True)
    buffers = {kept[name] for name, _ in model.named_buffers(remove_duplicate=False) if own[name] in adapters}
    return SaveItem(
        lay_out=lambda folder, parameters: lay_out_adapters(model, folder, parameters.entries(buffers=buffers)),
        index_name="adapter_model.safetensors.index.json",
        held=partial(held_values, model, names, coordinator),
        left_out=anything,  # the state has all that is trained, as masters
    )
