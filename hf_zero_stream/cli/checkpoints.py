"""Finds a checkpoint: a folder, a snapshot in the Hub's cache, or on the Hub, from which only headers are fetched."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from ..errors import CheckpointError, HfZeroStreamError, ReadError


__all__ = ["cached_folder", "headers"]

_SMALL_FILES = ["*.json", "*.py"]
_NOT_NEEDED = ["tokenizer*", "vocab*", "special_tokens*", "*preprocessor*", "*processor*", "chat_template*"]
_FIRST_BYTES = 100_000
"""Enough for most headers, so that a shard costs one request; huggingface_hub asks for as many."""
_REQUESTS_AT_ONCE = 8


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
            "download the checkpoint first."
        ) from error


@contextmanager
def headers(path: str, revision: str | None) -> Iterator[Path]:
    """A folder with a checkpoint's configuration, index and headers, but maybe no data.

    It is `path` itself, or the snapshot in the Hub's cache if that has all shards. Else the small files and the
    shards' headers are fetched from the Hub into a temporary folder, where each shard becomes a sparse file of its
    full size, which takes next to no disk space.
    """
    if os.path.exists(path) or _is_cached_whole(path, revision):
        yield cached_folder(path, revision)
        return
    with tempfile.TemporaryDirectory(prefix="hf-zero-stream-") as name:
        try:
            _fetch(path, revision, Path(name))
        except HfZeroStreamError:
            raise
        except (OSError, ValueError) as error:
            raise ReadError(
                f"{path}: there is no such file or folder, and the Hub does not give it: {error}"
            ) from error
        yield Path(name)


def _is_cached_whole(repository: str, revision: str | None) -> bool:
    """Whether the Hub's cache has all shards; after an inspection it has only the small files."""
    from ..checkpoint.soundness import shards_of

    try:
        return all(map(os.path.exists, shards_of(cached_folder(repository, revision))[0]))
    except HfZeroStreamError:
        return False


def _fetch(repository: str, revision: str | None, folder: Path) -> None:
    from huggingface_hub import snapshot_download

    from ..checkpoint.soundness import INDEX, SINGLE, shards_of

    small = Path(
        snapshot_download(repository, revision=revision, allow_patterns=_SMALL_FILES, ignore_patterns=_NOT_NEEDED)
    )
    for file in small.rglob("*"):
        if file.is_file() and file.suffix != ".safetensors":
            target = folder / file.relative_to(small)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(file.resolve())
    has_index = (folder / INDEX).exists()
    names = [os.path.relpath(shard, folder) for shard in shards_of(folder)[0]] if has_index else [SINGLE]
    with ThreadPoolExecutor(_REQUESTS_AT_ONCE) as threads:
        # The snapshot's folder is named by its commit: request the shards of the same commit.
        list(threads.map(lambda name: _fetch_header(repository, small.name, name, folder / name), names))


def _fetch_header(repository: str, commit: str, name: str, target: Path) -> None:
    """Write a sparse file with the size and the header of a shard on the Hub."""
    from huggingface_hub import hf_hub_url

    from ..checkpoint.safetensors import MAX_HEADER_BYTES

    what, url = f"{repository}/{name}", hf_hub_url(repository, name, revision=commit)
    prefix, size_bytes = _fetch_range(what, url, 0, _FIRST_BYTES)
    stop = 8 + int.from_bytes(prefix[:8], "little")
    if stop > 8 + MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{what}: header length: at most {MAX_HEADER_BYTES} bytes are allowed, found {stop - 8}. "
            "This is probably not a safetensors file."
        )
    if len(prefix) < min(stop, size_bytes):
        prefix += _fetch_range(what, url, len(prefix), stop)[0]
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target, "wb") as file:
        file.write(prefix[:stop])
        file.truncate(size_bytes)


def _fetch_range(what: str, url: str, start: int, stop: int) -> tuple[bytes, int]:
    """(bytes `start` to `stop` of a file on the Hub, or what it has of them; size of the whole file)."""
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

    asked = {**build_hf_headers(), "Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
    try:
        response = http_backoff("GET", url, headers=asked)
        hf_raise_for_status(response)
    except Exception as error:  # huggingface_hub's HTTP library, and so its errors, depend on the version
        raise ReadError(f"{what}: the Hub does not give the header: {error}") from error
    total = re.fullmatch(r"bytes \d+-\d+/(\d+)", response.headers.get("Content-Range", ""))
    if response.status_code != 206 or total is None:
        raise ReadError(f"{what}: the server does not give ranges of files; download the checkpoint.")
    return response.content, int(total[1])
