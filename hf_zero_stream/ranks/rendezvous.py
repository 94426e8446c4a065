"""Rendezvous of ranks for a load or a save. One decision, the same for all ranks, says whether they come together.

Rendezvous of each *kind* (a load, a save) are numbered. Each ends with one decision in the store: the last rank to
arrive decides *together*; a rank that has waited in vain or long enough, *apart*, which is an error on all; one that
comes with an error, *failed*. The store keeps the first decision only. A rank arrives at the first rendezvous that is
not decided: whatever happened before, the next ranks meet.

The first rank to arrive looks for the absent ones on behalf of all. The ranks of a program begin the same collectives
in the same order. So one that has begun more than this rank is past the load, or has never been on the way there: it
waits in a barrier for the rank that loads alone (``main_process_first``, ``if rank == 0``), or trains. That is a
proof, which time is not: a slow rank has begun no more. torch counts them itself.

A rank that waits for this one by other means than collectives (a file, a queue) shows nothing. So waiting has a limit.

Some calls a rank may carry out alone, because it was given what the others hold: a save of gathered values. It does
not wait, and it cannot know whether the others make the call too. So it leaves word at the rendezvous
(:func:`pass_by`), and goes on; a rank that comes there with the same call, at the same place in the program, is done
with it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import HfZeroStreamError, PeerError, SaveError
from .presence import Presence, default_group_name
from .store import PREFIX, Decision, Verdict
from .watchdog import KEYS, STUCK_S, Watchdog


logger = logging.getLogger(__name__)

STRANGER_S = 60.0
"""After this time a rank that has made no contact is no longer taken for a slow one: others say what it may mean."""

STRANGERS_END_S = 600.0
"""After this time without contact to a rank, the others give up."""

GRACE_S = 10.0
"""Time for which ranks wait longer than the first one to come, which decides for all."""

FAILURE_HOLDS_S = 60.0
"""Time for which an error is reported to late ranks; after that, a rank has come for something else."""

ASKED = 16
"""The most ranks that are asked, or looked at, at once; one that has gone on is enough."""

_KEYS = ("count", "decision", "subject", "call", *KEYS)
"""The keys that a rendezvous and its meeting may write into the store."""


class DoneAlone(Exception):  # noqa: N818 - not an error
    """Raised if another rank carries out this very call alone, with what it was given; see :func:`pass_by`."""


@dataclass(frozen=True)
class MeetingKind:
    """Kind of operation that ranks come together for."""

    name: str
    """Completes "ranks came to ..."; part of its keys in the store."""
    advice: str
    patience_s: float | None = None
    """Time for which a rank waits for the others; None: as long as the process group's time-out."""
    reminder_s: float = 30.0
    """After which time the first rank to come says for whom it waits."""
    error: type[HfZeroStreamError] = PeerError
    """Raised if not all ranks come in time; its message ends with `advice`."""
    call: str | None = None
    """What tells this call from others at the same place in a program; None: no rank carries such a call out alone."""


LOAD = MeetingKind("load", "All ranks must make the same load.")
"""A load whose ranks read for each other, or each its own part."""

SAVE = MeetingKind(
    "save",
    "All of them must call save_pretrained, because each writes its own part: take it out of "
    "`if accelerator.is_main_process:` and the like.",
    error=SaveError,
    call="",
)
"""A save; a rank that saves alone gets an error instead of waiting forever."""


