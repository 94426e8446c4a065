"""Weights that stay in files: the load's own plan of each, carried out again whenever it is asked for."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import CheckpointError, UnsupportedError
from ...plugin_api import (
    BatchPlan,
    Coordinator,
    HostTensor,
    Item,
    Leaf,
    OpenCheckpoint,
    Target,
    execute_reads,
    is_url,
    plan_batch,
    sources_of,
)


logger = logging.getLogger(__name__)

MOST_ADDED = 16
"""A weight stays in files if at most one in so many of its elements is in memory, on whatever rank that is."""

THREAD_BYTES = 8 * 2**20
"""What a further thread must have to read: to start one takes as long as reading a part of that."""


@dataclass(frozen=True, eq=False)
class FrozenWeight:
    """A rank's part of a frozen parameter: `target` has its name, `plan` and `leaves` give its values."""

    target: Target
    plan: BatchPlan
    leaves: Sequence[Leaf]

    @property
    def name(self) -> str:
        return self.target.name

    @property
    def nbytes(self) -> int:
        return self.target.nbytes


class WeightFiles:
    """The files of a checkpoint, open as long as a model reads weights from them.

    They are compared with what they were at the load by their handles, once before and after each pass through the
    model: a file that was truncated or written to is an error. One that was replaced or removed goes on to be read.
    """

    def __init__(self, checkpoint: OpenCheckpoint) -> None:
        """Open the files of the `checkpoint` of a load again; a CheckpointError if one has changed since."""
        _refuse_far(checkpoint)
        self._checkpoint = checkpoint.reopened(Coordinator.of_this_rank(), torch.device("cpu"))
        self._threads = self._checkpoint.threads()
        if not (checkpoint.config.reader_threads or self._checkpoint.hints.is_remote):
            # One core of this rank's is left to what computes: more threads than the others made steps a fifth longer.
            cores = len(os.sched_getaffinity(0)) // checkpoint.coordinator.topology.sharing_cores
            self._threads = max(1, min(self._threads, cores - 1))
        self._replaced: set[str] = set()

    def weight_of(self, item: Item) -> FrozenWeight | None:
        """The weight that `item` would fill; None, on all ranks, if its values, or many of them, are in no file."""
        sources = sources_of([item.view])
        added = sum(node.numel for node, _ in sources if isinstance(node, HostTensor))  # padding, or a constant
        if added > item.view.numel // MOST_ADDED:
            return None
        seek, small = self._checkpoint.seek_bytes, self._checkpoint.request_bytes
        # Each read takes the GIL from what computes. Those that pass through a buffer are as small as elsewhere.
        large = max(small, -(-item.target.nbytes // self._threads))
        plan, leaves = plan_batch([(item.target, item.view)], request_bytes=large, seek_bytes=seek)
        if not all(piece.is_run for read in plan.reads for piece in read.pieces):
            plan, leaves = plan_batch([(item.target, item.view)], request_bytes=small, seek_bytes=seek)
        return FrozenWeight(item.target, plan, leaves)

    def open(self, weights: Mapping[int, FrozenWeight]) -> None:
        self._checkpoint.open(read.shard for weight in weights.values() for read in weight.plan.reads)

    def read(self, weight: FrozenWeight, memory: torch.Tensor) -> None:
        """Fill `memory` (uint8, of ``weight.nbytes`` bytes) with the values of `weight`, and with zeros as padding.

        Raises a CheckpointError or a ReadError that names the file.
        """
        target, values = weight.target, memory.view(weight.target.dtype)
        threads = min(self._threads, 1 + weight.plan.cost.bytes_read // THREAD_BYTES)
        with _of_every_step(), torch.no_grad():
            execute_reads(weight.plan, [values], self._checkpoint.source, threads=threads, is_fresh=False)
            if weight.plan.placements:
                self._checkpoint.evaluator(threads).place(weight.plan, weight.leaves, [values])
            values[target.stop - target.start :].zero_()

    def check(self) -> None:
        """Raise a CheckpointError if an open file has changed since the load; say once that one was replaced."""
        local: Any = self._checkpoint.source.local  # type: ignore[attr-defined]  # of files on this host alone
        with _of_every_step():
            paths = local.check_open()
        for path in paths:
            if path in self._replaced or _is_same(path, local.first_status[path]):
                continue
            self._replaced.add(path)
            logger.warning(
                f"{path}: was replaced or removed since it was loaded. This training goes on with the file that was "
                "there; another one that is loaded from this folder has other weights, or none."
            )

    def path_of(self, weight: FrozenWeight) -> str:
        """The path of the file, or the first of several, that has the values of `weight`."""
        return next((self._checkpoint.shards[read.shard].path for read in weight.plan.reads), "its files")

    def close(self) -> None:
        self._checkpoint.close()


@contextmanager
def _of_every_step() -> Iterator[None]:
    """Add to an error of a file that has changed why it still matters."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f'{error} With frozen_weights="files" it is read in every step.') from error


def _is_same(path: str, status: os.stat_result) -> bool:
    """Whether the file of this `status` is the one that `path` leads to."""
    try:
        return os.path.samestat(os.stat(path), status)
    except OSError:
        return False


def _refuse_far(checkpoint: OpenCheckpoint) -> None:
    """Refuse files that a rank cannot read itself whenever a step needs them."""
    far = [shard.path for shard in checkpoint.shards if is_url(shard.path)]
    if far or checkpoint.mounts:
        raise UnsupportedError(
            f'{(far or checkpoint.mounts)[0]}: frozen_weights="files" reads every weight twice a step, and is for '
            "files that this host mounts. Copy the checkpoint to a disk, or leave the setting out."
        )
    if checkpoint.config.read_from != "all":
        raise UnsupportedError(
            f'frozen_weights="files" has every rank read the shards in each step; read_from='
            f"{checkpoint.config.read_from!r} has others read for it. Put the checkpoint where every rank sees it."
        )


def arena_bytes(parts: Mapping[str, int]) -> int:
    """Bytes of the two largest layers, of those of a rank's parts by name; embeddings count as a layer themselves."""
    found: dict[str, int] = {}
    for name, nbytes in parts.items():
        found[layer_of(name)] = found.get(layer_of(name), 0) + nbytes
    return sum(sorted(found.values())[-2:])


def layer_of(name: str) -> str:
    """The name up to its first number: ``model.layers.3``."""
    parts = name.split(".")
    number = next((at for at, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: number + 1])
