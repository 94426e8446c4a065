"""Where ranks come together for a load or a save. One decision, the same for all ranks, says whether they do.

Each *occasion* (a load, a save) has numbered rounds. A round ends with one decision in the store: the last rank to
arrive decides *together*; a rank that has waited long enough, *apart*; one that comes with an error, *failed*. The
store keeps the first decision only, so that all ranks believe the same. A rank arrives in the first round that is not
decided: whatever happened before, the next ranks meet.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import HfZeroStreamError, PeerError, SaveError
from .liveness import KEYS, Verdict, Watch
from .presence import Presence
from .store import PREFIX


__all__ = ["LOAD", "SAVE", "SHARED_LOAD", "Apart", "Occasion", "Round"]

logger = logging.getLogger(__name__)

SHARING_PATIENCE_S = 5.0
"""How long ranks wait for each other if they need not load together. Ranks that do load together come within 2 s."""

SHORT_PATIENCE_S = 0.5
"""The same, after a round to which not all ranks came, until all come again."""

FAILURE_HOLDS_S = 60.0
"""How long an error is reported to late ranks; after that, a rank has come for something else."""

_KEYS = ("count", "decision", "subject", "speaker", *KEYS)
"""The keys that a round may write into the store."""


class Apart(Exception):  # noqa: N818 - not an error
    """Raised if ranks do not come together, and need not; its text is the reason.

    Attributes:
        says_it: whether this rank tells the user, for all ranks of its round.
    """

    def __init__(self, why: str, *, says_it: bool = True) -> None:
        super().__init__(why)
        self.says_it = says_it


@dataclass(frozen=True)
class Occasion:
    """What ranks come together for."""

    name: str
    """Completes "ranks came to ..."; part of its keys in the store."""
    advice: str
    patience_s: float | None = None
    """How long a rank waits for the others; None: as long as the process group's time-out."""
    is_optional: bool = False
    """Whether ranks may go on without each other."""
    error: type[HfZeroStreamError] = PeerError
    """Raised if not all ranks come in time, unless `is_optional`; its message ends with `advice`."""


LOAD = Occasion("load", "All ranks must make the same load.")
"""A load under ZeRO-3."""

SAVE = Occasion(
    "save",
    "All of them must call save_pretrained, because each writes its own part: take it out of "
    "`if accelerator.is_main_process:` and the like.",
    error=SaveError,
)
"""A save; a rank that saves alone gets an error instead of waiting forever."""

SHARED_LOAD = Occasion("share the load", "", SHARING_PATIENCE_S, is_optional=True)
"""A load outside ZeRO-3, which ranks share if all come."""


class _Decision(NamedTuple):
    """How a round ended: ``"together"``, ``"apart"`` or, for a :class:`Verdict`'s fields, ``"failed"``.

    `when` says that it holds for ranks that come a little later, too; 0: it does not.
    """

    outcome: str
    why: str = ""
    when: float = 0.0
    failure: Sequence[Any] = ()


