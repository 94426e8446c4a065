"""What is the newest state on the disk that all hosts see, beside which those on hosts are."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

from ...errors import CheckpointError
from ...plugin_api import FILE, STEPS, StateRecord, look_for_state, name_in


class SharedState(NamedTuple):
    """The newest state on the shared disk: its steps, -1 if there is none; the id of its training, "" if unknown."""

    steps: int = -1
    training: str = ""


def shared_state(folder: Path) -> SharedState:
    """The newest state in a shared `folder`, ours or DeepSpeed's own."""
    return state_in_place(folder, look_for_state(folder, None))


def state_in_place(folder: Path, state: tuple[Path, str | None] | None) -> SharedState:
    """A state of ours in a shared `folder`, or what else is the newest there."""
    if state is not None and state[1] is not None:
        try:
            record = StateRecord.read(state[0] / state[1] / FILE)
        except CheckpointError:
            return SharedState(0)  # what is wrong with it, loading it says
        return SharedState(record.counters.get(STEPS, 0), record.training)
    name = name_in(folder, None)
    steps = re.fullmatch(r"global_step(\d+)", name)
    return SharedState(int(steps[1]) if steps else sys.maxsize if name else -1)  # of a name that says no step
