"""Agreements of threads beside a training, which has the process group to itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from .coordinator import Coordinator
from .presence import Presence
from .store import PREFIX
from .watchdog import Watchdog


class BackgroundCoordinator(Coordinator):
    """Coordinator of one thread of every rank beside a training; made by all in a meeting, closed by the threads.

    The training has the process group to itself: collectives of another thread would mix with its own. So threads
    exchange values, of what JSON can hold, by the key-value store. They wait for each other as long as all ranks live.

    Args:
        exchanges: they make collectives, too: of host memory, in a process group of their own, which is kept.
    """

    def __init__(self, coordinator: Coordinator, *, exchanges: bool = False) -> None:
        super().__init__(coordinator.rank, coordinator.world_size, alone=coordinator.is_alone)
        self._group: Any = None
        if not self.is_alone:
            if exchanges:
                self._group = coordinator.run_on_all(_group_of_threads)
            self._presence = Presence.in_default_group()
            self._held = self._presence.group_store()  # its server, if it is in this process, must live on
            self._watchdog = Watchdog(self._presence, f"{coordinator.meeting}/background", is_background=True)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def begin(self, collective: Callable[..., Any], *args: Any, group: Any = None) -> Callable[[], None]:
        return super().begin(collective, *args, group=self._group)

    def _gather(self, value: Any) -> list[Any]:
        assert self._watchdog is not None
        # No key is deleted: the next save in the background begins when this one has ended on all ranks.
        store, keys = self._presence.store, [f"{PREFIX}/background/{rank}" for rank in range(self.world_size)]
        store.set(keys[self.rank], value)
        self._watchdog.meet()
        if self.is_main:  # reads what all have given; the others, as a rule, that it is all the same
            values = store.get_many(keys)
            is_same = all(each == values[0] for each in values)
            store.set(f"{PREFIX}/background/all", values[:1] if is_same else values)
        self._watchdog.meet()
        found = store.get(f"{PREFIX}/background/all")
        return found * (self.world_size // len(found))

    def close(self, error: BaseException | None = None) -> None:
        """Leave; rank 0, whose process may hold the store, when the others have left. Tell them of an `error`."""
        if self._watchdog is not None:
            if error is not None and not self._reported:
                self._watchdog.announce(error, comes=False)
            self._watchdog.close()


_groups_of_threads: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
"""By the default process group. One that is used goes on after ``destroy_process_group``."""


def _group_of_threads() -> Any:
    """The process group of gloo in which threads of all ranks exchange host memory (all ranks)."""
    default = dist.group.WORLD
    if default not in _groups_of_threads:
        _groups_of_threads[default] = dist.new_group(backend="gloo")
    return _groups_of_threads[default]
