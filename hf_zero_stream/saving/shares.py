"""Shares and boxes that ranks hold of a parameter, put together: they must be all of it.

Ranks may differ in what is taken for the same on all: which parameters there are, and the values of replicas. Where
nothing explains a difference, a save would lose what all ranks but one have, in silence.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping, Sequence

from torch import nn
from transformers.utils import logging

from ..checkpoint.nodes import View
from ..errors import SaveError, UnsupportedError
from ..holdings.holding import Holding
from ..holdings.introspection import instances_of, is_cut
from ..holdings.own_names import parameters
from ..planning.boxes import Interval, ParameterBox
from ..ranks.coordinator import Coordinator
from .plan import Share


logger = logging.get_logger(__name__)


def join(name: str, boxes: Sequence[tuple[ParameterBox, View]], dim: int = 0) -> View:
    """A parameter put together of boxes: it is cut into slabs along dimension `dim`, and each slab along the next.

    `boxes` are in order of their first indices, each with its elements.
    """
    shape = boxes[0][0].shape
    if dim == len(shape):
        return boxes[0][1]
    slabs: dict[Interval, list[tuple[ParameterBox, View]]] = {}
    for box, view in boxes:
        ((begin, end),) = box.intervals[dim]
        slabs.setdefault((begin, end), []).append((box, view))
    position = 0
    for begin, end in slabs:
        if begin != position:
            break
        position = end
    if position != shape[dim]:
        raise SaveError(
            f"{name}: expected that the boxes that ranks hold of it fill its shape {shape} without overlap; along "
            f"dimension {dim} it is cut into (first index, one past the last): {', '.join(map(str, slabs))}. Save "
            "from all ranks of the job, with the same model on each."
        )
    pieces = tuple(join(name, slab, dim + 1) for slab in slabs.values())
    return pieces[0] if len(pieces) == 1 else View.joined(pieces, dim)


def cover(name: str, numel: int, held: Iterable[tuple[int, int, int]]) -> tuple[Share, ...]:
    """Shares that cover a parameter of `numel` elements, with no overlap; `held` are starts, stops, and ranks."""
    shares: list[Share] = []
    position = 0
    for start, stop, rank in sorted(own for own in held if own[0] < own[1]):
        if start > position:
            break
        if stop > position:
            shares.append(Share(rank, position, stop))
            position = stop
    if position < numel:
        raise SaveError(
            f"{name}: expected that the ranks hold all {numel} elements between them; nobody holds number {position}. "
            "Save from all ranks of the job, with the same model on each."
        )
    return tuple(shares)


def digest_of_names(holdings: Mapping[str, Holding]) -> bytes:
    """A digest of the names and shapes of parameters."""
    return hashlib.sha256(repr([(name, each.box.shape) for name, each in holdings.items()]).encode()).digest()


def refuse_differing(digests: Sequence[bytes], found: str) -> None:
    """Raise a SaveError if the digests of all ranks differ; `found` says in which case they do."""
    if different := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
        raise SaveError(f"Rank(s) {different} {found} than rank 0: the model must be the same on every rank.")


def wrapper_of(model: nn.Module) -> str:
    """The class of what has made the replicas of `model` equal, or of a model around it; "" if nothing has.

    AutoTP does not: ranks of tensor parallelism train what is not cut each for itself, and it may drift apart.
    """
    if any(map(is_cut, parameters(model))):
        return ""
    ddp = nn.parallel.DistributedDataParallel
    engine = getattr(sys.modules.get("deepspeed.runtime.engine"), "DeepSpeedEngine", ddp)
    around = (each for each in instances_of(engine, ddp) if any(module is model for module in each.modules()))
    return next((type(each).__name__ for each in around), "")


def refuse_or_say_differing(
    differing: Mapping[str, Sequence[int]], synchronised_by: str, coordinator: Coordinator
) -> None:
    """Raise an UnsupportedError on all ranks if what is `synchronised_by` something differs; else rank 0 warns.

    Args:
        differing: the ranks whose values of a parameter are not those of the first rank that holds all of it.
        synchronised_by: what keeps the values equal; "" if nothing does, as before a training.
    """
    ranks = "; ".join(f"{name} (rank {', '.join(map(str, others))})" for name, others in [*differing.items()][:8])
    if wrapper := next(filter(None, coordinator.all_gather(synchronised_by)), ""):
        raise UnsupportedError(
            f"Expected the same values of a parameter on all ranks that hold it, as {wrapper} keeps them; found "
            f"others than on the first of these ranks for {len(differing)} parameter(s): {ranks}. Do ranks hold parts "
            "of a model without saying so, or has code changed values on some of them?"
        )
    if coordinator.is_main:
        logger.warning(
            f"Ranks have different values for {len(differing)} parameter(s), each of which they hold in full: "
            f"{ranks}. Nothing keeps them equal: neither a DeepSpeed engine without AutoTP nor "
            "DistributedDataParallel. A module that was made without a common seed, for instance. Those of the first "
            "rank that holds them (rank 0) are saved."
        )
