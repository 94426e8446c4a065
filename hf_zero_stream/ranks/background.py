"""Agreements of threads of all ranks beside a training, by the key-value store alone.

The training has the process group to itself: collectives of another thread would mix with its own.
"""

from __future__ import annotations

from typing import Any

from .coordinator import Coordinator
from .presence import Presence
from .store import PREFIX
from .watchdog import Watchdog


class BackgroundCoordinator(Coordinator):
    """Coordinator of one thread of every rank; made by all inside :meth:`.Coordinator.watched`, closed by the threads.

    Values are of what JSON can hold. Threads wait for each other as long as all ranks live.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        super().__init__(coordinator.rank, coordinator.world_size, alone=coordinator.is_alone)
        if not self.is_alone:
            self._presence = Presence.in_default_group()
            self._held = self._presence.group_store()  # its server, if it is in this process, must live on
            self._watchdog = Watchdog(self._presence, f"{coordinator.meeting}/background", is_background=True)

    def _gather(self, value: Any) -> list[Any]:
        assert self._watchdog is not None
        # No key is deleted: the next save in the background begins when this one has ended on all ranks.
        keys = [f"{PREFIX}/background/{rank}" for rank in range(self.world_size)]
        self._presence.store.set(keys[self.rank], value)
        self._watchdog.meet()
        return self._presence.store.get_many(keys)

    def give_up(self, error: BaseException) -> None:
        """Tell the others that this rank will not come, because of `error`."""
        if self._watchdog is not None:
            self._watchdog.announce(error, comes=False)
            self.close()

    def close(self) -> None:
        """Leave; rank 0, whose process may hold the store, when the others have left."""
        if self._watchdog is not None:
            self._watchdog.close()
