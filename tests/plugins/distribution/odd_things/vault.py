"""A source: ``vault://shelf/name`` is the file or folder `name` in the folder that VAULT names, under `shelf`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_zero_stream.errors import ReadError, UrlError
from hf_zero_stream.plugin_api import Hints, LocalFiles, Retries, SourceFile, read_map, shards_of


def _place(path: str) -> Path:
    return Path(os.environ["VAULT"], path.removeprefix("vault://"))


class VaultFiles:
    """Local files under other names, which say that they are far away."""

    def __init__(self, retries: Retries) -> None:
        self._files = LocalFiles(retries=retries)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def open_file(self, path: str) -> Any:
        return self._files.open_file(str(_place(path)))

    def add(self, files: Sequence[SourceFile]) -> None:
        self._files.add([replace(file, path=str(_place(file.path))) for file in files])

    def hints(self, paths: Sequence[str]) -> Hints:
        return Hints(2**20, is_remote=True, is_everywhere=True, streams_per_rank=2)


def source(retries: Retries) -> VaultFiles:
    return VaultFiles(retries)


# What commands and loads of transformers ask of a scheme.


def canonical(path: str, revision: str | None = None, token: Any = None) -> str:
    if path.count("/") < 3:
        raise UrlError(f"{path}: expected vault://shelf/name")
    return path.rstrip("/")


def prefetching(url: str, names: Sequence[str]) -> AbstractContextManager[None]:
    return nullcontext()


def has_file(url: str, name: str) -> bool:
    return (_place(url) / name).is_file()


def shards(url: str) -> tuple[list[str], Mapping[str, str] | None]:
    files, weight_map = shards_of(_place(url))
    return [f"{url}/{os.path.basename(file)}" for file in files], weight_map


def checked(url: str, faults: list[Any]) -> tuple[list[str], Mapping[str, str] | None, dict[str, Any]]:
    files, weight_map = shards_of(_place(url))
    maps = {os.path.basename(file): read_map([file]) for file in files}
    return [*maps], weight_map, maps


def cached_files(original: Any, path_or_repo_id: Any, filenames: Sequence[str], **kwargs: Any) -> list[str] | None:
    if not str(path_or_repo_id).startswith("vault://"):
        found: list[str] | None = original(path_or_repo_id, filenames, **kwargs)
        return found
    url = canonical(path_or_repo_id)
    for name in filenames:
        if not has_file(url, name):
            if kwargs.get("_raise_exceptions_for_missing_entries", True):
                raise ReadError(f"{url}/{name}: there is no such file")
            return None
    return [f"{url}/{name}" if name.endswith(".safetensors") else str(_place(url) / name) for name in filenames]
