"""What ranks write into the store to end a round or a meeting for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from .. import errors
from ..errors import HfZeroStreamError, PeerError


class Decision(NamedTuple):
    """How a round ended: ``"together"``, ``"apart"`` or, for a :class:`Verdict`'s fields, ``"failed"``.

    `when` says that it holds for ranks that come a little later, too; 0: it does not.
    """

    outcome: str
    why: str = ""
    when: float = 0.0
    failure: Sequence[Any] = ()
    given_up: Sequence[tuple[int, bool]] = ()
    """Ranks that were waited for as long as their time was, and whether they had made contact."""


class Verdict(NamedTuple):
    """Which rank died or failed, with the class and text of its error; written into the store."""

    rank: int
    """-1 if it is no rank: the store is lost, or ranks wait for each other."""
    is_dead: bool
    """True: the rank will never reach the next agreement. False: it will, and brings its error."""
    kind: str
    """``"Ended"`` if its process ended by itself."""
    message: str

    @classmethod
    def of_failure(cls, rank: int, error: BaseException) -> Verdict:
        return cls(rank, False, type(error).__name__, str(error))

    @classmethod
    def of_death(cls, rank: int, seen: str, kind: str = "PeerError") -> Verdict:
        text = f"rank {rank} {seen}, so this rank gives up too. Look into that rank's log, and start all ranks anew."
        return cls(rank, True, kind, text)

    def error(self) -> HfZeroStreamError:
        """What the other ranks raise; of the same class as the error of a rank that lives, if that is ours."""
        if self.is_dead:
            return PeerError(self.message)
        if self.kind in errors.__all__:
            return getattr(errors, self.kind)(f"rank {self.rank}: {self.message}")
        return PeerError(f"rank {self.rank} failed, so this rank gives up too: {self.kind}: {self.message}")
