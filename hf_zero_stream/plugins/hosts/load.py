"""Finds the newest state that is whole on the hosts that are there, and has loads read the pieces of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from transformers.utils import logging

from ...errors import CheckpointError
from ...plugin_api import (
    ByteSource,
    Coordinator,
    LocalFiles,
    Retries,
    SourceFile,
    Training,
    mounted,
    tool,
)
from .choice import Chosen, FoundState, TrainingMark, choose, joined, mark_of, piece_name
from .folders import (
    MANIFEST,
    PIECES,
    Hosts,
    HostState,
    as_read_error,
    begin_in,
    own_folder,
    pieces_in,
    states_in,
    tree_of,
    write_tree,
)
from .pieces import PiecedFiles


if TYPE_CHECKING:
    from .shared import SharedState


logger = logging.get_logger(__name__)


def newest_on_hosts(folder: Path, coordinator: Coordinator, training: Training) -> Path:
    """The newest state in the folders of the hosts that is whole (all ranks, in a meeting), which all hosts have then.

    One of this very `training` if there is any; what is not taken, and ahead or of another one, a warning names.

    Raises:
        CheckpointError: on all ranks: there are no states, or none is whole.
    """
    hosts = Hosts.meet(coordinator)
    found = _look_for_states(folder, hosts, coordinator)
    mark = coordinator.broadcast(lambda: mark_of(training))
    choice = choose(found, mark)
    if choice.taken is None and all(map(mark.differs_from, found)):  # the folder was named, so one of these is meant
        whole = next((state for state in found if state.is_whole), None)
        choice = Chosen(whole, choice.passed_over)
    if not found:
        raise CheckpointError(f"{folder}: no host has a state there. Start anew, or go on from another folder.")
    if choice.taken is None:
        raise CheckpointError(
            f"{folder}: no state is whole on {', '.join(hosts.names)}: {'; '.join(choice.passed_over[:4])}. Start "
            "these hosts too, or go on from another folder."
        )
    _say(folder, choice, f"{choice.taken.name} (step {choice.taken.steps})", coordinator)
    place = folder / choice.taken.name
    _spread(place, hosts, coordinator)
    return place


def newest_of_both(
    folder: Path, coordinator: Coordinator, mark: Callable[[], TrainingMark], look: Callable[[], SharedState]
) -> tuple[FoundState | None, SharedState]:
    """The newest state on hosts, None if the shared disk has a newer one; and what is there (all ranks, in a meeting).

    Rank 0 says what is on the shared disk by `look`, and by `mark` what training is going to go on. If there is a
    state on the shared disk, the training is that one's. A warning names what is on hosts and is not taken, and ahead
    of what is, or of another training.
    """
    hosts = Hosts.meet(coordinator)
    found = _look_for_states(folder, hosts, coordinator)
    own, shared = coordinator.broadcast(lambda: (mark(), look()))
    if shared.training:
        own = own._replace(training=shared.training)
    choice = choose(found, own, shared.steps)
    taken = choice.taken
    if taken is not None:
        _spread(folder / taken.name, hosts, coordinator)
        what = f"{taken.name} (step {taken.steps})"
    else:
        what = "no state on hosts" if shared.steps < 0 else f"that of the shared disk (step {shared.steps})"
    _say(folder, choice, what, coordinator)
    return taken, shared


def _look_for_states(folder: Path, hosts: Hosts, coordinator: Coordinator) -> list[FoundState]:
    """The states that all hosts have between them, the newest first (all ranks, in a meeting)."""
    looks = coordinator.rank == hosts.leader and os.path.lexists(folder)
    mine = coordinator.run_on_all(as_read_error(folder)(lambda: states_in(own_folder(folder)) if looks else []))
    return joined(coordinator.all_gather(mine))


def _say(folder: Path, choice: Chosen, what: str, coordinator: Coordinator) -> None:
    if choice.passed_over and coordinator.is_main:
        logger.warning(
            f"{folder}: {what} is taken. Not taken: {'; '.join(choice.passed_over)}. These stay there: to go on from "
            "a whole one, give its folder to load_state; else remove it."
        )


def _spread(place: Path, hosts: Hosts, coordinator: Coordinator) -> None:
    """Write all files of a state but the pieces on hosts that lack them (all ranks, in a meeting)."""
    has_it = coordinator.all_gather((place / MANIFEST).is_file())
    if all(hosts.of_leaders(has_it)) or not any(has_it):
        return
    tree = coordinator.broadcast(lambda: tree_of(place), has_it.index(True))

    def add() -> None:
        if coordinator.rank == hosts.leader and not has_it[coordinator.rank]:
            publication = begin_in(own_folder(place.parent), takes=False)  # a save that is under way goes on
            write_tree(publication.temporary / place.name, tree)
            (publication.temporary / place.name / PIECES).mkdir(mode=0o700)
            publication.commit("", "")

    coordinator.run_on_all(as_read_error(place.parent)(add))


@contextmanager
def pieces_mounted(place: Path, coordinator: Coordinator) -> Iterator[None]:
    """Inside, loads read shards of the state on hosts in the folder `place` from pieces (all ranks, in a meeting).

    Raises:
        CheckpointError: on all ranks: the record of the state is not sound, or no host has one of the pieces.
    """
    hosts = Hosts.meet(coordinator)
    _spread(place, hosts, coordinator)
    look = partial(_look, place, coordinator.rank == hosts.leader)
    state, there = coordinator.run_on_all(as_read_error(place)(look))
    of_hosts = hosts.of_leaders(coordinator.all_gather(there))
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
        clients: dict[int, Any] = {}
        server: Any = None
        if relays := any(readers):  # else each host has every piece
            relay = tool("relay", "relay", f"{place}: to read pieces that lie on other hosts")
            with coordinator.naming_dead_rank():
                group = dist.new_group(backend="gloo")
            asking = [rank for rank, of_rank in enumerate(readers) if coordinator.rank in of_rank]
            for reader in sorted({*reader_of.values()}):
                clients[reader] = relay.RelayedFiles(here, reader, group, shares_group=True)
                clients[reader].add(pieces)
            if asking:
                server = relay.RelayServer(here, asking, group, shares_group=True)
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
