"""Finds a checkpoint: a folder, a snapshot in the Hub's cache, a URL, or a repository on the Hub."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from .. import scope
from ..errors import HfZeroStreamError, ReadError
from ..sources.urls import Repository, is_url


if TYPE_CHECKING:
    from ..checkpoint.index import CheckpointIndex

__all__ = ["cached_folder", "index_of", "place_of"]


def cached_folder(path: str, revision: str | None) -> Path:
    """The folder (or single file) at `path`, else the snapshot of that repository in the Hub's cache."""
    if os.path.exists(path):
        return Path(path)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, revision=revision, local_files_only=True))
    except (OSError, ValueError) as error:
        # Files are missing from the snapshot; whether they matter is for the readers of the folder to say.
        if incomplete := getattr(error, "snapshot_path", None):
            return Path(incomplete)
        raise ReadError(
            f"{path}: there is no such file or folder, and no such repository in the Hub's cache. Check the path, or "
            f"download the checkpoint first. What the Hub has is hf://{path}."
        ) from error


@contextmanager
def place_of(path: str, revision: str | None) -> Iterator[str]:
    """Where a checkpoint is: `path` itself, the snapshot in the Hub's cache if that has all shards, or a URL.

    Of what is behind a URL, small files may be fetched inside; they are gone afterwards.
    """
    with scope.inside():
        if is_url(path) or os.path.exists(path):
            yield path
        elif _is_cached_whole(path, revision):
            yield str(cached_folder(path, revision))
        elif path.count("/") != 1 or path.startswith("."):
            raise ReadError(f"{path}: there is no such file or folder, and no repository on the Hub has such an id.")
        else:
            yield Repository(path, revision or "", "").url


def index_of(place: str) -> CheckpointIndex:
    """All tensors of the checkpoint at `place`, from the headers of its shards."""
    from ..checkpoint.at_url import shards_at
    from ..checkpoint.index import CheckpointIndex
    from ..checkpoint.soundness import shards_of
    from ..config import StreamingConfig
    from ..engine.opened import OpenCheckpoint
    from ..ranks.coordinator import Coordinator

    if not is_url(place):
        return CheckpointIndex.from_files(*shards_of(place))
    paths, weight_map = shards_at(place)
    with closing(OpenCheckpoint(StreamingConfig(), Coordinator(0, 1, alone=True))) as checkpoint:
        return CheckpointIndex.from_headers(paths, checkpoint.read_headers(paths), weight_map)


def _is_cached_whole(repository: str, revision: str | None) -> bool:
    """Whether the Hub's cache has all shards; after an inspection it has only the small files."""
    from ..checkpoint.soundness import shards_of

    try:
        return all(map(os.path.exists, shards_of(cached_folder(repository, revision))[0]))
    except HfZeroStreamError:
        return False
