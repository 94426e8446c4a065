"""Where a save goes. A place says how bytes get there, and how they become visible; folders are the core's."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch

from ..checkpoint.urls import checkpoints_at, without_secrets
from ..errors import ConfigError, UrlError
from ..ranks.coordinator import Coordinator
from ..registry import broken_plugins, import_named, plugins
from ..reports.save import SavingRank
from ..sources.base import is_url
from .background import Staged, StagedFiles
from .files import Comparison, ShardWriter, reserve
from .preparation import Finalizer, WritePlan
from .publication import Publication
from .snapshot import Copies
from .write import Work, bytes_of


T = TypeVar("T")


class Written(NamedTuple):
    """What a save has written: what each rank did, and the names of the shards below the place."""

    ranks: list[SavingRank]
    names: Sequence[str]


class Publishing(Protocol):
    """A save at a place, as :class:`.publication.Publication` is one into a folder; made and ended on rank 0.

    Until :meth:`commit`, whoever loads from the place finds what was there before; so it is if a process dies.
    """

    @property
    def temporary(self) -> Path:
        """A folder of this host, for small files and for shards, or their headers."""

    def commit(self, weights_name: str, index_name: str, last_name: str = "", replaced: Sequence[str] = ()) -> None:
        """See :meth:`.publication.Publication.commit`."""

    def abandon(self) -> None:
        """Remove what has been written, unless it has begun to be visible.

        Raises a PlaceTakenError if another save has taken the place: that is why this one failed.
        """


class Place(ABC):
    """Where a save goes.

    Attributes:
        why_copies: why a save there in the background copies all that it writes; "" if it does not.
        all_write: all ranks give what they hold, whatever the setting `write_from` says.
        is_shared: what is saved there is whole for whoever sees the place.
    """

    why_copies = ""
    all_write = True
    is_shared = True

    def __init__(self, location: Path | str) -> None:
        self.location = location

    @abstractmethod
    def begin(self) -> Any:
        """Begin a save, which is a :class:`Publishing` (rank 0); asks no server."""

    def meet(self, work: Work) -> None:
        """Agree on what ranks must know of each other to save there (all ranks, in a meeting)."""

    def reserve(self, folder: Path, plan: WritePlan) -> None:
        """Make the shards in the temporary `folder` (rank 0): headers, at the shards' sizes, which take no room."""
        reserve(plan.paths(folder), plan.shards, on_disk=False)

    @abstractmethod
    def write(self, work: Work, publication: Any, plan: WritePlan, finalizer: Finalizer) -> Written:
        """Write all shards, and publish (all ranks)."""

    @abstractmethod
    def stage(self, work: Work, publication: Any, plan: WritePlan, finalizer: Finalizer, copies: Copies) -> Staged:
        """Take what :meth:`write` writes, for threads that go on (all ranks); after an error nothing is left of it."""


class Folder(Place):
    """A folder that rank 0 sees."""

    all_write = False

    def begin(self) -> Publication:
        return Publication.begin(Path(self.location))

    def reserve(self, folder: Path, plan: WritePlan) -> None:
        """So a full disk shows immediately."""
        reserve(plan.paths(folder), plan.shards)

    def write(self, work: Work, publication: Publication, plan: WritePlan, finalizer: Finalizer) -> Written:
        paths, has_digests = plan.paths(publication.temporary), finalizer.needs_digests
        writer = ShardWriter(paths, has_digests=has_digests)
        digests = write_files(work, plan, writer, lambda: Comparison(paths), lambda: plan.named(writer.digests))
        ranks = work.publish(finalizer, publication, plan, digests if has_digests else [])
        return Written(ranks, plan.names)

    def stage(
        self, work: Work, publication: Publication, plan: WritePlan, finalizer: Finalizer, copies: Copies
    ) -> Staged:
        paths = plan.paths(publication.temporary)
        writer = ShardWriter(paths, has_digests=finalizer.needs_digests)

        def publish(coordinator: Coordinator) -> None:
            digests = coordinator.all_gather(plan.named(writer.digests))
            with work.clock("publish"):
                coordinator.run_on_main(partial(finalizer.publish, publication, plan, digests))

        return StagedFiles(work, plan, copies, writer, lambda: Comparison(paths), publish)


