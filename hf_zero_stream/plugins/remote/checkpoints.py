"""Finds checkpoints in buckets, on servers and on the Hub (:class:`...checkpoint.urls.UrlCheckpoints`).

Nothing is listed there: a web server has no list of files, and who may read a bucket may not be allowed to list it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, ReadError, UrlError
from ...plugin_api import (
    INDEX,
    SINGLE,
    CheckpointMap,
    Fault,
    Retries,
    holds_values,
    map_from_headers,
    read_index_file,
    read_weight_map,
    safetensors,
    scope,
    without_path,
)
from .files import RemoteFiles
from .hub import remember_token
from .lists import LIST, parse_list
from .response_cache import cached_responses
from .small_files import SmallFiles
from .urls import RequestFailed, checkpoint_url, joined, repository_of, scheme_of


_AT_ONCE = 32
_ABSENT = (403, 404)
"""Who may not list a bucket is told 403 of objects that are not there."""


def canonical(path: str, revision: str | None = None, token: Any = None) -> str:
    path = checkpoint_url(path)
    if scheme_of(path) != "hf":
        return path
    repository = repository_of(path)
    remember_token(repository.name, token)
    if revision not in (None, "", "main", repository.revision):
        if repository.revision:
            raise UrlError(f"{path}: expected one revision; got revision={revision!r} too.")
        repository = repository._replace(revision=str(revision))
    return repository.url


def source(retries: Retries) -> RemoteFiles:
    return RemoteFiles(retries)


@contextmanager
def prefetching(url: str, names: Sequence[str]) -> Iterator[None]:
    """Inside, files with these `names` are asked for at once, and each file once."""
    with cached_responses() as cache:
        places = [joined(url, name) for name in names]
        small = [place for place in places if not holds_values(place)]
        scope.resource(SmallFiles).prefetch(small, set(places) - set(small), cache)
        yield


def has_file(url: str, name: str) -> bool:
    """Whether there is such a file in the checkpoint at `url`, as far as the server tells."""
    place = joined(url, name)
    files = scope.resource(SmallFiles)
    try:
        if name.endswith(".safetensors"):
            files.require(place)
        else:
            files.fetch(place)
    except RequestFailed as error:
        if error.status in _ABSENT:
            return False
        raise ReadError(f"{place}: {error}") from error
    return True


def shards(url: str) -> tuple[list[str], dict[str, str] | None]:
    """(URLs of the shards that a load from `url` would read, the index's weight map if there is an index).

    As in transformers, a ``model.safetensors`` goes before an index.

    Raises:
        ReadError: there is neither, or they cannot be read.
        CheckpointError: the index is not sound.
    """
    files = scope.resource(SmallFiles)
    if has_file(url, SINGLE):
        return [files.pinned(joined(url, SINGLE))], None
    weight_map = read_index_file(_index_at(url, files))["weight_map"]
    return [files.pinned(joined(url, name)) for name in sorted(set(weight_map.values()))], weight_map


def _index_at(url: str, files: SmallFiles) -> Path:
    try:
        return files.fetch(joined(url, INDEX))
    except RequestFailed as error:
        raise ReadError(f"{url}: there is no {SINGLE}, and {INDEX} cannot be read: {error}") from error


def checked(url: str, faults: list[Fault]) -> tuple[list[str], dict[str, str] | None, dict[str, CheckpointMap]]:
    names, weight_map, files = [SINGLE], None, scope.resource(SmallFiles)
    if not has_file(url, SINGLE):
        weight_map = read_weight_map(_index_at(url, files), faults)
        names = sorted(set((weight_map or {}).values()))
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        found = dict(zip(names, threads.map(lambda name: _checked_header(url, name, files), names), strict=True))
    faults += [one for one in found.values() if isinstance(one, Fault)]
    return names, weight_map, {name: one for name, one in found.items() if isinstance(one, CheckpointMap)}


def fetched(url: str) -> Path:
    try:
        return scope.resource(SmallFiles).fetch(url)
    except RequestFailed as error:
        if error.status in _ABSENT:
            raise FileNotFoundError(f"{url}: {error}") from error
        raise ReadError(f"{url}: {error}") from error


def catch_up(url: str) -> None:
    try:
        data = fetched(joined(url, LIST)).read_bytes()
    except FileNotFoundError:
        return
    order = parse_list(data, joined(url, LIST))
    contents: dict[str, bytes | None] = dict.fromkeys(order.removes)
    scope.resource(SmallFiles).know({joined(url, name): data for name, data in {**contents, **order.files}.items()})


def _checked_header(url: str, name: str, files: SmallFiles) -> CheckpointMap | Fault:
    """The contents of a shard, or what is wrong with it."""
    path = joined(url, name)
    try:
        return map_from_headers([path], [files.header(path, safetensors.read_header)])
    except (ReadError, CheckpointError) as error:
        is_gone = getattr(error.__cause__, "status", 0) == 404
        kind = "header" if isinstance(error, CheckpointError) else "missing" if is_gone else "unreadable"
        return Fault(name, kind, without_path(error, path))
