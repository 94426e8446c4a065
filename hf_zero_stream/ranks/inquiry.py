"""Whether ranks that have not come to a load may still be on their way, or will not come as long as this one waits.

The ranks of a program begin the same collectives in the same order. So a rank that has begun one to which this rank
has not come is past the load, or has never been on the way there: it waits in a barrier for the rank that loads alone
(``main_process_first``, ``if rank == 0``), or trains. That is a proof, which time is not: a slow rank, however late,
has begun no more collectives than this one. torch counts them itself, in every group. So nothing has to be hooked in,
and neither the library that begins a collective matters nor whether the process waits for it, as with NCCL it may not.

A rank that waits for this one by other means than collectives (a file, a queue) shows nothing. So waiting has a limit.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from .lines import Line
from .liveness import Watch
from .presence import Presence


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