def write_files(
    work: Work, plan: WritePlan, writer: ShardWriter, compared: Callable[[], Comparison], finish: Callable[[], T]
) -> list[T]:
    """Carry out the plan, into a `writer` of files, and compare them if the save is verified (all ranks).

    Returns what `finish` gives on each rank when its files are on the disk; the writer is closed.
    """

    def synced() -> T:
        writer.sync()
        return finish()

    with closing(writer):
        found = _through(writer, work, plan, "write", "Writing", synced)
    if work.verifies:
        with closing(compared()) as comparison:
            _through(comparison, work, plan, "verify", "Verifying", lambda: None)
    return found


def _through(
    writer: ShardWriter, work: Work, plan: WritePlan, phase: str, doing: str, finish: Callable[[], T]
) -> list[T]:
    """Carry out the plan, into a `writer` of files, and `finish` (all ranks)."""
    with work.bar(plan, plan.plan.bytes_written, doing) as advance:

        def put(shard: int, position: int, pieces: Sequence[torch.Tensor]) -> None:
            buffers = [bytes_of(piece) for piece in pieces]
            writer.put(shard, position, buffers)
            advance(sum(map(len, buffers)))

        return work.execute(phase, plan, put, finish)


class UrlPlaces(Protocol):
    """The functions of a plug-in's module for saves to URLs (``Plugin.targets``)."""

    def place(self, url: str) -> Place:
        """The place, whose location has no slashes at its end; a UrlError if nothing can be saved there."""

    def finish_interrupted(self, url: str) -> None:
        """Finish the save to `url` that has happened and died before all was done; raises a SaveError."""

    def names(self, url: str) -> set[str]:
        """The names of what lies directly below `url`, those of folders with a slash behind; raises a SaveError."""

    def put(self, url: str, data: bytes) -> None:
        """Write a small file, over what is there; raises a SaveError."""

    def small_files(self, url: str) -> dict[str, bytes]:
        """What lies below `url`, by its name there, but for shards; saves that have happened are finished before."""

    def has_save(self, url: str) -> bool:
        """Whether a save of ours has been at `url`; raises a SaveError."""

    def remove(self, url: str, first: str) -> None:
        """Remove all below `url`, its file `first` before all others; raises a SaveError."""


def places_at(url: Any) -> UrlPlaces:
    """The functions for saves to URLs such as `url`.

    Raises:
        MissingPluginError: the plug-in of this package is not there.
        UrlError: no plug-in writes to this scheme.
    """
    checkpoints_at(url)  # raises if nothing can be read there either
    scheme = str(url).partition(":")[0].lower()
    modules = {scheme: module for plugin in plugins() for scheme, module in plugin.targets.items()}
    if scheme not in modules:
        raise UrlError(
            f"{without_secrets(str(url))!r}: checkpoints are read from {scheme}:// and not written there; expected a "
            f"folder, or one of {', '.join(f'{known}://' for known in modules)}. Save into a folder, then upload it "
            "from one rank (a repository of the Hub: `hf upload ORGANISATION/NAME FOLDER`). "
            f"{broken_plugins()}".rstrip()
        )
    return cast(UrlPlaces, import_named(modules[scheme]))


def place_at(folder: str | os.PathLike[str]) -> Place:
    """The place that `folder` names: a folder, or a URL that can be saved to; raises as :func:`places_at`."""
    return places_at(folder).place(str(folder)) if is_url(folder) else Folder(Path(folder))


def refuse_other_places(of_ranks: Sequence[Path | str]) -> None:
    """Raise a ConfigError if only some ranks save to a URL, or to another one; folders may have other names."""
    first = of_ranks[0]
    for rank, place in enumerate(of_ranks):
        if place != first and not (isinstance(place, Path) and isinstance(first, Path)):
            raise ConfigError(
                f"Expected one place to save to on all ranks; rank {rank} saves to {place}, rank 0 to {first}."
            )
