"""Folders that another source gives: by each load for itself, also of two that have the same one at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from hf_zero_stream.sources.base import ByteSource, Retries
from hf_zero_stream.sources.by_path import FilesByPath, mounted, mounted_folders
from hf_zero_stream.sources.local import LocalFiles


def maker(made: list[str], name: str) -> Callable[[Retries], ByteSource]:
    def make(retries: Retries) -> ByteSource:
        made.append(name)
        return LocalFiles(retries=retries)

    return make


def look(path: Path) -> None:
    with FilesByPath(LocalFiles(), Retries(), lambda url: lambda retries: LocalFiles()).open_file(str(path)):
        pass


def test_one_folder_twice(tmp_path: Path) -> None:
    """The inner one reads from its own source, the outer one from its own again."""
    made: list[str] = []
    (path := tmp_path / "file").write_bytes(b"12345678")
    with mounted(tmp_path, maker(made, "outer")):
        with mounted(tmp_path, maker(made, "inner")):
            look(path)
        look(path)
    look(path)
    assert made == ["inner", "outer"] and mounted_folders() == []


def test_two_threads(tmp_path: Path) -> None:
    """One that comes and goes while another has the same folder."""
    made: list[str] = []
    (path := tmp_path / "file").write_bytes(b"12345678")
    is_there, goes = threading.Event(), threading.Event()

    def other() -> None:
        with mounted(tmp_path, maker(made, "other")):
            is_there.set()
            goes.wait(30)

    thread = threading.Thread(target=other)
    thread.start()
    is_there.wait(30)
    look(path)
    with mounted(tmp_path, maker(made, "mine")):
        look(path)
        goes.set()
        thread.join()
        look(path)
    assert made == ["mine", "mine"]
