"""How threads of all ranks agree beside a training, by the key-value store alone.

The training has the process group to itself: collectives of another thread would mix with its own. So these threads
count themselves in the store, as :meth:`.liveness.Watch.meet` does, and watch each other as in any load or save.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from ..errors import PeerError
from .contact import Verdict, pauses
from .coordinator import Coordinator
from .liveness import FAREWELL_S, KEYS, Watch
from .presence import Presence


class BackgroundMeeting:
    """One thread of every rank; made by all of them inside :meth:`Coordinator.watched`, closed by the threads.

    After an error nothing can be agreed on any more. A method that agrees raises on every rank: where the error came
    from this error, elsewhere :meth:`.contact.Verdict.error`.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self.rank, self.world_size = coordinator.rank, coordinator.world_size
        self.is_main = coordinator.is_main
        self._watch: Watch | None = None
        if not coordinator.is_alone:
            presence = Presence.in_default_group()
            self._presence = presence
            self._held = presence.group_store()
            self._key = f"{coordinator.meeting}/background"
            self._watch = Watch(presence, self._key, beats="background-beat")

    def check(self) -> None:
        """Raise what the next agreement will raise, if a rank is known to be dead or to have failed; free."""
        if self._watch is not None:
            self._watch.check()

    def agree(self, error: Exception | None = None) -> None:
        """Return on every rank if no rank brings an `error`, else raise on every rank; waits as long as all live."""
        watch = self._watch
        if watch is None:
            if error is not None:
                raise error
            return
        if error is not None and watch.verdict is None:
            watch.announce(error, comes=True)
        try:
            watch.meet(patience_s=float("inf"))
        except PeerError:
            if error is None:
                raise
        if error is not None:
            raise error
        failure = self._presence.store.get(f"{self._key}/failed")
        if failure is not None:
            raise Verdict(*failure).error()

    def gather(self, value: Any) -> list[Any] | None:
        """Every rank's `value`, of what JSON can hold, in order of rank: on rank 0; None elsewhere."""
        if self._watch is None:
            return [value]
        store = self._presence.store
        store.set(self._key_of(self.rank), value)
        self.agree()
        return [store.get(self._key_of(rank)) for rank in range(self.world_size)] if self.is_main else None

    def broadcast(self, value: Any) -> Any:
        """Rank 0's `value`, of what JSON can hold, on every rank."""
        if self._watch is None:
            return value
        store, key = self._presence.store, f"{self._key}/value"
        if self.is_main:
            store.set(key, value)
        self.agree()
        return store.get(key)

    def give_up(self, error: BaseException) -> None:
        """Tell the others that this rank will not come, because of `error`."""
        if self._watch is not None:
            self._watch.announce(error, comes=False)
            self._watch.close()

    def close(self) -> None:
        """Leave. Rank 0, whose process may hold the store, stays until the others have read what it told them."""
        if self._watch is None:
            return
        knows_dead = self._watch.knows_dead
        self._watch.close()  # before keys are deleted that it reads
        if knows_dead:
            return
        with suppress(PeerError):
            store, key = self._presence.store, f"{self._key}/left"
            count = store.add(key, 1)
            for waited_s in pauses(0.02) if self.is_main else ():
                if count >= self.world_size or waited_s > FAREWELL_S:
                    break
                count = store.add(key, 0)
            if self.is_main:
                names = [f"{self._key}/{name}" for name in (*KEYS, "value", "left")]
                store.delete([*names, *map(self._key_of, range(self.world_size))])

    def _key_of(self, rank: int) -> str:
        return f"{self._key}/{rank}"
