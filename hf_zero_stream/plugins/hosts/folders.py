"""States in folders of the hosts' own: what lies there, who may read it, and which of them are whole.

The folder of a host has a folder for each state, with what the ranks of this host wrote, and copies of what those of
others did::

    state-00000012-1-3f9a0c51/host_state.json      which host has which piece, with sizes and digests
    state-00000012-1-3f9a0c51/runs                 which bytes of which shard lie where in which piece
    state-00000012-1-3f9a0c51/config.json, ...     a checkpoint with a state, as save_state writes it; but shards
                                                   are cut off after their headers
    state-00000012-1-3f9a0c51/pieces/rank-00003    the bytes that rank 3 wrote

All but the pieces lies on every host. A stock reader refuses shards that are cut off, and so do ours outside of
:func:`.load.pieces_mounted`.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import socket
import stat
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from transformers.utils import logging

from ...errors import CheckpointError, ConfigError, ReadError, SaveError, system_errors_as
from ...plugin_api import (
    UNFINISHED,
    Coordinator,
    Publication,
    as_save_error,
    digest_of_range,
    is_of_save,
    is_plain_name,
    parse_object,
    settings_in_force,
)
from .choice import FoundState, piece_name
from .pieces import PiecedFile, RunTable


logger = logging.get_logger(__name__)

T = TypeVar("T")

MANIFEST = "host_state.json"
RUNS = "runs"
PIECES = "pieces"
_PREFIX = "state-"
_FORMAT, _VERSION = "hf_zero_stream state on hosts", 2


@dataclass(frozen=True)
class Hosts:
    """The hosts of a process group: the ranks of each, its name, and which is this rank's."""

    ranks: Sequence[Sequence[int]]
    names: Sequence[str]
    mine: int

    @classmethod
    def meet(cls, coordinator: Coordinator) -> Hosts:
        """The hosts of the ranks that have met (all ranks)."""
        ranks = [coordinator.rank] if coordinator.is_alone else [*coordinator.topology.ranks_of_host]
        everyone = coordinator.all_gather((ranks, socket.gethostname()))
        names = {tuple(of_host): name for of_host, name in reversed(everyone)}
        found = sorted(names)
        return cls(found, [names[of_host] for of_host in found], found.index(tuple(ranks)))

    @property
    def leader(self) -> int:
        """The rank that acts for this host: its first one."""
        return self.ranks[self.mine][0]

    def of_leaders(self, of_ranks: Sequence[T]) -> list[T]:
        """What the first rank of each host has said, of what all that have met, or this one alone, have."""
        return [of_ranks[ranks[0] if len(of_ranks) > 1 else 0] for ranks in self.ranks]

    def host_of(self, rank: int) -> int:
        """The number of the host of a rank."""
        return next(number for number, ranks in enumerate(self.ranks) if rank in ranks)


