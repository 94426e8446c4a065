"""Rendezvous of ranks for a load or a save. One decision, the same for all ranks, says whether they come together.

Rendezvous of each *kind* (a load, a save) are numbered. Each ends with one decision in the store: the last rank to
arrive decides *together*; a rank that has waited in vain or long enough, *apart*; one that comes with an error,
*failed*. The store keeps the first decision only. A rank arrives at the first rendezvous that is not decided: whatever
happened before, the next ranks meet.

The first rank to arrive looks for the absent ones on behalf of all. If ranks need not load together, it waits as long
as all of them may be on their way. The ranks of a program begin the same collectives in the same order. So one that
has begun more than this rank is past the load, or has never been on the way there: it waits in a barrier for the rank
that loads alone (``main_process_first``, ``if rank == 0``), or trains. That is a proof, which time is not: a slow rank
has begun no more. torch counts them itself, in every group.

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
from .transport import PREFIX, Decision, Verdict
from .watchdog import KEYS, STUCK_S, Watchdog


logger = logging.getLogger(__name__)

SHARING_PATIENCE_S = 300.0
"""Time for which ranks that need not load together wait for one that lives and may be on its way."""

SHORT_PATIENCE_S = 0.5
"""The same after ranks were waited for in vain, until all come together again; and for ranks that have made the same
load alone before this one came: they may never come."""

STRANGER_S = 60.0
"""After this time a rank that has made no contact is no longer taken for a slow one: ranks that need not load together
go on alone, and others say what it may mean."""

STRANGERS_END_S = 600.0
"""After this time without contact to a rank, ranks that must load or save together give up."""

DIFFERENT_HOLDS_S = 5.0
"""Time for which a decision not to load together because of different things holds for those that come later."""

FAILURE_HOLDS_S = 60.0
"""Time for which an error is reported to late ranks; after that, a rank has come for something else."""

CERTAIN_S = 1.0
"""Time for which a rank must be ahead. Threads that communicate beside the main one may be, for a moment."""

ASKED = 16
"""The most ranks that are asked, or looked at, at once; one that has gone on is enough."""

_KEYS = ("count", "decision", "subject", "call", "speaker", *KEYS)
"""The keys that a rendezvous and its meeting may write into the store."""


class NoJointLoad(Exception):  # noqa: N818 - not an error
    """Raised if ranks do not come together, and need not; its text is the reason.

    Attributes:
        says_it: whether this rank tells the user, for all ranks of its rendezvous.
    """

    def __init__(self, why: str, *, says_it: bool = True) -> None:
        super().__init__(why)
        self.says_it = says_it


class DoneAlone(Exception):  # noqa: N818 - not an error
    """Raised if another rank carries out this very call alone, with what it was given; see :func:`pass_by`."""


@dataclass(frozen=True)
class MeetingKind:
    """Kind of operation that ranks come together for."""

    name: str
    """Completes "ranks came to ..."; part of its keys in the store."""
    advice: str
    patience_s: float | None = None
    """Time for which a rank waits for the others; None: as long as the process group's time-out, or if `is_optional`,
    :data:`SHARING_PATIENCE_S`."""
    reminder_s: float = 30.0
    """After which time the first rank to come says for whom it waits."""
    is_optional: bool = False
    """Whether ranks may go on without each other."""
    error: type[HfZeroStreamError] = PeerError
    """Raised if not all ranks come in time, unless `is_optional`; its message ends with `advice`."""
    call: str | None = None
    """What tells this call from others at the same place in a program; None: no rank carries such a call out alone."""


LOAD = MeetingKind("load", "All ranks must make the same load.")
"""A load under ZeRO-3."""

SAVE = MeetingKind(
    "save",
    "All of them must call save_pretrained, because each writes its own part: take it out of "
    "`if accelerator.is_main_process:` and the like.",
    error=SaveError,
    call="",
)
"""A save; a rank that saves alone gets an error instead of waiting forever."""

SHARED_LOAD = MeetingKind(
    "share the load",
    "If they are not going to make the same load, share_reads=False avoids the wait.",
    reminder_s=10.0,
    is_optional=True,
)
"""A load outside ZeRO-3, which ranks share if all come."""


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
        self._is_late = False
        """Whether others have made the same load alone before."""
        self._ahead: dict[int, tuple[float, dict[str, int]]] = {}
        """The time at which a rank was seen ahead first, and the collectives that it had begun by then."""
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
        elif decision is not None and not _holds(decision, kind):
            self._is_late = bool(subject) and self._store.get(f"{key}/subject") == subject
            self._remember(decision)
            return False
        if subject:  # before this rank is counted: the last one to be counted decides that all go together
            first = self._store.set_first(f"{key}/subject", subject)
            if first != subject:
                # Those that come a moment later need not wait at a rendezvous of their own.
                why = f"ranks came to {kind.name} with different things ({first}; {subject})"
                if not kind.is_optional:
                    why = f"{why[0].upper()}{why[1:]}. {kind.advice}"
                self._decide(Decision("apart", why, when=time.time()))
        if error is not None:  # likewise: another rank may be counted right after this one
            self.call_off(error)
        count = self._store.add(f"{key}/count", 1)
        self._is_first, self._is_last = count == 1, count == presence.world_size
        return count <= presence.world_size  # more: keys of an earlier process group with the same store

    def call_off(self, error: BaseException) -> None:
        """Decide that the ranks do not come together, because this one fails with `error`."""
        rank = self._presence.rank
        if self._kind.is_optional:
            self._decide(Decision("apart", f"rank {rank} does not load"))
        else:
            self._decide(Decision("failed", when=time.time(), failure=Verdict.of_failure(rank, error)))

    def gather(self, watchdog: Watchdog) -> None:
        """Return once all ranks are here; `watchdog` is that of the meeting with this :attr:`key`.

        Raises:
            NoJointLoad: ranks go on alone, where they may.
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
        self._remember(decision)
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
        if not kind.is_optional:
            raise kind.error(decision.why)
        rank = self._presence.rank
        raise NoJointLoad(decision.why, says_it=self._store.set_first(f"{self.key}/speaker", rank) == rank)

    def leave(self) -> None:
        """The meeting is over on this rank. Its keys stay until then: another one may begin meanwhile, and end."""
        self._presence.passed[self._kind.name].append(self.key)

    def _wait(self, watchdog: Watchdog) -> Decision:
        kind, presence = self._kind, self._presence
        limit_s, looked_s, reminder_s = self._limit_s(()), 0.0, kind.reminder_s
        for waited_s in presence.polling():
            decision = self._decision()
            if decision is not None:
                return decision
            verdict = watchdog.verdict
            if verdict is not None and verdict.kind == "Ended":  # by itself, somewhere else in the program
                why = verdict.message.partition(",")[0]
                if not kind.is_optional:
                    why = f"{why[0].upper()}{why[1:]}, so it does not come here. {kind.advice}"
                return self._decide(Decision("apart", why))
            watchdog.check(dead_only=True)
            if waited_s > limit_s:
                break
            if not self._is_first or waited_s - looked_s < max(0.25, presence.world_size / 1000):
                continue
            looked_s, absent = waited_s, watchdog.absent()
            limit_s = self._limit_s(absent)
            watchdog.also_watched = absent[:ASKED]
            why = self._why_in_vain(absent) if kind.is_optional else ""
            if why:
                return self._decide(Decision("apart", why))
            if not kind.is_optional:
                watchdog.end_deadlock(waited_s, absent)
                if why := self._ahead_of_this(absent, STUCK_S, default_group_only=True):
                    return self._decide(Decision("apart", f"{why[0].upper()}{why[1:]}. {kind.advice}"))
            if waited_s > reminder_s:
                strangers = self._strangers(absent) if kind.is_optional or waited_s > STRANGER_S else ""
                text = f"Waiting since {waited_s:.0f} s for {_ranks(absent)} to {kind.name}. {strangers}"
                logger.warning(text + kind.advice)
                reminder_s *= 2
        absent, world_size = watchdog.absent(), presence.world_size
        came = f"{world_size - len(absent)} of {world_size} ranks came to {kind.name}"
        why = f"Only {came} within {limit_s:g} seconds; {_ranks(absent)} did not. {self._strangers(absent)}"
        gave_up = presence.left_together[0] if kind.is_optional and not self._is_late else None
        return self._decide(Decision("apart", f"{why}{kind.advice}".strip(), gave_up=gave_up))

    def _why_in_vain(self, absent: Sequence[int]) -> str:
        """The reason why one of these ranks does not come; "" as long as all may be on their way."""
        presence = self._presence
        for rank, where in zip(absent, presence.whereabouts_of(absent), strict=True):
            if not presence.has_come(where):
                return f"rank {rank} waits for this rank in another load or save"
        return self._ahead_of_this(absent, CERTAIN_S)

    def _ahead_of_this(self, absent: Sequence[int], certain_s: float, *, default_group_only: bool = False) -> str:
        """The sentence on one of these ranks that has been ahead of this one for a while; "" if none has.

        `default_group_only`: there ranks begin nothing but collectives of all; a mistake would be an error for all.
        """
        presence, now = self._presence, time.monotonic()
        asked = [rank for rank in absent if presence.has_contact(rank)][:ASKED]
        meeting, mine = presence.progress()
        if default_group_only:
            mine = {name: count for name, count in mine.items() if name == default_group_name()}
        for rank, (common, theirs) in zip(asked, presence.ask(asked), strict=True):
            # Counts begin where both were together last.
            if common == meeting and rank not in self._ahead and _is_ahead(theirs, mine):
                self._ahead[rank] = now, theirs
        for rank, (since, theirs) in list(self._ahead.items()):
            if rank not in absent or not _is_ahead(theirs, mine):
                del self._ahead[rank]
            elif now - since >= certain_s:
                return f"rank {rank} has begun a collective without this rank, so it does not come here now"
        return ""

    def _limit_s(self, absent: Sequence[int]) -> float:
        """The time for which this rank waits, if these ranks are absent."""
        kind, presence = self._kind, self._presence
        if kind.is_optional and (self._is_late or presence.gave_up == presence.left_together[0]):
            return SHORT_PATIENCE_S
        patience_s = kind.patience_s or (SHARING_PATIENCE_S if kind.is_optional else presence.group_timeout_s)
        if not all(map(presence.has_contact, absent)):
            patience_s = min(patience_s, STRANGER_S if kind.is_optional else STRANGERS_END_S)
        return patience_s

    def _strangers(self, absent: Sequence[int]) -> str:
        """A sentence on those of these ranks that have made no contact, if there are any."""
        strangers = [rank for rank in absent if not self._presence.has_contact(rank)]
        if not strangers:
            return ""
        has = "has" if len(strangers) == 1 else "have"
        return (
            f"{_ranks(strangers).capitalize()} {has} not entered streaming(): started in another way than this one, "
            "perhaps without hf_zero_stream.run? Or busy before it: enter streaming() first. "
        )

    def _remember(self, decision: Decision) -> None:
        if decision.gave_up is not None:
            self._presence.gave_up = decision.gave_up

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
        if written and _holds(Decision(*written), kind):
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


def _holds(decision: Decision, kind: MeetingKind) -> bool:
    """Whether a decision holds for a rank that comes now."""
    return abs(time.time() - decision.when) < (DIFFERENT_HOLDS_S if kind.is_optional else FAILURE_HOLDS_S)


class CollectiveLock:
    """Held by a thread whose load or save uses the process group; within it, that thread may take it again.

    Another thread may give it back, which a lock of Python's does not allow: a pass of a weight stream goes on, and
    ends, in the thread that asks for the next bucket.
    """

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._owner = self._depth = 0

    def acquire(self, *, blocking: bool) -> bool:
        thread = threading.get_ident()
        with self._free:
            if not self._free.wait_for(lambda: self._owner in (0, thread), None if blocking else 0.0):
                return False
            self._owner, self._depth = thread, self._depth + 1
            return True

    def release(self) -> None:
        with self._free:
            self._depth -= 1
            if not self._depth:
                self._owner = 0
                self._free.notify_all()


def _is_ahead(theirs: dict[str, int], mine: dict[str, int]) -> bool:
    """Whether more has been begun there, in any group that both know."""
    return any(count > mine[group] for group, count in theirs.items() if group in mine)


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