class Rendezvous:
    """This rank's arrival at the first rendezvous of a `kind` that is not over; `subject`: the same on all ranks.

    With an `error`, this rank has failed before, and calls the rendezvous off (see :meth:`call_off`).
    """

    def __init__(
        self, presence: Presence, kind: MeetingKind, subject: str = "", *, error: BaseException | None = None
    ) -> None:
        self._presence, self._store = presence, presence.store
        self._kind = kind
        self.doing = f"{kind.name} ({subject})" if subject else kind.name
        """Completes "ranks came to ..."."""
        self._ahead: dict[int, float] = {}
        """The time at which a rank was seen ahead first."""
        self._is_first = self._is_last = self._is_done_alone = False
        number = presence.next_numbers[kind.name]
        while not self._arrive(f"{PREFIX}/{kind.name}/{number}", subject, error):
            presence.passed[kind.name].append(self.key)
            number += 1
        presence.next_numbers[kind.name] = number + 1

    def _arrive(self, key: str, subject: str, error: BaseException | None) -> bool:
        """Whether the rendezvous is not over, so that this rank counts in it; its keys begin with `key`."""
        self.key = key
        kind, presence = self._kind, self._presence
        decision = self._decision()
        if kind.call is not None and (decision is None or decision.outcome == "alone"):
            mine = _call(presence, kind)
            how, call = self._store.set_first(f"{key}/call", ("together", mine))
            if how == "alone" or decision is not None:
                self._is_done_alone = call == mine  # else some ranks alone made that call, and this one comes later
                return self._is_done_alone
        elif decision is not None and not _holds(decision):
            return False
        if subject:  # before this rank is counted: the last one to be counted decides that all go together
            first = self._store.set_first(f"{key}/subject", subject)
            if first != subject:
                # Those that come a moment later need not wait at a rendezvous of their own.
                why = f"Ranks came to {kind.name} with different things ({first}; {subject}). {kind.advice}"
                self._decide(Decision("apart", why, when=time.time()))
        if error is not None:  # likewise: another rank may be counted right after this one
            self.call_off(error)
        count = self._store.add(f"{key}/count", 1)
        self._is_first, self._is_last = count == 1, count == presence.world_size
        return count <= presence.world_size  # more: keys of an earlier process group with the same store

    def call_off(self, error: BaseException) -> None:
        """Decide that the ranks do not come together, because this one fails with `error`."""
        failure = Verdict.of_failure(self._presence.rank, error)
        self._decide(Decision("failed", when=time.time(), failure=failure))

    def gather(self, watchdog: Watchdog) -> None:
        """Return once all ranks are here; `watchdog` is that of the meeting with this :attr:`key`.

        Raises:
            DoneAlone: another rank carries this call out.
            HfZeroStreamError: a rank is dead, or came with an error, or not all came in time.
        """
        if self._is_done_alone:
            self.leave()
            raise DoneAlone
        try:
            decision = self._decide(Decision("together")) if self._is_last else self._wait(watchdog)
        except HfZeroStreamError:
            raise
        except BaseException as error:  # Ctrl-C
            self.call_off(error)
            raise
        kind, passed = self._kind, self._presence.passed[self._kind.name]
        if decision.outcome == "together":
            if self._is_last:  # no rank looks at earlier rendezvous any more
                self._store.delete(f"{key}/{name}" for key in passed for name in _KEYS)
            passed.clear()
            return
        passed.append(self.key)
        if decision.outcome == "alone":  # only where ranks wait for this very call
            raise DoneAlone
        if decision.outcome == "failed":
            raise Verdict(*decision.failure).error()
        raise kind.error(decision.why)

    def leave(self) -> None:
        """The meeting is over on this rank. Its keys stay until then: another one may begin meanwhile, and end."""
        self._presence.passed[self._kind.name].append(self.key)

    def _wait(self, watchdog: Watchdog) -> Decision:
        """Wait for a decision. Only the first rank to come looks at the absent ones, ever more seldom."""
        kind, presence = self._kind, self._presence
        limit_s, look_s, reminder_s = self._limit_s(()) + GRACE_S * (not self._is_first), 0.25, kind.reminder_s
        for waited_s in presence.polling():
            decision = self._decision()
            if decision is not None:
                return decision
            verdict = watchdog.verdict
            if verdict is not None and verdict.kind == "Ended":  # by itself, somewhere else in the program
                why = verdict.message.partition(",")[0]
                why = f"{why[0].upper()}{why[1:]}, so it does not come here. {kind.advice}"
                return self._decide(Decision("apart", why))
            watchdog.check(dead_only=True)
            if waited_s > limit_s:
                return self._decide(Decision("apart", self._too_late([*watchdog.absent()], limit_s)))
            if not self._is_first or waited_s < look_s:
                continue
            look_s, stand = waited_s + max(0.25, presence.world_size / 1000), watchdog.absent()
            absent = [*stand]
            limit_s = self._limit_s(absent)
            watchdog.also_watched = absent[:ASKED]
            watchdog.end_deadlock(waited_s, stand)
            if why := self._ahead_of_this(absent):
                return self._decide(Decision("apart", f"{why} {kind.advice}"))
            if waited_s > reminder_s:
                strangers = self._strangers(absent) if waited_s > STRANGER_S else ""
                text = f"Waiting since {waited_s:.0f} s for {_ranks(absent)} to {kind.name}. {strangers}"
                logger.warning(text + kind.advice)
                reminder_s *= 2
        raise AssertionError("polling does not end")

    def _too_late(self, absent: Sequence[int], limit_s: float) -> str:
        world_size, name = self._presence.world_size, self._kind.name
        came = f"{world_size - len(absent)} of {world_size} ranks came to {name}"
        why = f"Only {came} within {limit_s:g} seconds; {_ranks(absent)} did not. {self._strangers(absent)}"
        return f"{why}{self._kind.advice}".strip()

    def _ahead_of_this(self, absent: Sequence[int]) -> str:
        """The sentence on one of these ranks that has been ahead of this one for a while; "" if none has.

        In the group of all ranks: there they begin nothing but collectives of all.
        """
        presence, now, group = self._presence, time.monotonic(), default_group_name()
        asked = [*presence.locations_of(absent[:ASKED])]
        meeting, begun = presence.progress()
        mine = begun.get(group, 0)
        for rank, (common, theirs) in zip(asked, presence.ask(asked), strict=True):
            # Counts begin where both were together last.
            if common == meeting and theirs.get(group, 0) > mine:
                if now - self._ahead.setdefault(rank, now) >= STUCK_S:
                    return f"Rank {rank} has begun a collective without this rank, so it does not come here now."
            else:
                self._ahead.pop(rank, None)
        return ""

    def _limit_s(self, absent: Sequence[int]) -> float:
        """The time for which this rank waits, if these ranks are absent."""
        patience_s = self._kind.patience_s or self._presence.group_timeout_s
        return min(patience_s, STRANGERS_END_S) if self._presence.strangers(absent) else patience_s

    def _strangers(self, absent: Sequence[int]) -> str:
        """A sentence on those of these ranks that have made no contact, if there are any."""
        strangers = self._presence.strangers(absent)
        if not strangers:
            return ""
        has = "has" if len(strangers) == 1 else "have"
        return (
            f"{_ranks(strangers).capitalize()} {has} not entered streaming(): started in another way than this one, "
            "perhaps without hf_zero_stream.run? Or busy before it: enter streaming() first. "
        )

    def _decision(self) -> Decision | None:
        written = self._store.get(f"{self.key}/decision")
        return Decision(*written) if written else None

    def _decide(self, decision: Decision) -> Decision:
        """Make `decision`; returns the one that some rank made first."""
        return Decision(*self._store.set_first(f"{self.key}/decision", decision))


