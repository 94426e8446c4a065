"""The save of a state into folders of the hosts' own: each rank writes one piece, and other hosts keep copies of it.

Nothing is exchanged but copies, and what ordinary saves exchange too. When all pieces are complete, on all hosts, each
host gives its folder of the state its final name. So a state that has its name on any host is complete, and what
counts at a resume is whether the hosts that are left have all of its pieces.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy
from transformers.utils import logging

from ...errors import ConfigError, SaveError
from ...plugin_api import (
    STEPS,
    WORD,
    Comparison,
    Coordinator,
    Copies,
    Finalizer,
    Place,
    Publication,
    SavePlan,
    ShardWriter,
    Staged,
    StagedFiles,
    Training,
    Work,
    WritePlan,
    Written,
    as_save_error,
    bytes_text,
    free_memory,
    history,
    kind_of_file_system,
    make_file,
    write_files,
)
from .choice import FoundState, facts_of, joined, next_number, piece_name, replaced_by
from .copies import copy_pieces, holders_of
from .folders import (
    MANIFEST,
    PIECES,
    RUNS,
    Hosts,
    HostState,
    PieceRecord,
    begin_in,
    refuse_shared,
    remove_states,
    states_in,
    tree_of,
    write_tree,
)
from .pieces import packed_runs


logger = logging.get_logger(__name__)


class HostPlace(Place):
    """The folder of each host, and of as many others as `copies` says.

    Args:
        training: what is saved.
        keep: states of this training that stay, this one included.
        files: those of this rank that belong to the state too, by their names.
        facts: what the caller knows that tells this training from others, beside :func:`.choice.facts_of`.
        told: called when all hosts have the state, with the id of the training and its steps.
    """

    is_shared = False

    def __init__(
        self,
        folder: Path,
        *,
        copies: int,
        training: Training,
        keep: int = 1,
        files: Mapping[str, bytes] | None = None,
        facts: Mapping[str, Any] | None = None,
        told: Callable[[str, int], object] | None = None,
    ) -> None:
        super().__init__(folder)
        self._folder = folder
        for name, value, least in (("copies", copies, 0), ("keep", keep, 1)):
            if type(value) is not int or value < least:
                raise ConfigError(f"{name}: expected a whole number from {least} on; got {value!r}")
        self._copies, self._keep, self._files = copies, keep, dict(files or {})
        self._training, self._facts = training, {**facts_of(training), **(facts or {})}
        self._told = told

    def meet(self, work: Work) -> None:
        self._hosts = Hosts.meet(work.coordinator)
        refuse_shared(self._folder, self._hosts, work.coordinator)

    def begin(self) -> Publication:
        return begin_in(self._folder)

    def write(self, work: Work, publication: Publication, plan: WritePlan, finalizer: Finalizer) -> Written:
        with self._begun(work, publication, plan, finalizer) as save:
            write_files(work, plan, save.writer, save.comparison, lambda: None)
            save.publish(work.coordinator)
        return Written(work.coordinator.all_gather(work.figures(plan)), plan.names)

    def stage(
        self, work: Work, publication: Publication, plan: WritePlan, finalizer: Finalizer, copies: Copies
    ) -> Staged:
        with self._begun(work, publication, plan, finalizer) as save:
            return _StagedOnHosts(work, plan, copies, save)

    @contextmanager
    def _begun(
        self, work: Work, publication: Publication, plan: WritePlan, finalizer: Finalizer
    ) -> Iterator[_HostSave]:
        """Agree on all that is known before values are written, and make room for these (all ranks).

        An error inside removes it again.
        """
        coordinator, named = work.coordinator, as_save_error(self._folder)
        save = _HostSave(self._folder, self._hosts, work, _joined(_extents(plan.plan, coordinator.rank)))
        try:
            try:
                save.begin(self._copies, self._keep, named)
                save.describe(plan, self._training, self._facts, self._told)
                tree = coordinator.broadcast(named(partial(_tree, publication, plan, finalizer)))
                for of_rank in coordinator.all_gather(self._files):
                    tree |= of_rank
                save.tree = tree
            finally:
                if coordinator.is_main:
                    publication.abandon()
            yield save
        except BaseException:
            save.abandon()
            raise


class _HostSave:
    """A save onto hosts while it is made, from what ranks agree on before they write to the names of its folders."""

    tree: dict[str, bytes]
    """All files of the state but the pieces, by their names in its folder."""

    def __init__(self, folder: Path, hosts: Hosts, work: Work, extents: Sequence[tuple[int, int, int]]) -> None:
        self._folder, self._hosts, self._work, self._extents = folder, hosts, work, extents
        self._is_leader = work.coordinator.rank == hosts.leader
        self._own: Publication | None = None

    def begin(self, copies: int, keep: int, named: Any) -> None:
        """Make the folder of this host, with files of full size for pieces; errors are `named` (all ranks)."""
        coordinator, hosts = self._work.coordinator, self._hosts

        def look() -> list[FoundState]:
            if not self._is_leader:
                return []
            self._own = begin_in(self._folder)
            return states_in(self._folder)

        found = coordinator.run_on_all(named(look))
        nbytes = sum(stop - start for _, start, stop in self._extents)
        mine = None if self._own is None else self._own.temporary, found, nbytes
        paths, of_hosts, self._sizes = zip(*coordinator.all_gather(mine), strict=True)
        self._temporary, self._found, self._keep = paths[hosts.leader], joined(of_hosts), keep
        self.copies = min(copies, len(hosts.ranks) - 1)
        if self.copies < copies and coordinator.is_main:
            logger.warning_once(
                f"{self._folder}: {copies} copies on other hosts were asked for, and there are {len(hosts.ranks)} "
                "host(s). If one is lost, so may be the state."
            )
        self._holders = holders_of(hosts, self.copies)
        coordinator.run_on_all(named(self._make_room))
        path, extents = self._path_of(coordinator.rank), self._extents
        self.writer = _PieceWriter(path, extents, has_digests=True)
        self.comparison = partial(_PieceComparison, path, extents)

    def _make_room(self) -> None:
        if self._is_leader:
            (self._temporary / PIECES).mkdir(mode=0o700)
            wanted = [rank for rank, of_rank in enumerate(self._holders) if self._hosts.mine in of_rank]
            _refuse_too_large(self._folder, sum(self._sizes[rank] for rank in wanted))
            for rank in wanted:
                make_file(self._path_of(rank), self._sizes[rank], opener=partial(os.open, mode=0o600))

    def _path_of(self, rank: int) -> Path:
        return self._temporary / PIECES / piece_name(rank)

    def describe(
        self,
        plan: WritePlan,
        training: Training,
        facts: Mapping[str, Any],
        told: Callable[[str, int], object] | None,
    ) -> None:
        """Agree on what the state says of itself (all ranks)."""
        coordinator, steps = self._work.coordinator, training.counters[STEPS]
        own = uuid.uuid4().hex[:12], steps, history.id_of(training.optimizer), facts if coordinator.is_main else {}
        (identity, steps, known, facts), *_ = coordinator.all_gather(own)
        named = zip(plan.names, plan.shards, strict=True)
        shards = [(name, len(shard.header), shard.size_bytes) for name, shard in named]
        self._table, self._told = _table_of(self._extents, shards, coordinator), told
        self._state = HostState(
            id=identity,
            steps=steps,
            number=next_number(self._found, known, steps),
            training=known,
            facts=facts,
            hosts=self._hosts.names,
            shards=shards,
            pieces=[],
        )

    def publish(self, coordinator: Coordinator) -> None:
        """Copy what all ranks have written, and give the state its name on each host (all ranks)."""
        digests = coordinator.all_gather(self.writer.digests[0] % WORD)
        with self._work.clock("copy"):
            copy_pieces(coordinator, self._hosts, self.copies, self._sizes, digests, self._path_of)
        pieces = [PieceRecord(*each) for each in zip(self._sizes, digests, self._holders, strict=True)]
        state = replace(self._state, pieces=pieces)
        with self._work.clock("publish"):
            coordinator.run_on_all(partial(self._commit, state))
        if self._told is not None:
            self._told(state.training, state.steps)
        # Only now: until all hosts have the new state, the older one is what a resume may need.
        names = replaced_by(state.found(frozenset()), self._found, self._keep)
        coordinator.run_on_all(lambda: remove_states(self._folder, names if self._is_leader else []))

    def _commit(self, state: HostState) -> None:
        """Give the state its final name in the folder of this host."""
        if self._own is None:
            return
        try:
            place = self._temporary / state.name
            write_tree(place, {**self.tree, MANIFEST: state.to_json().encode(), RUNS: self._table})
            os.replace(self._temporary / PIECES, place / PIECES)
        except OSError as error:
            raise SaveError(f"{self._temporary}: cannot finish this state: {error.strerror or error}.") from error
        self._own.commit("", "")

    def abandon(self) -> None:
        if self._own is not None:
            self._own.abandon()


class _StagedOnHosts(StagedFiles):
    def __init__(self, work: Work, plan: WritePlan, copies: Copies, save: _HostSave) -> None:
        super().__init__(work, plan, copies, save.writer, save.comparison, save.publish)
        self._save, self.exchanges = save, save.copies > 0

    def abandon(self) -> None:
        self._save.abandon()


class _PieceWriter(ShardWriter):
    """Writes the bytes of shards where they belong in the piece with these `extents`."""

    def __init__(self, path: Path, extents: Sequence[tuple[int, int, int]], *, has_digests: bool = False) -> None:
        super().__init__([path], has_digests=has_digests)
        self._extents = extents
        self._starts = [0, *accumulate(stop - start for _, start, stop in extents)]

    def _located(self, shard: int, position: int) -> tuple[int, int]:
        number = bisect_right(self._extents, (shard, position, 2**63)) - 1
        return 0, self._starts[number] + position - self._extents[number][1]


class _PieceComparison(_PieceWriter, Comparison):
    """Compares them."""


def _tree(publication: Publication, plan: WritePlan, finalizer: Finalizer) -> dict[str, bytes]:
    """All files of the state but the pieces, which rank 0 has prepared; of shards the headers."""
    if finalizer.write_rest is not None:
        finalizer.write_rest(publication, {})  # pieces have digests of their own
    headers = {name: shard.header for name, shard in zip(plan.names, plan.shards, strict=True)}
    for name in headers:
        (publication.temporary / name).unlink()
    return tree_of(publication.temporary) | headers


_known_runs: dict[tuple[Any, ...], bytes] = {}
"""The packed runs of the newest save, by the shards and what the ranks wrote of them."""


def _table_of(
    mine: Sequence[tuple[int, int, int]], shards: Sequence[tuple[str, int, int]], coordinator: Coordinator
) -> bytes:
    """What :func:`.pieces.packed_runs` gives; kept for the next save, because with many ranks it takes seconds."""
    table = numpy.array(mine, dtype="<i8").reshape(-1, 3).tobytes()
    key = str(shards), *coordinator.all_gather(hashlib.sha256(table).digest())
    if (known := coordinator.broadcast(lambda: _known_runs.get(key))) is not None:
        return known
    tables = coordinator.all_gather(table)

    def pack() -> bytes:
        of_ranks = [numpy.frombuffer(each, dtype="<i8").reshape(-1, 3) for each in tables]
        return packed_runs(of_ranks, [header for _, header, _ in shards], [size for _, _, size in shards])

    packed = coordinator.broadcast(pack)
    _known_runs.clear()
    _known_runs[key] = packed
    return packed


def _extents(plan: SavePlan, rank: int) -> Iterator[tuple[int, int, int]]:
    """What `rank` writes: the shard, the first byte, and one past the last."""
    exchanged = [segment for of_round in plan.rounds for writer, segment in of_round if writer == rank]
    for segment in (*plan.alone, *exchanged):
        yield segment.shard, segment.position, segment.position + segment.nbytes
    for it in plan.computations if rank == 0 else ():
        yield it.shard, it.position, it.position + it.view.numel * it.view.node.dtype.itemsize


def _joined(extents: Iterator[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Extents in order, as few as can be: those that follow each other are one."""
    found: list[tuple[int, int, int]] = []
    for shard, start, stop in sorted(extents):
        if found and found[-1][0] == shard and found[-1][2] == start:
            found[-1] = shard, found[-1][1], stop
        else:
            found.append((shard, start, stop))
    return found


def _refuse_too_large(folder: Path, nbytes: int) -> None:
    """Raise a SaveError if there is no room for `nbytes` in the `folder`, or in the memory that it lies in."""
    room, of_what = shutil.disk_usage(folder).free, "disk"
    if kind_of_file_system(str(folder)) in ("tmpfs", "ramfs"):
        room, of_what = min(room, free_memory()), "memory"
    if nbytes > room:
        raise SaveError(
            f"{folder}: this host would keep {bytes_text(nbytes)} of a state there, copies of other hosts' included; "
            f"{bytes_text(room)} of {of_what} are free. Ask for fewer copies, or give a folder on a larger disk. What "
            "was there before has not been touched."
        )
