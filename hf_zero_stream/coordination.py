"""What ranks tell each other while loading: one rank's headers, everyone's success, everyone's report.

Ranks meet at agreements, always in the same order. A rank that fails between two agreements brings its error to the
next one, so that every rank raises there, in seconds, instead of waiting for a collective that never comes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from . import errors
from .errors import HfZeroStreamError, PeerError


__all__ = ["Coordinator"]

T = TypeVar("T")


class Coordinator:
    """Collectives between the ranks that load one model together.

    Args:
        rank: this rank.
        world_size: number of ranks.
        alone: tell nobody anything: this rank reads for itself what one rank would have shared, and takes it that the
            others succeed.
    """

    def __init__(self, rank: int, world_size: int, *, alone: bool) -> None:
        self.rank = rank
        self.world_size = world_size
        self.is_alone = alone
        self._reported = False

    @classmethod
    def of_default_group(cls) -> Coordinator:
        """All ranks of torch's default process group, which must be initialised.

        In a *fake* group, which stands for ranks beyond this machine, collectives deliver nothing: then each rank is
        alone.
        """
        world_size = dist.get_world_size()
        return cls(dist.get_rank(), world_size, alone=world_size == 1 or dist.get_backend() == "fake")

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that speaks for all."""
        return self.rank == 0

    def agree(self, error: BaseException | None = None) -> None:
        """Return on every rank if no rank brings an `error`, else raise on every rank.

        A rank that failed raises its own error. The others raise one of the same class if it is ours, and
        :class:`PeerError` if not; both name the rank.
        """
        self.exchange(None, error)

    def exchange(self, value: T, error: BaseException | None = None) -> list[T]:
        """Every rank's `value`, in order of rank; an agreement (see :meth:`agree`) as well."""
        if self.is_alone:
            if error is not None:
                self._reported = True
                raise error
            return [value]
        mine = None if error is None else (type(error).__name__, str(error))
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, (value, mine))
        failures = {rank: failure for rank, (_, failure) in enumerate(everyone) if failure is not None}
        if not failures:
            return [value for value, _ in everyone]
        self._reported = True
        if error is not None:
            raise error
        rank, (kind, message) = next(iter(failures.items()))
        raise _same_error(rank, kind, message)

    def share(self, produce: Callable[[], T]) -> T:
        """What `produce` returns on rank 0, on every rank; an agreement as well."""
        if self.is_alone:
            return produce()
        value, error = None, None
        if self.is_main:
            try:
                value = produce()
            except Exception as caught:
                error = caught
        self.agree(error)
        box = [value]
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else None
        dist.broadcast_object_list(box, src=0, device=device)
        return box[0]  # type: ignore[return-value]

    def report(self, error: BaseException) -> BaseException:
        """Bring `error` to the next agreement, unless an agreement raised it; returns what this rank should raise."""
        if self._reported:
            return error
        try:
            self.agree(error)
        except BaseException as agreed:
            return agreed
        return error


def _same_error(rank: int, kind: str, message: str) -> HfZeroStreamError:
    known = getattr(errors, kind, None) if kind in errors.__all__ else None
    if known is not None:
        return known(f"rank {rank}: {message}")
    return PeerError(f"rank {rank} failed, so this rank gives up too: {kind}: {message}")
