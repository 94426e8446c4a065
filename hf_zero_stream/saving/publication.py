"""A save into a folder: its files get their final names when all of them are complete, if it still owns the folder.

Until then everything is in a folder inside the final one, and the earlier files stay. Then a list of the renames to
come is written there, and from that moment on the save has happened: if the process dies while it renames, the next
process that saves to the folder, or streams from it, finishes the list. Shards are renamed first, the index last. An
older index is moved away before the first rename, so that nobody can read an old index with new shards.

A folder belongs to the save that began last. It leaves a mark with each other one that lives, which then is not
published: a job that hung does not replace what its successor has saved. Marks, lists and renames are made under a
lock of the folder. A lock of a file in the temporary folder tells whether its save lives.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from transformers.utils import logging

from ..checkpoint.formats import UNFINISHED
from ..errors import PlaceTakenError, SaveError
from ..sources.base import is_plain_name


logger = logging.get_logger(__name__)

_LIST = "renames.json"
_OURS = ".hf_zero_stream-"
"""Prefix of what a temporary folder holds beside the files of its save."""
_LOCK, _TAKEN, _DONE, _REPLACED = (f"{_OURS}{name}" for name in ("lock", "taken", "done", "replaced"))

LOCK_S = 60.0
"""Seconds that a save waits for another process that gives files their names, which takes a moment if it lives."""

_held: dict[Path, int | None] = {}
"""For each temporary folder of this process, the lock by which others see that it lives; None without locks."""
_handles: set[int] = set()
"""Open handles of locks. A forked process shares them, and would keep the locks when this one has let go."""
_SHARD = re.compile(r"(.*?)-\d{5}-of-\d{5}")


@dataclass(frozen=True)
class Publication:
    """A save into `folder` that is being prepared in the folder `temporary`; made on one rank, and ended there."""

    folder: Path
    temporary: Path

    @classmethod
    def begin(cls, folder: Path, *, takes: bool = True) -> Publication:
        """Finish or remove what dead saves have left, and make the temporary folder.

        If it `takes` the folder, living saves into it are not published any more.
        """
        temporary = folder / f"{UNFINISHED}{uuid.uuid4().hex[:12]}"
        try:
            if folder.exists() and not folder.is_dir():
                raise SaveError(f"{folder}: expected a folder to save into, found a file.")
            folder.mkdir(parents=True, exist_ok=True)
            with _locked(folder, folder):
                _finish_lists(folder)
                for left in folder.glob(f"{UNFINISHED}*"):
                    if not _is_held(left):
                        _remove_temporary(left)
                    elif takes:
                        with suppress(FileNotFoundError):  # it has just ended
                            (left / _TAKEN).write_text(f"process {os.getpid()} on {socket.gethostname()}")
                temporary.mkdir()
                _held[temporary] = _hold(temporary / _LOCK)
        except OSError as error:
            if isinstance(error, SaveError):
                raise
            raise SaveError(
                f"{folder}: cannot write into this folder: {error.strerror or error}. Check that it can be created, "
                "and that you may write there."
            ) from error
        return cls(folder, temporary)

    def abandon(self) -> None:
        """Remove everything that has been written, unless files have begun to get their final names."""
        if not (self.temporary / _LIST).exists():
            shutil.rmtree(self.temporary, ignore_errors=True)
        self._release()

    def _release(self) -> None:
        _let_go(_held.pop(self.temporary, None))

    def commit(self, weights_name: str, index_name: str, last_name: str = "", replaced: Sequence[str] = ()) -> None:
        """Give all files their final names, and remove the shards of an earlier save that are not replaced.

        The index comes after all others, and after it the file `last_name`, if there is one. Then the files and
        folders `replaced` are removed; before, those in whose place there is a new one. Without a `weights_name` no
        weights are among the files.

        Raises:
            PlaceTakenError: another save has begun here since; nothing is published.
            SaveError: the system refuses; an earlier checkpoint is still there, or the next save finishes this one.
        """
        try:
            self._refuse_taken()
            names = sorted(entry.name for entry in self.temporary.iterdir() if is_of_save(entry))
            for path in sorted(self.temporary.rglob("*")):
                _sync(path)
            with _locked(self.folder, self.folder):
                self._refuse_taken()
                _finish_lists(self.folder)
                entries = [entry.name for entry in self.folder.iterdir() if entry.is_file() or entry.is_symlink()]
                outdated = [*outdated_weights(entries, weights_name, index_name, set(names)), *replaced]
                # The index is what makes shards a checkpoint: the old one goes first, the new one comes last.
                order = {
                    "removes_first": sorted({index_name, *replaced} & {*names} | {index_name} & {*outdated}),
                    "renames": sorted(names, key=lambda name: (name == last_name, name == index_name, name)),
                    "removes": [name for name in outdated if name not in names],
                }
                draft = self.temporary / "renames.draft"
                draft.write_text(json.dumps(order))
                _sync(draft)
                os.replace(draft, self.temporary / _LIST)
                _sync(self.temporary)
                _carry_out(self.folder, self.temporary)
            _remove_temporary(self.temporary)
        except OSError as error:
            if isinstance(error, SaveError):
                raise
            has_happened = (self.temporary / _LIST).exists()
            raise SaveError(
                f"{self.folder}: cannot give files their final names: {error.strerror or error}. "
                + (
                    f"They are complete in {self.temporary.name}; saving again, or streaming from the folder, "
                    "finishes it."
                    if has_happened
                    else "What was there before has not been touched."
                )
            ) from error
        finally:
            self._release()

    def _refuse_taken(self) -> None:
        who = ""
        try:
            who = (self.temporary / _TAKEN).read_text()
        except FileNotFoundError:
            if self.temporary.exists():
                return
        raise taken_place(str(self.folder), who)


def is_of_save(path: Path) -> bool:
    """Whether a file or folder in a temporary folder belongs to what is saved, and is no lock or mark."""
    return not path.name.startswith(_OURS)


def taken_place(place: str, who: str = "") -> PlaceTakenError:
    """The error of a save to a folder or a URL that does not own the `place` any more."""
    return PlaceTakenError(
        f"{place}: another save{f' ({who})' if who else ''} has taken this place since this one began, so this one is "
        "not published; what the other has saved, or saves, is not touched. End the job that is not to go on, or give "
        "it another place."
    )


def outdated_weights(there: Iterable[str], weights_name: str, index_name: str, names: Container[str]) -> list[str]:
    """Weights of an earlier save, of the names that are `there`, which the new one with these `names` lacks."""
    if not weights_name:
        return []
    stem = weights_name.removesuffix(".safetensors")

    def is_weights(name: str) -> bool:
        is_shard = name.startswith(stem) and _SHARD.fullmatch(name.removesuffix(".safetensors"))
        return bool(is_shard) or name in (weights_name, index_name)

    return sorted(name for name in there if name not in names and is_weights(name))


def is_unfinished(folder: Path) -> bool:
    """Whether a save into `folder` has died or failed, or goes on, so that not all is there that was to be saved."""
    marks = (_LIST, _DONE, _TAKEN)
    return any(not any((it / mark).exists() for mark in marks) for it in folder.glob(f"{UNFINISHED}*"))


def mark_unfinished(folder: Path) -> None:
    """Have `folder` be unfinished until the next save there: what belongs together is not all in it."""
    with suppress(OSError):  # the disk may be full
        (folder / f"{UNFINISHED}failed").mkdir()


def has_only_unfinished(folder: Path) -> bool:
    """Whether nothing is in `folder` but saves that have died."""
    return is_unfinished(folder) and all(path.name.startswith(UNFINISHED) for path in folder.iterdir())


def finish_interrupted(folder: Path) -> list[str]:
    """Finish saves into `folder` that died while files got their final names; returns the names that were missing.

    Raises:
        SaveError: it cannot be finished, or another process has been at it for too long.
    """
    try:
        if not any((temporary / _LIST).exists() for temporary in folder.glob(f"{UNFINISHED}*")):
            return []
        with _locked(folder, folder):  # ranks that load alone may come here at the same time
            return _finish_lists(folder)
    except OSError as error:
        if isinstance(error, SaveError):
            raise
        raise SaveError(
            f"{folder}: cannot finish a save that was interrupted there: {error.strerror or error}. Check that you "
            "may write there; the next save or load tries again."
        ) from error


def _finish_lists(folder: Path) -> list[str]:
    """Do what :func:`finish_interrupted` says, in a folder that is locked."""
    finished: list[str] = []
    for temporary in sorted(folder.glob(f"{UNFINISHED}*")):
        if (temporary / _LIST).exists():
            with _locked(temporary / _LOCK, folder):
                if (temporary / _LIST).exists():
                    finished.extend(_carry_out(folder, temporary))
                    _remove_temporary(temporary)
    return finished


def _hold(path: Path) -> int | None:
    """Lock a file or a folder until :func:`_let_go` of what this returns; None where it cannot be locked.

    Raises:
        BlockingIOError: another process, or another save of this one, holds it.
    """
    if path.is_dir():
        handle = _flock(os.open(path, os.O_RDONLY | os.O_DIRECTORY))
        if handle is not None:
            return handle
        path = path / _LOCK  # NFS locks no folders, and files only that are open for writing
    while True:
        handle = _flock(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        if handle is None:
            return None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.stat(path), os.fstat(handle)):
                return handle
        _let_go(handle)  # that of the folder, which whoever had it has removed


def _flock(handle: int) -> int | None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        if isinstance(error, BlockingIOError):
            raise
        return None
    _handles.add(handle)
    return handle


def _let_go(handle: int | None) -> None:
    if handle is not None:
        _handles.discard(handle)
        os.close(handle)


def _forget_handles() -> None:
    """In a forked process: the locks are its parent's."""
    while _handles:
        os.close(_handles.pop())
    _held.clear()


