"""The save of a state into folders of the hosts' own: each rank writes one piece, and other hosts keep copies of it.

Nothing is exchanged but copies, and what ordinary saves exchange too. When all pieces are complete, on all hosts, each
host gives its folder of the state its final name. So a state that has its name on any host is complete, and what
counts at a resume is whether the hosts that are left have all of its pieces.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import uuid
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy
import torch
from transformers.utils import logging

from ...errors import ConfigError, SaveError
from ...plugin_api import (
    STEPS,
    WORD,
    Comparison,
    Coordinator,
    Finalizer,
    Place,
    Publication,
    Put,
    SavePlan,
    SavingRank,
    ShardWriter,
    Training,
    Work,
    WritePlan,
    Written,
    as_save_error,
    bytes_of,
    bytes_text,
    free_memory,
    history,
    kind_of_file_system,
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

    why_waits = "hosts exchange copies, which takes all ranks"
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
        coordinator, hosts = work.coordinator, self._hosts
        is_leader, named = coordinator.rank == hosts.leader, as_save_error(self._folder)
        own = coordinator.run_on_all(named(lambda: begin_in(self._folder) if is_leader else None))
        try:
            found = coordinator.run_on_all(named(lambda: states_in(self._folder) if is_leader else []))
            paths, of_hosts = zip(
                *coordinator.all_gather((None if own is None else own.temporary, found)), strict=True
            )
            state = self._write_pieces(work, paths[hosts.leader], plan, joined(of_hosts))
            with work.clock("publish"):
                tree = coordinator.broadcast(named(partial(self._tree, publication, plan, finalizer)))
                for of_rank in coordinator.all_gather(self._files):
                    tree |= of_rank
                coordinator.run_on_all(lambda: None if own is None else self._commit(own, state, tree))
        except BaseException:
            if own is not None:
                own.abandon()
            raise
        finally:
            if coordinator.is_main:
                publication.abandon()
        if self._told is not None:
            self._told(state.training, state.steps)
        # Only now: until all hosts have the new state, the older one is what a resume may need.
        names = replaced_by(state.found(frozenset()), joined(of_hosts), self._keep)

        def remove() -> SavingRank:
            if is_leader:
                remove_states(self._folder, names)
            return work.figures(plan)

        return Written(coordinator.gather_results(remove), plan.names)

    def _write_pieces(self, work: Work, temporary: Path, plan: WritePlan, found: Sequence[FoundState]) -> HostState:
        """Write this rank's piece, and the copies of others', into the `temporary` folder of this host."""
        coordinator, hosts = work.coordinator, self._hosts
        copies = min(self._copies, len(hosts.ranks) - 1)
        if copies < self._copies and coordinator.is_main:
            logger.warning_once(
                f"{self._folder}: {self._copies} copies on other hosts were asked for, and there are "
                f"{len(hosts.ranks)} host(s). If one is lost, so may be the state."
            )
        mine = _joined(_extents(plan.plan, coordinator.rank))
        steps, training = self._training.counters[STEPS], history.id_of(self._training.optimizer)
        own = uuid.uuid4().hex[:12], steps, training, self._facts if coordinator.is_main else {}
        (identity, steps, training, facts), *_ = coordinator.all_gather(own)
        sizes = coordinator.all_gather(sum(stop - start for _, start, stop in mine))
        holders = holders_of(hosts, copies)

        def path_of(rank: int) -> Path:
            return temporary / PIECES / piece_name(rank)

        def make_room() -> None:
            wanted = {rank: sizes[rank] for rank, of_rank in enumerate(holders) if hosts.mine in of_rank}
            if coordinator.rank == hosts.leader:
                (temporary / PIECES).mkdir(mode=0o700)
                _refuse_too_large(self._folder, sum(wanted.values()))
                for rank, nbytes in wanted.items():
                    _allocate(path_of(rank), nbytes)

        coordinator.run_on_all(as_save_error(self._folder)(make_room))
        digests = coordinator.all_gather(_fill(work, path_of(coordinator.rank), plan, mine))
        with work.clock("copy"):
            copy_pieces(coordinator, hosts, copies, sizes, digests, path_of)
        named = zip(plan.names, plan.shards, strict=True)
        shards = [(name, len(shard.header), shard.size_bytes) for name, shard in named]
        self._table = _table_of(mine, shards, coordinator)
        return HostState(
            id=identity,
            steps=steps,
            number=next_number(found, training, steps),
            training=training,
            facts=facts,
            hosts=hosts.names,
            shards=shards,
            pieces=[PieceRecord(*each) for each in zip(sizes, digests, holders, strict=True)],
        )

    def _tree(self, publication: Publication, plan: WritePlan, finalizer: Finalizer) -> dict[str, bytes]:
        """All files of the state but the pieces, which rank 0 has prepared; of shards the headers."""
        if finalizer.write_rest is not None:
            finalizer.write_rest(publication, {})  # pieces have digests of their own
        headers = {name: shard.header for name, shard in zip(plan.names, plan.shards, strict=True)}
        for name in headers:
            (publication.temporary / name).unlink()
        return tree_of(publication.temporary) | headers

    def _commit(self, own: Publication, state: HostState, tree: Mapping[str, bytes]) -> None:
        """Give the state its final name in the folder of this host."""
        try:
            place = own.temporary / state.name
            write_tree(place, {**tree, MANIFEST: state.to_json().encode(), RUNS: self._table})
            os.replace(own.temporary / PIECES, place / PIECES)
        except OSError as error:
            raise SaveError(f"{own.temporary}: cannot finish this state: {error.strerror or error}.") from error
        own.commit("", "")


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


def _fill(work: Work, path: Path, plan: WritePlan, mine: Sequence[tuple[int, int, int]]) -> int:
    """Write this rank's piece; returns its digest."""
    with closing(ShardWriter([path], has_digests=True)) as writer:
        work.execute("write", plan, _put_into(writer, mine), writer.sync)
    if work.verifies:
        with closing(Comparison([path])) as comparison:
            work.execute("verify", plan, _put_into(comparison, mine), lambda: None)
    return writer.digests[0] % WORD


def _extents(plan: SavePlan, rank: int) -> Iterator[tuple[int, int, int]]:
    """What `rank` writes: the shard, the first byte, and one past the last."""
    exchanged = [segment for of_round in plan.rounds for writer, segment in of_round if writer == rank]
    for segment in (*plan.alone, *exchanged):
        yield segment.shard, segment.position, segment.position + segment.nbytes
    for it in plan.computations if rank == 0 else ():
        yield it.shard, it.position, it.position + it.view.numel * it.view.node.dtype.itemsize


def _put_into(writer: ShardWriter, mine: Sequence[tuple[int, int, int]]) -> Put:
    """What takes the bytes of shards, and puts them where they belong in the piece with these extents."""
    places = [0, *accumulate(stop - start for _, start, stop in mine)]

    def put(shard: int, position: int, values: Sequence[torch.Tensor]) -> None:
        number = bisect_right(mine, (shard, position, 2**63)) - 1
        writer.put(0, places[number] + position - mine[number][1], [bytes_of(each) for each in values])

    return put


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


def _allocate(path: Path, nbytes: int) -> None:
    try:
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
        try:
            if nbytes:
                os.posix_fallocate(handle, 0, nbytes)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            os.ftruncate(handle, nbytes)
        finally:
            os.close(handle)
    except OSError as error:
        raise SaveError(
            f"{path}: cannot make a file of {bytes_text(nbytes)}: {error.strerror or error}. What was there before "
            "has not been touched."
        ) from error
