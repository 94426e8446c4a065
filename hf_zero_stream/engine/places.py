"""Finds a checkpoint: a folder, a snapshot in the Hub's cache, a URL, or a repository on the Hub."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoint.index import shards_of
from ..checkpoint.urls import checkpoints_at
from ..errors import HfZeroStreamError, ReadError
from ..settings import scope
from ..sources.base import is_url


if TYPE_CHECKING:
    from ..checkpoint.map import CheckpointMap


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
        hint = f" To read it from the Hub without a download: hf://{path}." if _is_id(path) else ""
        raise ReadError(
            f"{path}: there is no such file or folder, and no such repository in the Hub's cache. Check the path, or "
            f"download the checkpoint first.{hint}"
        ) from error


@contextmanager
def place_of(path: str, revision: str | None) -> Iterator[str]:
    """Find a checkpoint: `path` itself, the snapshot in the Hub's cache if that has all shards, or a URL.

    Small files behind a URL may be fetched inside, each once; they are gone afterwards.
    """
    with scope.inside():
        if not is_url(path):
            if os.path.exists(path):
                yield path
                return
            if not _is_id(path):
                raise ReadError(
                    f"{path}: there is no such file or folder, and it is no id of a repository on the Hub."
                )
            if _is_cached_whole(path, revision):
                yield str(cached_folder(path, revision))
                return
        url = path if is_url(path) else f"hf://{path}"
        known = checkpoints_at(url)
        url = known.canonical(url, revision)
        try:
            with known.prefetching(url, ()):
                yield url
        except ReadError as error:
            if is_url(path):
                raise
            raise ReadError(f"{path}: there is no such file or folder, and on the Hub: {error}") from error


def read_checkpoint_map(place: str) -> CheckpointMap:
    """Map the checkpoint at `place` by its headers; no weight is read."""
    from ..checkpoint.formats import contents_of

    if not is_url(place):
        return contents_of(place)
    from ..ranks.coordinator import Coordinator
    from ..settings.config import StreamingConfig
    from .opened import OpenCheckpoint

    paths, weight_map = checkpoints_at(place).shards(place)
    with closing(OpenCheckpoint(StreamingConfig(), Coordinator(0, 1, alone=True))) as checkpoint:
        return checkpoint.map_from_headers(paths, checkpoint.read_headers(paths), weight_map)


def _is_id(path: str) -> bool:
    """Whether `path` may be the id of a repository on the Hub; "/name" and "~/name" are paths."""
    return re.fullmatch(r"\b[\w.-]+\b(/\b[\w.-]+\b)?", path, re.ASCII) is not None


def _is_cached_whole(repository: str, revision: str | None) -> bool:
    """Whether the Hub's cache has all shards; after an inspection it has only the small files."""
    try:
        folder = cached_folder(repository, revision)
        return all(map(os.path.exists, shards_of(folder)[0]))
    except HfZeroStreamError:
        return False