os.register_at_fork(after_in_child=_forget_handles)


def _is_held(temporary: Path) -> bool:
    """Whether the process that saves into `temporary` lives; True where nobody can tell."""
    if not (temporary / _LOCK).exists():
        return False
    try:
        handle = _hold(temporary / _LOCK)
    except (BlockingIOError, FileNotFoundError):  # the latter: its save has just ended
        return True
    if handle is None:
        logger.warning_once(
            f"{temporary}: another save here has not ended, or has died; this file system has no locks that tell. "
            "Remove the folder if no job saves into it."
        )
        return True
    _let_go(handle)
    return False


@contextmanager
def _locked(path: Path, folder: Path) -> Iterator[None]:
    """Inside, no other process has locked `path`; where it cannot be locked, nothing is waited for.

    Raises:
        SaveError: another one has had it for :data:`LOCK_S` seconds.
    """
    end = time.monotonic() + LOCK_S
    while True:
        try:
            handle = _hold(path)
            break
        except FileNotFoundError:  # whoever had it has finished
            handle = None
            break
        except BlockingIOError as error:
            if time.monotonic() > end:
                raise SaveError(
                    f"{folder}: another process has been giving files here their final names for {LOCK_S:.0f} s, and "
                    "has not ended. End it, if it hangs: then the next save or load finishes what it began."
                ) from error
            time.sleep(0.02)
    try:
        yield
    finally:
        if path == folder:
            with suppress(OSError):
                (folder / _LOCK).unlink(missing_ok=True)
        _let_go(handle)