def pass_by(presence: Presence, kind: MeetingKind) -> None:
    """Have ranks that come to the call of this `kind` at this place in the program know that this rank does it alone.

    Returns at once. If no other rank makes the call, nobody takes notice: they pass by, too.
    """
    store, mine, number = presence.store, _call(presence, kind), presence.next_numbers[kind.name]
    while True:
        key = f"{PREFIX}/{kind.name}/{number}"
        written = store.get(f"{key}/decision")
        if written and _holds(Decision(*written)):
            return  # an error, which this rank will hear of when it comes to what the others came to
        how, call = ("alone", "") if written else store.set_first(f"{key}/call", ("alone", mine))
        if how == "together" and call != mine:
            return  # ranks wait for something that comes later
        presence.passed[kind.name].append(key)
        number = presence.next_numbers[kind.name] = number + 1
        if how == "together":
            store.set_first(f"{key}/decision", Decision("alone"))
        if call == mine:
            return


def _call(presence: Presence, kind: MeetingKind) -> str:
    """The call of this `kind` that this rank makes now, as all ranks name it."""
    meeting, begun = presence.progress()
    return f"{meeting} {begun.get(default_group_name(), 0)} {kind.call}"


def _holds(decision: Decision) -> bool:
    """Whether a decision holds for a rank that comes now."""
    return abs(time.time() - decision.when) < FAILURE_HOLDS_S


class CollectiveLock:
    """Held by a thread whose load or save uses the process group; within it, that thread may take it again.

    Another thread may give it back, which a lock of Python's does not allow: a pass of a weight stream goes on, and
    ends, in the thread that asks for the next bucket.
    """

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._owner = self._depth = 0

    def acquire(self) -> None:
        thread = threading.get_ident()
        with self._free:
            self._free.wait_for(lambda: self._owner in (0, thread))
            self._owner, self._depth = thread, self._depth + 1

    def release(self) -> None:
        with self._free:
            self._depth -= 1
            if not self._depth:
                self._owner = 0
                self._free.notify_all()


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
