"""Where ranks come together for a load or a save, or find that they do not: decided in one place, for all alike.

Each *occasion* (a load, a save) has rounds with numbers, and each round one decision in the store, which the first to
make it makes by a single ``compare_set``: *together*, by the last of all ranks to arrive; *apart*, by one that has
waited long enough; *failed*, by one that comes with an error. So no rank can believe to be alone while another
believes that it is there. A rank arrives in the first round that is not over: whatever happened before, those who
arrive next meet.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist

from ..errors import HfZeroStreamError, PeerError, SaveError
from .liveness import VERDICT_KEYS, Watch, peer_error
from .presence import PREFIX, Presence


__all__ = ["LOAD", "SAVE", "SHARED_LOAD", "Apart", "Occasion", "Round"]

logger = logging.getLogger(__name__)

SHARING_PATIENCE_S = 5.0
"""How long ranks wait for each other where they need not load together.

Ranks that do load together arrive within a second or two of each other; ranks that do not (one after the other, or
one alone) lose this much once.
"""

SHORT_PATIENCE_S = 0.5
"""The same, from the first time that not all came to the next that all do."""

FAILURE_HOLDS_S = 60.0
"""How long ranks that are late are told of an error; after that, they come for something else."""

_KEYS = ("count", "decision", "subject")
"""What a round has in the store, apart from verdicts."""

REMINDER_S = 30.0
"""After so long, a rank that waits says for whom."""


class Apart(Exception):  # noqa: N818 - not an error
    """Ranks do not come together where they need not; says why."""


@dataclass(frozen=True)
class Occasion:
    """What ranks come together for.

    Attributes:
        name: of its keys in the store.
        purpose: completes "ranks came to ...".
        advice: what to do if not all ranks come.
        patience_s: how long a rank waits for the others; None: as long as the process group's time-out.
        is_optional: whether ranks may go on without each other.
        error: what is raised if not all come in time.
    """

    name: str
    purpose: str
    advice: str
    patience_s: float | None = None
    is_optional: bool = False
    error: type[HfZeroStreamError] = PeerError


LOAD = Occasion("load", "load", "All ranks must make the same load.")
"""What no rank can do without the others."""

SAVE = Occasion(
    "save",
    "save",
    "All of them must call save_pretrained, because each writes its own part: take it out of "
    "`if accelerator.is_main_process:` and the like.",
    error=SaveError,
)
"""What no rank can do without the others; one that saves alone must hear of it, and not wait in a collective."""

SHARED_LOAD = Occasion("shared", "share the load", "", SHARING_PATIENCE_S, is_optional=True)
"""What each rank can do alone."""


class _Decision(NamedTuple):
    """What became of a round, "together", "apart" or "failed", and why; of a failure the rank, its error, and when."""

    what: str
    why: str = ""
    rank: int = -1
    kind: str = ""
    when: float = 0.0

    @property
    def is_fresh_failure(self) -> bool:
        return self.what == "failed" and abs(time.time() - self.when) < FAILURE_HOLDS_S


class Round:
    """This rank's arrival at an occasion, in the first round that is not over.

    Args:
        presence: this rank among the others.
        occasion: what for.
        subject: what this rank would share.
    """

    def __init__(self, presence: Presence, occasion: Occasion, subject: str = "") -> None:
        self._presence = presence
        self._occasion = occasion
        self._subject = subject
        number = presence.rounds.get(occasion.name, 0)
        while not self._arrives(number):
            number += 1
        presence.rounds[occasion.name] = number + 1

    def _arrives(self, number: int) -> bool:
        presence = self._presence
        self.key = f"{PREFIX}/{self._occasion.name}/{number}"
        """What all keys of this round begin with."""
        decision = self._decision()
        if decision is not None and not decision.is_fresh_failure:
            presence.last_was_apart |= self._occasion.is_optional
            return False
        if self._subject:  # before this rank is counted: the last one to be counted decides that all go together
            with presence.lock:
                first = presence.store.compare_set(f"{self.key}/subject", "", self._subject).decode()
            if first != self._subject:
                self._decide(_Decision("apart", f"ranks load different models ({first}; {self._subject})"))
        with presence.lock:
            count = presence.store.add(f"{self.key}/count", 1)
        self._is_last = count == presence.world_size
        return count <= presence.world_size  # more: keys of an earlier process group with the same store

    def call_off(self, error: BaseException) -> None:
        """This rank comes with an error, or will not come."""
        if self._occasion.is_optional:
            self._decide(_Decision("apart", f"rank {self._presence.rank} does not load"))
        else:
            self._decide(_Decision("failed", str(error), self._presence.rank, type(error).__name__, time.time()))

    def gather(self, watch: Watch) -> None:
        """Return once all ranks are here.

        Args:
            watch: over the ranks, by the name of :attr:`key`.

        Raises:
            Apart: ranks go on alone; only where they may.
            PeerError: a rank is dead, or has ended.
            HfZeroStreamError: a rank came with an error; or not all came in time.
        """
        try:
            decision = self._decide(_Decision("together")) if self._is_last else self._wait(watch)
        except (HfZeroStreamError, dist.DistError):
            raise
        except BaseException as error:  # Ctrl-C
            self.call_off(error)
            raise
        earlier = self._presence.passed[self._occasion.name]
        if self._occasion.is_optional:
            self._presence.last_was_apart = decision.what != "together"
        if decision.what == "together":
            self._forget(earlier)
        earlier.append(self.key)
        if decision.what == "failed":
            raise peer_error(decision.rank, decision.kind, decision.why)
        if decision.what == "apart":
            raise Apart(decision.why) if self._occasion.is_optional else self._occasion.error(decision.why)

    def _wait(self, watch: Watch) -> _Decision:
        began = time.monotonic()
        patience_s, remind_s, pause = self._patience_s(), REMINDER_S, 0.0001
        longest = max(0.02, self._presence.world_size / 10_000)  # all ranks together ask 10,000 times a second
        while True:
            decision = self._decision()
            if decision is not None:
                return decision
            if watch.verdict is not None and watch.verdict.is_dead:
                if self._occasion.is_optional and watch.verdict.kind == "Ended":
                    return self._decide(_Decision("apart", watch.verdict.message.partition(",")[0]))
                raise watch.verdict.error()
            waited_s = time.monotonic() - began
            if waited_s > patience_s:
                return self._decide(_Decision("apart", self._not_all(watch, patience_s)))
            if waited_s > remind_s:
                self._remind(watch.absent(), waited_s)
                remind_s *= 4
            time.sleep(pause)
            pause = min(longest, pause * 1.5)

    def _patience_s(self) -> float:
        if self._occasion.is_optional and self._presence.last_was_apart:
            return SHORT_PATIENCE_S
        return self._occasion.patience_s or self._presence.group_timeout_s

    def _remind(self, absent: list[int], waited_s: float) -> None:
        """Say who is waited for; one rank says it for all."""
        if all(rank in absent for rank in range(self._presence.rank)):
            logger.warning(f"Waiting since {waited_s:.0f} s for {_ranks(absent)} to {self._occasion.purpose}.")

    def _not_all(self, watch: Watch, patience_s: float) -> str:
        absent, all_of_them = watch.absent(), self._presence.world_size
        came = f"{all_of_them - len(absent)} of {all_of_them} ranks came to {self._occasion.purpose}"
        why = f"Only {came} within {patience_s:g} seconds; {_ranks(absent)} did not."
        return f"{why} {self._occasion.advice}".strip()

    def _decision(self) -> _Decision | None:
        with self._presence.lock:
            store = self._presence.store
            text = store.get(f"{self.key}/decision") if store.check([f"{self.key}/decision"]) else b""
        return _Decision(*json.loads(text)) if text else None

    def _decide(self, decision: _Decision) -> _Decision:
        """Make `decision`; returns the one that was made first."""
        with self._presence.lock:
            text = self._presence.store.compare_set(f"{self.key}/decision", "", json.dumps(decision))
        return _Decision(*json.loads(text))

    def _forget(self, earlier: list[str]) -> None:
        """All ranks are here, so none looks at earlier rounds any more. Where all were, one of them cleans up."""
        if self._is_last or len(earlier) > 1:
            with self._presence.lock:
                for key in [f"{of_round}/{name}" for of_round in earlier for name in (*_KEYS, *VERDICT_KEYS)]:
                    self._presence.store.delete_key(key)
        earlier.clear()


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