class Round:
    """This rank's arrival at an occasion, in the first round that is not over; `subject`: what it would load alone.

    With an `error`, this rank has failed before, and calls the round off (see :meth:`call_off`).
    """

    def __init__(
        self, presence: Presence, occasion: Occasion, subject: str = "", *, error: BaseException | None = None
    ) -> None:
        self._presence = presence
        self._error = error
        self._store = presence.store
        self._occasion = occasion
        number = presence.rounds[occasion.name]
        while not self._arrive(f"{PREFIX}/{occasion.name}/{number}", subject):
            number += 1
        presence.rounds[occasion.name] = number + 1

    def _arrive(self, key: str, subject: str) -> bool:
        """Whether the round is not over, so that this rank counts in it; its keys begin with `key`."""
        self.key = key
        decision = self._decision()
        if decision is not None:
            holds_s = SHARING_PATIENCE_S if self._occasion.is_optional else FAILURE_HOLDS_S
            if abs(time.time() - decision.when) >= holds_s:
                self._presence.last_was_apart |= self._occasion.is_optional
                return False
        if subject:  # before this rank is counted: the last one to be counted decides that all go together
            first = self._store.set_first(f"{key}/subject", subject)
            if first != subject:
                # Those that come a moment later need not wait in a round of their own.
                why = f"ranks load different models ({first}; {subject})"
                self._decide(_Decision("apart", why, when=time.time()))
        if self._error is not None:  # likewise: another rank may be counted right after this one
            self.call_off(self._error)
        count = self._store.add(f"{key}/count", 1)
        self._is_last = count == self._presence.world_size
        return count <= self._presence.world_size  # more: keys of an earlier process group with the same store

    def call_off(self, error: BaseException) -> None:
        """Decide that the ranks do not come together, because this one fails with `error`."""
        rank = self._presence.rank
        if self._occasion.is_optional:
            self._decide(_Decision("apart", f"rank {rank} does not load"))
        else:
            self._decide(_Decision("failed", when=time.time(), failure=Verdict.of_failure(rank, error)))

    def gather(self, watch: Watch) -> None:
        """Return once all ranks are here; `watch` is that of the meeting with this :attr:`key`.

        Raises:
            Apart: ranks go on alone, where they may.
            HfZeroStreamError: a rank is dead, or came with an error, or not all came in time.
        """
        try:
            decision = self._decide(_Decision("together")) if self._is_last else self._wait(watch)
        except HfZeroStreamError:
            raise
        except BaseException as error:  # Ctrl-C
            self.call_off(error)
            raise
        is_optional, passed = self._occasion.is_optional, self._presence.passed[self._occasion.name]
        if is_optional:
            self._presence.last_was_apart = decision.outcome != "together"
        if decision.outcome == "together":
            # No rank looks at earlier rounds any more. The last rank to come deletes their keys; if ranks were missing
            # in rounds before, perhaps this last one, each rank deletes those that it has passed.
            if self._is_last or len(passed) > 1:
                self._store.delete(f"{key}/{name}" for key in passed for name in _KEYS)
            passed.clear()
        passed.append(self.key)
        if decision.outcome == "failed":
            raise Verdict(*decision.failure).error()
        if decision.outcome == "apart":
            if not is_optional:
                raise self._occasion.error(decision.why)
            rank = self._presence.rank
            raise Apart(decision.why, says_it=self._store.set_first(f"{self.key}/speaker", rank) == rank)

    def _wait(self, watch: Watch) -> _Decision:
        patience_s = self._occasion.patience_s or self._presence.group_timeout_s
        if self._occasion.is_optional and self._presence.last_was_apart:
            patience_s = SHORT_PATIENCE_S
        reminder_s = 30.0  # how long this rank waits before it logs which ranks are absent
        for waited_s in self._presence.polling():
            decision = self._decision()
            if decision is not None:
                return decision
            verdict = watch.verdict
            if self._occasion.is_optional and verdict is not None and verdict.kind == "Ended":
                return self._decide(_Decision("apart", verdict.message.partition(",")[0]))
            watch.check(dead_only=True)
            if waited_s > patience_s:
                break
            if waited_s > reminder_s:
                absent = watch.absent()
                if set(absent).issuperset(range(self._presence.rank)):  # the first rank that is here says it for all
                    logger.warning(f"Waiting since {waited_s:.0f} s for {_ranks(absent)} to {self._occasion.name}.")
                reminder_s *= 4
        absent, world_size = watch.absent(), self._presence.world_size
        came = f"{world_size - len(absent)} of {world_size} ranks came to {self._occasion.name}"
        why = f"Only {came} within {patience_s:g} seconds; {_ranks(absent)} did not. {self._occasion.advice}"
        return self._decide(_Decision("apart", why.strip()))

    def _decision(self) -> _Decision | None:
        written = self._store.get(f"{self.key}/decision")
        return _Decision(*written) if written else None

    def _decide(self, decision: _Decision) -> _Decision:
        """Make `decision`; returns the one that some rank made first."""
        return _Decision(*self._store.set_first(f"{self.key}/decision", decision))


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
