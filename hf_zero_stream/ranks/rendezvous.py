"""Where ranks come together for a load or a save. One decision, the same for all ranks, says whether they do.

Each *occasion* (a load, a save) has numbered rounds. A round ends with one decision in the store: the last rank to
arrive decides *together*; a rank that has waited in vain or long enough, *apart*; one that comes with an error,
*failed*. The store keeps the first decision only, so that all ranks believe the same. A rank arrives in the first
round that is not decided: whatever happened before, the next ranks meet.

The first rank to arrive looks for the absent ones on behalf of all. If ranks need not load together, it waits as long
as all of them may be on their way (see :class:`Inquiry`), up to a limit.

The ranks of a program begin the same collectives in the same order. So a rank that has begun one to which this rank
has not come is past the load, or has never been on the way there: it waits in a barrier for the rank that loads alone
(``main_process_first``, ``if rank == 0``), or trains. That is a proof, which time is not: a slow rank, however late,
has begun no more collectives than this one. torch counts them itself, in every group. So nothing has to be hooked in,
and neither the library that begins a collective matters nor whether the process waits for it, as with NCCL it may not.

A rank that waits for this one by other means than collectives (a file, a queue) shows nothing. So waiting has a limit.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import HfZeroStreamError, PeerError, SaveError, StreamError
from .contact import PREFIX, Decision, Line, Verdict
from .liveness import KEYS, STUCK_S, Watch
from .presence import Presence


if TYPE_CHECKING:
    from .waiting import Wait


logger = logging.getLogger(__name__)

SHARING_PATIENCE_S = 300.0
"""How long ranks wait, if they need not load together, for one that lives and may be on its way."""

SHORT_PATIENCE_S = 0.5
"""The same for a rank that was waited for in vain, until all come together again; and for ranks that have made the
same load alone before this one came: they may never come."""

STRANGER_S = 60.0
"""After this time a rank that has made no contact is no longer taken for a slow one: ranks that need not load together
go on alone, and others say what it may mean."""

STRANGERS_END_S = 600.0
"""After this time without contact to a rank, ranks that must load or save together give up."""

DIFFERENT_HOLDS_S = 5.0
"""How long a decision not to load together because ranks load different things holds for those that come later."""

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
    """How long a rank waits for the others; None: as long as the process group's time-out, or if `is_optional`,
    :data:`SHARING_PATIENCE_S`."""
    reminder_s: float = 30.0
    """After which time the first rank to come says for whom it waits."""
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

STREAM = Occasion(
    "stream weights",
    "All of them must make the stream and go through each of its passes, because each gives its own part: take it out "
    "of `if accelerator.is_main_process:` and the like.",
    patience_s=600.0,
    error=StreamError,
)
"""A pass of a weight stream, or the plan of one."""

SHARED_LOAD = Occasion(
    "share the load",
    "If they are not going to make the same load, share_reads=False avoids the wait.",
    reminder_s=10.0,
    is_optional=True,
)
"""A load outside ZeRO-3, which ranks share if all come."""


class Round:
    """This rank's arrival at an occasion, in the first round that is not over; `subject`: the same on all ranks.

    With an `error`, this rank has failed before, and calls the round off (see :meth:`call_off`).
    """

    def __init__(
        self, presence: Presence, occasion: Occasion, subject: str = "", *, error: BaseException | None = None
    ) -> None:
        self._presence = presence
        self._error = error
        self._store = presence.store
        self._occasion = occasion
        self.doing = f"{occasion.name} ({subject})" if subject else occasion.name
        """Completes "ranks came to ..."."""
        self._is_late = False
        """Whether others have made the same load alone before."""
        number = presence.rounds[occasion.name]
        while not self._arrive(f"{PREFIX}/{occasion.name}/{number}", subject):
            number += 1
        presence.rounds[occasion.name] = number + 1

    def _arrive(self, key: str, subject: str) -> bool:
        """Whether the round is not over, so that this rank counts in it; its keys begin with `key`."""
        self.key = key
        decision = self._decision()
        if decision is not None:
            holds_s = DIFFERENT_HOLDS_S if self._occasion.is_optional else FAILURE_HOLDS_S
            if abs(time.time() - decision.when) >= holds_s:
                self._is_late = bool(subject) and self._store.get(f"{key}/subject") == subject
                return False
        if subject:  # before this rank is counted: the last one to be counted decides that all go together
            first = self._store.set_first(f"{key}/subject", subject)
            if first != subject:
                # Those that come a moment later need not wait in a round of their own.
                why = f"ranks came to {self._occasion.name} with different things ({first}; {subject})"
                if not self._occasion.is_optional:
                    why = f"{why[0].upper()}{why[1:]}. {self._occasion.advice}"
                self._decide(Decision("apart", why, when=time.time()))
        if self._error is not None:  # likewise: another rank may be counted right after this one
            self.call_off(self._error)
        count = self._store.add(f"{key}/count", 1)
        self._is_first, self._is_last = count == 1, count == self._presence.world_size
        return count <= self._presence.world_size  # more: keys of an earlier process group with the same store

    def call_off(self, error: BaseException) -> None:
        """Decide that the ranks do not come together, because this one fails with `error`."""
        rank = self._presence.rank
        if self._occasion.is_optional:
            self._decide(Decision("apart", f"rank {rank} does not load"))
        else:
            self._decide(Decision("failed", when=time.time(), failure=Verdict.of_failure(rank, error)))

    def gather(self, watch: Watch) -> None:
        """Return once all ranks are here; `watch` is that of the meeting with this :attr:`key`.

        Raises:
            Apart: ranks go on alone, where they may.
            HfZeroStreamError: a rank is dead, or came with an error, or not all came in time.
        """
        try:
            decision = self._decide(Decision("together")) if self._is_last else self._wait(watch)
        except HfZeroStreamError:
            raise
        except BaseException as error:  # Ctrl-C
            self.call_off(error)
            raise
        is_optional, passed = self._occasion.is_optional, self._presence.passed[self._occasion.name]
        self._presence.given_up.update(decision.given_up)
        if decision.outcome == "together":
            self._presence.given_up.clear()
            # No rank looks at earlier rounds any more. The last rank to come deletes their keys; if ranks were missing
            # in rounds before, perhaps this last one, each rank deletes those that it has passed.
            if self._is_last or len(passed) > 1:
                self._store.delete(f"{key}/{name}" for key in passed for name in _KEYS)
            passed.clear()
        else:
            passed.append(self.key)
        if decision.outcome == "failed":
            raise Verdict(*decision.failure).error()
        if decision.outcome == "apart":
            if not is_optional:
                raise self._occasion.error(decision.why)
            rank = self._presence.rank
            raise Apart(decision.why, says_it=self._store.set_first(f"{self.key}/speaker", rank) == rank)

    def leave(self) -> None:
        """The meeting is over on this rank. Its keys stay until then: another one may begin meanwhile, and end."""
        self._presence.passed[self._occasion.name].append(self.key)

    def _wait(self, watch: Watch) -> Decision:
        is_optional, presence = self._occasion.is_optional, self._presence
        limit_s = self._limit_s(())
        looked_s, reminder_s = 0.0, self._occasion.reminder_s
        wait: Wait | None = None
        with closing(Inquiry(presence, watch)) as inquiry, ExitStack() as stack:
            for waited_s in presence.polling():
                decision = self._decision()
                if decision is not None:
                    return decision
                verdict = watch.verdict
                if is_optional and verdict is not None and verdict.kind == "Ended":
                    return self._decide(Decision("apart", verdict.message.partition(",")[0]))
                watch.check(dead_only=True)
                if waited_s > limit_s:
                    break
                if not is_optional and waited_s > STUCK_S:
                    from .waiting import Wait

                    place = self.key, 0, f"waits for all ranks to {self.doing}"
                    wait = wait or stack.enter_context(closing(Wait(presence, place)))
                    wait.look(waited_s, for_all=self._is_first)
                if not self._is_first or waited_s - looked_s < max(0.25, presence.world_size / 1000):
                    continue
                looked_s, absent = waited_s, watch.absent()
                limit_s = self._limit_s(absent)
                why = inquiry.why_in_vain(absent) if is_optional else ""
                if why:
                    return self._decide(Decision("apart", why))
                if waited_s > reminder_s:
                    self._remind(absent, waited_s)
                    reminder_s *= 2
        absent, world_size = watch.absent(), presence.world_size
        came = f"{world_size - len(absent)} of {world_size} ranks came to {self._occasion.name}"
        why = f"Only {came} within {limit_s:g} seconds; {_ranks(absent)} did not. {self._strangers(absent)}"
        given_up = [(rank, presence.has_contact(rank)) for rank in absent] if is_optional and not self._is_late else []
        return self._decide(Decision("apart", f"{why}{self._occasion.advice}".strip(), given_up=given_up))

    def _limit_s(self, absent: Sequence[int]) -> float:
        """How long this rank waits, if these ranks are absent."""
        is_optional, presence = self._occasion.is_optional, self._presence
        patience_s = self._occasion.patience_s or (SHARING_PATIENCE_S if is_optional else presence.group_timeout_s)
        contacts = {rank: presence.has_contact(rank) for rank in absent}
        if not all(contacts.values()):
            patience_s = min(patience_s, STRANGER_S if is_optional else STRANGERS_END_S)
        is_in_vain = self._is_late or not presence.given_up.items().isdisjoint(contacts.items())
        return min(patience_s, SHORT_PATIENCE_S) if is_optional and is_in_vain else patience_s

    def _remind(self, absent: Sequence[int], waited_s: float) -> None:
        text = f"Waiting since {waited_s:.0f} s for {_ranks(absent)} to {self._occasion.name}. "
        if self._occasion.is_optional or waited_s > STRANGER_S:
            text += self._strangers(absent)
        logger.warning(text + self._occasion.advice)

    def _strangers(self, absent: Sequence[int]) -> str:
        """What it may mean that some of these ranks have made no contact, if so."""
        strangers = [rank for rank in absent if not self._presence.has_contact(rank)]
        if not strangers:
            return ""
        has = "has" if len(strangers) == 1 else "have"
        return (
            f"{_ranks(strangers)[0].upper()}{_ranks(strangers)[1:]} {has} not entered streaming(): started in another "
            "way than this one, perhaps without hf_zero_stream.run? Or busy before it: enter streaming() first. "
        )

    def _decision(self) -> Decision | None:
        written = self._store.get(f"{self.key}/decision")
        return Decision(*written) if written else None

    def _decide(self, decision: Decision) -> Decision:
        """Make `decision`; returns the one that some rank made first."""
        return Decision(*self._store.set_first(f"{self.key}/decision", decision))


class Turn:
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


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


CERTAIN_S = 1.0
"""How long a rank must be ahead. Threads that communicate beside the main one may be, for a moment."""

ASKED = 16
"""The most ranks that are asked at once; one that has gone on is enough."""


class Inquiry:
    """What the first rank to come asks the `watch` of its meeting, and the ranks themselves."""

    def __init__(self, presence: Presence, watch: Watch) -> None:
        self._presence = presence
        self._watch = watch
        self._lines: dict[int, Line] = {}
        self._ahead: dict[int, tuple[float, dict[str, int]]] = {}
        """When a rank was ahead first, and of what it had begun by then."""

    def why_in_vain(self, absent: Sequence[int]) -> str:
        """Why one of these ranks does not come; "" as long as all may be on their way. Call it again and again."""
        elsewhere = self._watch.elsewhere(absent)
        if elsewhere:
            return f"rank {elsewhere[0]} waits for this rank in another load or save"
        asked = [rank for rank in absent if self._presence.has_contact(rank)][:ASKED]
        meeting, mine = self._presence.progress()
        now = time.monotonic()
        for rank, (common, theirs) in zip(asked, self._presence.answers(asked), strict=True):
            self._lines.setdefault(rank, self._presence.line_to(rank)).ask()
            # Counts begin where both were together last.
            if common == meeting and rank not in self._ahead and _is_ahead(theirs, mine):
                self._ahead[rank] = now, theirs
        for rank, (since, theirs) in list(self._ahead.items()):
            if not _is_ahead(theirs, mine):
                del self._ahead[rank]
            elif now - since >= CERTAIN_S:
                return f"rank {rank} has begun a collective without this rank, so it does not come to this load now"
        return ""

    def close(self) -> None:
        for line in self._lines.values():
            line.close()


def _is_ahead(theirs: dict[str, int], mine: dict[str, int]) -> bool:
    """Whether more has been begun there, in any group that both know."""
    return any(count > mine[group] for group, count in theirs.items() if group in mine)