@dataclass(frozen=True)
class PieceRecord:
    """Bytes that a rank wrote: how many, their digest, and the numbers of the hosts that have them, its own first."""

    size_bytes: int
    digest: int
    hosts: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class HostState:
    """The contents of the file :data:`MANIFEST`.

    Attributes:
        id: no other state has it.
        steps: that the optimizer had made: how far the training had come.
        number: tells apart the states of one step; later ones have greater ones, as far as the hosts knew.
        training: the id of the training that has saved it (:mod:`...bindings.history`).
        facts: what tells the training from others that were set up in another way (:func:`.choice.facts_of`).
        hosts: their names.
        shards: name, bytes of the header, and bytes of each.
        pieces: of each rank that saved.
    """

    id: str
    steps: int
    number: int
    training: str
    facts: Mapping[str, Any]
    hosts: Sequence[str]
    shards: Sequence[tuple[str, int, int]]
    pieces: Sequence[PieceRecord]

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{_PREFIX}{self.steps:08d}-{self.number}-{self.id}"

    def found(self, there: frozenset[int]) -> FoundState:
        """This state, of which the pieces of these ranks are `there`."""
        holders = [[self.hosts[host] for host in piece.hosts] for piece in self.pieces]
        return FoundState(self.name, self.steps, self.number, self.training, self.facts, there, holders)

    def to_json(self) -> str:
        return json.dumps({"format": _FORMAT, "version": _VERSION, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def read(cls, place: Path) -> HostState:
        """That of the state in the folder `place`; raises a CheckpointError if it is none."""
        path = place / MANIFEST
        try:
            found = parse_object(path.read_bytes(), str(path))
            if (found.pop("format", None), found.pop("version", None)) != (_FORMAT, _VERSION):
                raise ValueError("another format or version")
            pieces = [
                PieceRecord(int(each["size_bytes"]), int(each["digest"]), each["hosts"]) for each in found["pieces"]
            ]
            shards = [(str(name), int(header), int(size)) for name, header, size in found["shards"]]
            hosts = [*map(str, found["hosts"])]
            if any(not 0 <= host < len(hosts) for piece in pieces for host in piece.hosts):
                raise ValueError("a piece is on a host that there is not")
            if any(not all(map(is_plain_name, name.split("/"))) for name, _, _ in shards):
                raise ValueError("the name of a shard leads out of the folder")
            state = cls(
                id=str(found["id"]),
                steps=int(found["steps"]),
                number=int(found["number"]),
                training=str(found["training"]),
                facts=dict(found["facts"]),
                hosts=hosts,
                shards=shards,
                pieces=pieces,
            )
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: expected the record of a state on hosts: {error!r}") from error
        if state.name != place.name:
            raise CheckpointError(f"{path}: expected that of {place.name}; found that of {state.name}")
        return state

    def files(self, place: Path) -> tuple[dict[str, PiecedFile], RunTable]:
        """Its shards, by their paths in the folder `place`, and where their bytes lie.

        Raises a CheckpointError if the file of runs is not sound.
        """
        headers, sizes = [header for _, header, _ in self.shards], [size for _, _, size in self.shards]
        try:
            table = RunTable((place / RUNS).read_bytes(), headers, sizes, [piece.size_bytes for piece in self.pieces])
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{place / RUNS}: expected where the bytes of shards lie: {error}") from error
        paths = [os.path.abspath(place / name) for name, _, _ in self.shards]
        return {path: PiecedFile(path, *self.shards[shard][1:], shard) for shard, path in enumerate(paths)}, table


def own_folder(folder: Path) -> Path:
    """Make `folder`, for this user alone, if it is not there.

    Raises:
        SaveError: it cannot be made; it is a link, or belongs to somebody else, or others may write into it.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        status = os.lstat(folder)
    except OSError as error:
        raise SaveError(
            f"{folder}: cannot be made: {error.strerror or error}. Give a folder of a local disk."
        ) from error
    refuse_foreign(folder, status)
    return folder


def refuse_foreign(folder: Path, status: os.stat_result) -> None:
    """Raise a SaveError unless this is the status of a folder of this user, into which nobody else may write."""
    fault = ""
    if not stat.S_ISDIR(status.st_mode):
        fault = "is a link" if stat.S_ISLNK(status.st_mode) else "is a file"
    elif status.st_uid != os.geteuid():
        fault = f"belongs to user {status.st_uid}"
    elif status.st_mode & 0o022:
        fault = f"may be written by others (mode {stat.S_IMODE(status.st_mode):o})"
    if fault:
        raise SaveError(
            f"{folder}: expected a folder of user {os.geteuid()}, into which nobody else may write; it {fault}. "
            "Give another one, or let save_state make it."
        )


_apart: set[tuple[Path, tuple[str, ...]]] = set()
"""Folders, and names of hosts, of which it was seen that each host has its own."""


def refuse_shared(folder: Path, hosts: Hosts, coordinator: Coordinator) -> None:
    """Raise a ConfigError on all ranks if several hosts see the same `folder`; looks once in a process."""
    key = folder, tuple(hosts.names)
    if all(coordinator.all_gather(key in _apart)):
        return
    is_leader = coordinator.rank == hosts.leader
    marks = [folder / f".host-{name}" for name in coordinator.all_gather(uuid.uuid4().hex)]
    mine = marks[coordinator.rank]
    try:

        def mark() -> None:
            if is_leader:
                own_folder(folder)
                mine.touch()

        def look() -> None:
            for number, ranks in enumerate(hosts.ranks):
                if number != hosts.mine and marks[ranks[0]].exists():
                    raise ConfigError(
                        f"{folder}: expected a folder on a disk, or in the memory, of one host; "
                        f"{hosts.names[hosts.mine]} and {hosts.names[number]} see the same one. Save there without "
                        "hosts=True."
                    )

        coordinator.run_on_all(as_save_error(folder)(mark))
        coordinator.run_on_all(as_save_error(folder)(look))
        _apart.add(key)
    finally:
        with suppress(OSError):
            mine.unlink()


@contextmanager
def as_read_error(folder: Path) -> Iterator[None]:
    """Turn an error of the system inside, where loads look into the `folder` of this host, into a ReadError."""
    doing = f"{socket.gethostname()} cannot use its folder of states"
    with system_errors_as(ReadError, folder, doing, "Mend its disk, or go on without this host."):
        yield


def states_in(folder: Path) -> list[FoundState]:
    """The states in the folder of this host; those that are of somebody else are left out."""
    found = []
    for place in sorted(folder.glob(f"{_PREFIX}*")):
        try:
            refuse_foreign(place, os.lstat(place))
            state = HostState.read(place)
            there = pieces_in(place, state)
        except (OSError, SaveError, CheckpointError) as error:
            logger.warning(f"{place}: is not taken for a state: {error}")
            continue
        found.append(state.found(there))
    return found


def pieces_in(place: Path, state: HostState) -> frozenset[int]:
    """The ranks whose pieces of the `state` lie on this host; with ``verify="full"`` not those that have changed."""
    compares = settings_in_force().verify == "full"
    paths = [place / PIECES / piece_name(rank) for rank in range(len(state.pieces))]
    return frozenset(rank for rank, path in enumerate(paths) if _is_there(path, state.pieces[rank], compares))


def _is_there(path: Path, piece: PieceRecord, compares: bool) -> bool:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_size != piece.size_bytes:
        return False
    found = _digest_of(path, piece.size_bytes, status.st_ino, status.st_mtime_ns) if compares else piece.digest
    if found != piece.digest:
        logger.warning(
            f"{path}: expected bytes with the digest {piece.digest:016x}; found {found:016x}. It is not "
            "read: the copy of another host is, or else an older state."
        )
    return found == piece.digest


@functools.lru_cache(maxsize=1024)  # a resume first looks for the newest state, and then reads it
def _digest_of(path: Path, nbytes: int, inode: int, changed_ns: int) -> int:
    return digest_of_range(path, 0, nbytes)


def tree_of(place: Path) -> dict[str, bytes]:
    """All files in `place` but the pieces, by their names in there."""
    paths = [path for path in place.rglob("*") if path.is_file() and path.parent.name != PIECES and is_of_save(path)]
    return {str(path.relative_to(place)): path.read_bytes() for path in paths}


def write_tree(place: Path, tree: Mapping[str, bytes]) -> None:
    """Write files, by their names, into the folder `place`."""
    place.mkdir(mode=0o700, exist_ok=True)
    for name, data in tree.items():
        path = place / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_bytes(data)


def begin_in(folder: Path, *, takes: bool = True) -> Publication:
    """Begin a save into the folder of this host; see :meth:`...saving.publication.Publication.begin`."""
    publication = Publication.begin(own_folder(folder), takes=takes)
    publication.temporary.chmod(0o700)
    return publication


def remove_states(folder: Path, names: Iterable[str]) -> None:
    """Remove the states of these names that are in the folder of this host.

    Each goes as a whole: if the process ends meanwhile, the next save removes the rest. One that cannot be removed
    stays, and a warning says so: the state that has come after it is whole.
    """
    for place in (folder / name for name in names):
        left = folder / f"{UNFINISHED}{uuid.uuid4().hex[:12]}"
        try:
            place.rename(left)
        except FileNotFoundError:  # this host has nothing of it, or somebody else was faster
            continue
        except OSError as error:
            logger.warning(f"{place}: this older state cannot be removed: {error.strerror or error}. It stays there.")
            continue
        shutil.rmtree(left, ignore_errors=True)


def remove_states_of(folder: Path, training: str, steps: int) -> None:
    """Remove the states in the folder of this host that a training had made by so many steps."""
    with suppress(SaveError, OSError):  # it is gone, or of somebody else; or others are in there
        refuse_foreign(folder, os.lstat(folder))
        for place in folder.glob(f"{_PREFIX}*"):
            with suppress(CheckpointError):  # another rank was faster
                state = HostState.read(place)
                if state.training == training and state.steps <= steps:
                    remove_states(folder, [place.name])
        folder.rmdir()