def _carry_out(folder: Path, temporary: Path) -> list[str]:
    """Do what the list in `temporary` says and has not been done; returns the names that were missing.

    What is replaced is moved into `temporary`, because removing it may take long.
    """
    order = _read_list(temporary / _LIST)
    (temporary / _REPLACED).mkdir(exist_ok=True)
    pending = [name for name in order["renames"] if (temporary / name).exists()]
    if pending:
        for name in order["removes_first"]:
            if name in pending or name not in order["renames"]:  # else it is the new one
                _move_away(folder / name, temporary)
        _sync(folder)
    for name in pending:
        _move_into(temporary / name, folder / name)
    for name in order["removes"]:
        _move_away(folder / name, temporary)
    _sync(folder)
    os.replace(temporary / _LIST, temporary / _DONE)
    return pending


def _remove_temporary(temporary: Path) -> None:
    """Remove the temporary folder of a save that is done, the mark of that last."""
    shutil.rmtree(temporary / _REPLACED, ignore_errors=True)
    shutil.rmtree(temporary, ignore_errors=True)


def _move_into(source: Path, target: Path) -> None:
    """Give `source` the name `target`; a folder that is there keeps what the new one does not have."""
    if not source.is_dir() or not target.is_dir():
        os.replace(source, target)
        return
    for entry in sorted(source.iterdir()):
        _move_into(entry, target / entry.name)
    _sync(target)
    source.rmdir()


def _move_away(path: Path, temporary: Path) -> None:
    """Move a file or a folder, if it is there, to what is removed with `temporary`."""
    if not os.path.lexists(path):
        return
    try:
        os.replace(path, temporary / _REPLACED / path.name)
    except OSError as error:
        if error.errno != errno.EXDEV:  # another file system is mounted there
            raise
        _remove(path)


def _remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _read_list(path: Path) -> dict[str, list[str]]:
    """The list at `path`. It may come with a folder from anywhere: it must not reach beyond that folder.

    Raises:
        SaveError: it is not one of :meth:`Publication.commit`.
    """
    try:
        order = json.loads(path.read_bytes())
        names = [*order["renames"], *order["removes"], *order.setdefault("removes_first", [])]
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise SaveError(f"{path}: expected the list of an interrupted save: {error!r}. Remove its folder.") from error
    for name in names:
        if not isinstance(name, str) or not is_plain_name(name):
            raise SaveError(f"{path}: expected names of files in {path.parent.parent}; found {name!r}. Remove it.")
    return order


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
