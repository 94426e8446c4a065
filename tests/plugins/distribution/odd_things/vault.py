"""A source: ``vault://name`` is the file `name` in the folder that VAULT names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hf_zero_stream.sources.base import Hints, Retries, SourceFile
from hf_zero_stream.sources.local import LocalFiles


def _place(path: str) -> str:
    return os.path.join(os.environ["VAULT"], path.removeprefix("vault://"))


class VaultFiles:
    """Local files under other names."""

    def __init__(self, retries: Retries) -> None:
        self._files = LocalFiles(retries=retries)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def open_file(self, path: str) -> Any:
        return self._files.open_file(_place(path))

    def add(self, files: Sequence[SourceFile]) -> None:
        self._files.add([replace(file, path=_place(file.path)) for file in files])

    def hints(self, paths: Sequence[str]) -> Hints:
        return self._files.hints([*map(_place, paths)])


def source(retries: Retries) -> VaultFiles:
    return VaultFiles(retries)
