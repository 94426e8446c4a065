"""Finds the newest state that is whole on the hosts that are there, and has loads read the pieces of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch.distributed as dist
from transformers.utils import logging

from ...errors import CheckpointError
from ...ranks.coordinator import Coordinator
from ...sources.base import ByteSource, Retries, SourceFile
from ...sources.by_path import mounted
from ...sources.local import LocalFiles
from ...sources.relay import RelayedFiles, RelayServer
from .folders import (
    PIECES,
    FoundState,
    Hosts,
    HostState,
    begin_in,
    own_folder,
    piece_name,
    pieces_in,
    states_in,
    tree_of,
    what_is_missing,
    whole_states,
    write_tree,
)
from .pieces import PiecedFiles


logger = logging.get_logger(__name__)


def newest_on_hosts(folder: Path, coordinator: Coordinator, *, raises: bool = True) -> FoundState | None:
    """The newest state in the folders of the hosts that is whole (all ranks, in a meeting); None if there is no state.

    Its folder lies on every host then. Newer ones that are not whole are named in a warning.

    Raises:
        CheckpointError: on all ranks: there are states, and none is whole. If not `raises`, a warning says that.
    """
    hosts = Hosts.meet(coordinator)
    is_leader = coordinator.rank == hosts.leader
    mine = coordinator.run_on_all(lambda: states_in(own_folder(folder)) if is_leader else [])
    of_ranks = coordinator.all_gather(mine)
    whole, broken = whole_states(of_ranks)
    if not whole:
        why = (
            f"{folder}: no state is whole on {', '.join(hosts.names)}: "
            f"{'; '.join(what_is_missing(each) for each in broken[:4])}."
        )
        if broken and raises:
            raise CheckpointError(f"{why} Start these hosts too, or go on from another folder.")
        if broken and coordinator.is_main:
            logger.warning(why)
        return None
    chosen = whole[0]
    newer = [each for each in broken if each.number > chosen.number]
    if newer and coordinator.is_main:
        logger.warning(
            f"{folder}: {'; '.join(map(what_is_missing, newer))}. {chosen.name} (step {chosen.steps}) is taken."
        )
    has_it = [chosen.name in [each.name for each in of_rank] for of_rank in of_ranks]
    if not all(has_it[ranks[0]] for ranks in hosts.ranks):
        tree = coordinator.broadcast(lambda: tree_of(folder / chosen.name), has_it.index(True))

        def add() -> None:
            if is_leader and not has_it[coordinator.rank]:
                publication = begin_in(folder, takes=False)  # a save that is under way goes on
                write_tree(publication.temporary / chosen.name, tree)
                (publication.temporary / chosen.name / PIECES).mkdir(mode=0o700)
                publication.commit("", "")

        coordinator.run_on_all(add)
    return chosen


def newest_of_both(
    folder: Path, coordinator: Coordinator, steps_of_shared: Callable[[], int]
) -> tuple[FoundState | None, int]:
    """The newest state on hosts, None if the shared disk has a newer one; and the steps of that one (all ranks).

    Rank 0 says by `steps_of_shared` which steps the newest on the shared disk has made; -1: there is none.
    """
    found = newest_on_hosts(folder, coordinator, raises=False)
    steps = coordinator.broadcast(steps_of_shared)
    return (found if found is not None and found.steps >= steps else None), steps


@contextmanager
def pieces_mounted(place: Path, coordinator: Coordinator) -> Iterator[None]:
    """Inside, loads read shards of the state on hosts in the folder `place` from pieces (all ranks, in a meeting).

    Raises:
        CheckpointError: on all ranks: the record of the state is not sound, or no host has one of the pieces.
    """
    hosts = Hosts.meet(coordinator)
    state, there = coordinator.run_on_all(partial(_look, place, coordinator.rank == hosts.leader))
    of_ranks = coordinator.all_gather(there)
    of_hosts = [of_ranks[ranks[0]] for ranks in hosts.ranks]
    reader_of: dict[int, int] = {}
    for piece in range(len(state.pieces)):
        having = [number for number, of_host in enumerate(of_hosts) if piece in of_host]
        if not having:
            raise CheckpointError(
                f"{place}: no host has {piece_name(piece)} any more, as it was written. Go on from another state."
            )
        if hosts.mine not in having:  # hosts take turns, so that one alone need not read for all others
            reader_of[piece] = hosts.ranks[having[(hosts.mine + piece) % len(having)]][0]
    paths = [str(place / PIECES / piece_name(piece)) for piece in range(len(state.pieces))]
    pieces = [SourceFile(path, piece.size_bytes) for path, piece in zip(paths, state.pieces, strict=True)]
    files, table = coordinator.run_on_all(partial(state.files, place))
    readers = coordinator.all_gather({*reader_of.values()})
    with ExitStack() as stack:
        here = LocalFiles(pieces, retries=Retries())
        stack.callback(here.close)
        clients = dict[int, RelayedFiles]()
        server: RelayServer | None = None
        if relays := any(readers):  # else each host has every piece
            with coordinator.naming_dead_rank():
                group = dist.new_group(backend="gloo")
            asking = [rank for rank, of_rank in enumerate(readers) if coordinator.rank in of_rank]
            for reader in sorted({*reader_of.values()}):
                clients[reader] = RelayedFiles(here, reader, group, shares_group=True)
                clients[reader].add(pieces)
            if asking:
                server = RelayServer(here, asking, group, shares_group=True)
            coordinator.agree()
        elsewhere: dict[int, ByteSource] = {piece: clients[reader] for piece, reader in reader_of.items()}

        def source(retries: Retries) -> ByteSource:
            del retries  # what is read through another rank, that one tries again
            return PiecedFiles(files, table, here, elsewhere, state.id, coordinator.naming_dead_rank)

        try:
            with mounted(place, source):
                yield
        finally:
            for client in clients.values():
                client.finish()
            if server is not None:
                server.close()
            if relays:
                dist.destroy_process_group(group)


def _look(place: Path, is_leader: bool) -> tuple[HostState, frozenset[int]]:
    """The record of a state; and the pieces on this host, for which its leader looks."""
    state = HostState.read(place)
    return state, pieces_in(place, state) if is_leader else frozenset()
