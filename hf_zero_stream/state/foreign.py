"""Training states that another library wrote, which plug-ins read; and what these tell its tools of ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ..checkpoint.deepspeed_names import entries_of_deepspeed
from ..holdings.training import Training
from ..ranks.coordinator import Coordinator
from ..registry.plugins import import_object, missing_plugin_error, plugins
from .record import StateRecord


class ForeignState(Protocol):
    """What rank 0 has read of such a state, without values of tensors; all ranks get it, so it can be pickled."""

    writer: str
    """Who wrote it, for messages."""

    def renamed(self, rename: Callable[[str], str]) -> ForeignState:
        """The same with other names of parameters and buffers."""

    def record_for(self, training: Training, with_scheduler: bool) -> StateRecord:
        """What a state of ours would have recorded; an error of ours if it cannot go on in `training`."""

    def load(self, training: Training, coordinator: Coordinator) -> None:
        """Read weights, masters and moments; each rank the bytes of its own shards (all ranks)."""


def foreign_state_in(folder: Path) -> ForeignState | None:
    """What another library has saved into `folder`, the folder of a tag; None if none has.

    Raises:
        MissingPluginError: the plug-in of ours that reads it is not there.
    """
    for plugin in plugins():
        for is_such, read in plugin.resumes.items():
            if import_object(is_such)(folder):
                found: ForeignState = import_object(read)(folder)
                return found
    if entries_of_deepspeed(folder):
        raise missing_plugin_error("pickled", f"{folder}: going on from a checkpoint of DeepSpeed's")
    return None


def write_guard_files(folder: Path, tag: str) -> None:
    """Have plug-ins say to others' tools what the state `tag` in `folder` is, which DeepSpeed's engine has saved."""
    for plugin in plugins():
        for write in plugin.guard_files:
            import_object(write)(folder, tag)
