"""The error of a request to a server, until it is known which file it was for and whether it passes."""

from __future__ import annotations


PASSING_STATUS = frozenset({408, 425, 429})
"""Besides 5xx: what a server answers that may do so a moment later."""


class RequestFailed(OSError):
    """A request that failed; its text names no file. `status` is that of HTTP, 0 if there was no answer."""

    def __init__(self, text: str, status: int = 0, is_transient: bool = False) -> None:
        super().__init__(text)
        self.status, self.is_transient = status, is_transient
