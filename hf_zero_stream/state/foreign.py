"""Training states in another library's format: a plug-in reads them, and tells that library's tools of ours.

The checkpoints of DeepSpeed and accelerate, which save what we refuse, end in torch's
``Optimizer.load_state_dict``. It takes each entry that can be iterated over for a list of others, so that a string
comes back as the text of a generator; and a tensor by which something is kept in a group is another one in the next
process, under which nobody looks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers.utils import logging

from ..checkpoint.deepspeed_names import entries_of_deepspeed
from ..engine.load import Load
from ..errors import UnsupportedError
from ..holdings.slots import Training
from ..ranks.coordinator import Coordinator, meeting
from ..ranks.rendezvous import SAVE
from ..registry import has_tool, tool
from .record import StateRecord


logger = logging.get_logger(__name__)


class ForeignState(Protocol):
    """Such a state as rank 0 has read it, without values of tensors; all ranks get it, so it can be pickled."""

    writer: str
    """The library that wrote it, for messages."""

    def renamed(self, rename: Callable[[str], str]) -> ForeignState:
        """The same with other names of parameters and buffers."""

    def record_for(self, training: Training, with_scheduler: bool) -> StateRecord:
        """Give what a state of ours would have recorded; an error of ours if it cannot go on in `training`."""

    def states_for(self, training: Training, coordinator: Coordinator) -> Callable[[Load, Collection[str]], Any]:
        """What gives a load the lazy tensors of values, masters and moments (:data:`.values.States`)."""


def foreign_state_in(folder: Path) -> ForeignState | None:
    """Read what another library has saved into `folder`, the folder of a tag; None if none has.

    Raises:
        MissingPluginError: the plug-in of ours that reads it is not there.
    """
    if not entries_of_deepspeed(folder):
        return None
    read = tool("read_deepspeed_state", "pickled", f"{folder}: going on from a checkpoint of DeepSpeed's")
    found: ForeignState = read(folder)
    return found


def write_guard_files(folder: Path, saved: str | int) -> None:
    """Have a plug-in, if it is there, say to others' tools what a state in `folder` is.

    Args:
        saved: the tag by which DeepSpeed's engine has saved it; or the number of accelerate's model, of FSDP2.
    """
    if has_tool("write_guard_files"):
        tool("write_guard_files", "pickled")(folder, saved)


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

    with meeting(SAVE, f"a checkpoint of {whose}'s own", coordinator):
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
