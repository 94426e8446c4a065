"""What the checkpoints of DeepSpeed and accelerate would not bring back, where these save what we refuse.

Both end in torch's ``Optimizer.load_state_dict``. It takes each entry that can be iterated over for a list of others,
so that a string comes back as the text of a generator; and a tensor by which something is kept in a group is another
one in the next process, under which nobody looks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers.utils import logging

from ..errors import UnsupportedError
from ..ranks.coordinator import Coordinator, meeting
from ..ranks.rendezvous import SAVE


logger = logging.get_logger(__name__)


def leave_to(whose: str, error: Exception, optimizer: Any) -> None:
    """Say that a training that we do not save, by this `error`, is saved by `whose` own checkpoint (all ranks).

    Args:
        optimizer: what trains; None if nothing does.

    Raises:
        UnsupportedError: on all ranks, before anything is written: that checkpoint loses what `optimizer` keeps.
    """
    coordinator = Coordinator.of_default_group()

    def refuse() -> None:
        if optimizer is not None and (lost := sorted({*_lost(optimizer)})):
            raise UnsupportedError(
                f"{error} A checkpoint of {whose}'s own is no way out here: what {type(optimizer).__name__} keeps "
                f"comes back as something else: {', '.join(lost[:8])}. Keep numbers in place of strings, and what "
                "belongs to a tensor in the optimizer's `state`; or save the weights alone, with save_pretrained."
            ) from error

    with meeting(SAVE, coordinator=coordinator):
        coordinator.run_on_all(refuse)
    if coordinator.is_main:
        logger.warning_once(f"This training is saved by {whose}, in its own format: {error}")


def _lost(optimizer: Any) -> Iterator[str]:
    for entries in optimizer.state.values():
        for key, value in entries.items() if isinstance(entries, Mapping) else [("state", entries)]:
            if _has_string(value):
                yield f"{key} (a string becomes the text of a generator)"
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params" and _is_by_tensors(value):
                yield f"{key} of group {number} (kept by tensors, which are others after a load)"


def _has_string(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_string, value.values()))
    return isinstance(value, str) or (isinstance(value, (list, tuple)) and any(map(_has_string, value)))


def _is_by_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(isinstance(key, torch.Tensor) for key in value) or any(map(_is_by_tensors, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_is_by_tensors, value))
