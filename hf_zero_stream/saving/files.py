"""The files of a save: shards that several ranks write at once, and final names when all of them are complete.

Until then everything is in a folder inside the final one, and the earlier files stay. Then a list of the renames to
come is written there, and from that moment on the save has happened: if the process dies while it renames, the next
process that saves to the folder, or streams from it, finishes the list. Shards are renamed first, the index last. An
older index is removed before the first rename, so that nobody can read an old index with new shards.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import threading
import uuid
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint.file_digests import digest_of_bytes
from ..checkpoint.formats import UNFINISHED
from ..checkpoint.safetensors import ShardToWrite
from ..errors import SaveError
from ..sources.base import advance, is_plain_name
from ..sources.local import IOV_MAX


_LIST = "renames.json"
_held: dict[Path, int | None] = {}
"""For each temporary folder of this process, the lock by which others see that it lives; None without locks."""
_SHARD = re.compile(r"(.*?)-\d{5}-of-\d{5}")


def reserve(folder: Path, shards: Sequence[ShardToWrite], *, on_disk: bool = True) -> None:
    """Make each shard in `folder`, at its final size and with its header, so that a full disk shows immediately.

    Unless it shall have room `on_disk`, it takes none but for the header.
    """
    for shard in shards:
        path, size_bytes = folder / shard.name, shard.size_bytes
        try:
            with open(path, "xb") as file:
                file.write(shard.header)
                file.flush()
                if not on_disk:
                    os.ftruncate(file.fileno(), size_bytes)
                    continue
                try:
                    os.posix_fallocate(file.fileno(), 0, size_bytes)
                except OSError as error:
                    if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                        raise
                    # The file system cannot reserve space.
                    os.ftruncate(file.fileno(), size_bytes)
        except OSError as error:
            raise SaveError(
                f"{path}: cannot make a file of {size_bytes} bytes: {error.strerror or error}. What was there before "
                "has not been touched."
            ) from error


class ShardWriter:
    """Writes into shards, which must exist already; opens each at its first use. Safe to use from several threads.

    Args:
        has_digests: sum the :attr:`digests` of what is written.
    """

    _flags = os.O_WRONLY

    def __init__(self, paths: Sequence[Path], *, has_digests: bool = False) -> None:
        self.digests: Counter[int] = Counter()
        """By shard, the digest of the bytes that this writer has written (:mod:`..checkpoint.file_digests`)."""
        self._paths, self._has_digests = paths, has_digests
        self._handles: dict[int, int] = {}
        self._lock = threading.Lock()

    def put(self, shard: int, position: int, buffers: Sequence[memoryview]) -> None:
        """Write `buffers`, one after the other, from byte `position` on."""
        handle = self._handle(shard)
        pending, start = [buffer for buffer in buffers if len(buffer)], position
        try:
            while pending:
                written = os.pwritev(handle, pending[:IOV_MAX], position)
                position += written
                advance(pending, written)
            # Has the system begin to write to the disk at once, and not when all of it is in memory.
            os.posix_fadvise(handle, start, position - start, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise self._error(shard, position, sum(map(len, pending)), error) from error
        if self._has_digests:
            digest = digest_of_bytes(start, buffers)
            with self._lock:
                self.digests[shard] += digest

    def sync(self) -> None:
        """Wait until what was written is on the disk."""
        for shard, handle in list(self._handles.items()):
            try:
                os.fsync(handle)
            except OSError as error:
                raise self._error(shard, 0, os.fstat(handle).st_size, error) from error

    def close(self) -> None:
        with self._lock:
            handles, self._handles = self._handles, {}
        for handle in handles.values():
            os.close(handle)

    def _handle(self, shard: int) -> int:
        with self._lock:
            if shard not in self._handles:
                try:
                    self._handles[shard] = os.open(self._paths[shard], self._flags)
                except OSError as error:
                    raise SaveError(
                        f"{self._paths[shard]}: cannot be opened: {error.strerror or error}. All ranks write into the "
                        'files that rank 0 made. Where they do not see its disk, save with write_from="rank0" or '
                        '"auto".'
                    ) from error
            return self._handles[shard]

    def _error(self, shard: int, position: int, nbytes: int, cause: OSError | str) -> SaveError:
        problem = cause if isinstance(cause, str) else cause.strerror or str(cause)
        return SaveError(
            f"{self._paths[shard]}: bytes {position} to {position + nbytes}: {problem}. What was there before has not "
            "been touched."
        )


def sync_all(writers: Sequence[ShardWriter]) -> None:
    """Wait until what was written into all of their shards is on the disk."""
    for writer in writers:
        writer.sync()


class Comparison(ShardWriter):
    """Compares with what was written; its reads bypass the page cache where the system drops those pages."""

    _flags = os.O_RDONLY

    def put(self, shard: int, position: int, buffers: Sequence[memoryview]) -> None:
        """Raise :class:`SaveError` if the bytes from `position` on are not those of `buffers`."""
        handle = self._handle(shard)
        os.posix_fadvise(handle, position, sum(map(len, buffers)), os.POSIX_FADV_DONTNEED)
        for buffer in buffers:
            try:
                found = os.pread(handle, len(buffer), position)
            except OSError as error:
                raise self._error(shard, position, len(buffer), error) from error
            if found != buffer:
                raise self._error(shard, position, len(buffer), "the file does not hold what was written to it")
            position += len(buffer)

    def compare(self, shard: int, position: int, nbytes: int, digest: int) -> None:
        """Raise :class:`SaveError` if the digest of these bytes is another one."""
        handle = self._handle(shard)
        os.posix_fadvise(handle, position, nbytes, os.POSIX_FADV_DONTNEED)
        try:
            found = os.pread(handle, nbytes, position)
        except OSError as error:
            raise self._error(shard, position, nbytes, error) from error
        if digest_of_bytes(position, [found]) != digest:
            raise self._error(shard, position, nbytes, "the file does not hold what was written to it")


@dataclass(frozen=True)
class Publication:
    """A save into `folder` that is being prepared in the folder `temporary`; made on one rank, and ended there."""

    folder: Path
    temporary: Path

    @classmethod
    def begin(cls, folder: Path) -> Publication:
        """Finish or remove what saves of dead processes have left, then make the temporary folder."""
        try:
            if folder.exists() and not folder.is_dir():
                raise SaveError(f"{folder}: expected a folder to save into, found a file.")
            folder.mkdir(parents=True, exist_ok=True)
            finish_interrupted(folder)
            for left in folder.glob(f"{UNFINISHED}*"):
                if not _is_held(left):
                    shutil.rmtree(left)
            temporary = folder / f"{UNFINISHED}{uuid.uuid4().hex[:12]}"
            temporary.mkdir()
        except OSError as error:
            if isinstance(error, SaveError):
                raise
            raise SaveError(
                f"{folder}: cannot write into this folder: {error.strerror or error}. Check that it can be created, "
                "and that you may write there."
            ) from error
        _held[temporary] = _hold(temporary, fcntl.LOCK_SH)
        return cls(folder, temporary)

    def abandon(self) -> None:
        """Remove everything that has been written, unless files have begun to get their final names."""
        if not (self.temporary / _LIST).exists():
            shutil.rmtree(self.temporary, ignore_errors=True)
        self._release()

    def _release(self) -> None:
        handle = _held.pop(self.temporary, None)
        if handle is not None:
            os.close(handle)

    def commit(self, weights_name: str, index_name: str, last_name: str = "", replaced: Sequence[str] = ()) -> None:
        """Give all files their final names, and remove the shards of an earlier save that are not replaced.

        The index comes after all others, and after it the file `last_name`, if there is one. Then the files and
        folders `replaced` are removed; before, those in whose place there is a new one. Without a `weights_name` no
        weights are among the files.
        """
        try:
            names = sorted(entry.name for entry in self.temporary.iterdir())
            entries = [entry.name for entry in self.folder.iterdir() if entry.is_file() or entry.is_symlink()]
            outdated = [*outdated_weights(entries, weights_name, index_name, set(names)), *replaced]
            # The index is what makes shards a checkpoint: the old one goes first, the new one comes last.
            order = {
                "removes_first": sorted({index_name, *replaced} & {*names} | {index_name} & {*outdated}),
                "renames": sorted(names, key=lambda name: (name == last_name, name == index_name, name)),
                "removes": [name for name in outdated if name not in names],
            }
            for path in sorted(self.temporary.rglob("*")):
                _sync(path)
            draft = self.temporary / "renames.draft"
            draft.write_text(json.dumps(order))
            _sync(draft)
            os.replace(draft, self.temporary / _LIST)
            _sync(self.temporary)
            _carry_out(self.folder, self.temporary)
        except OSError as error:
            raise SaveError(
                f"{self.folder}: cannot give files their final names: {error.strerror or error}. They are complete in "
                f"{self.temporary.name}; saving again, or streaming from the folder, finishes it."
            ) from error
        finally:
            self._release()


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
    return any(not (temporary / _LIST).exists() for temporary in folder.glob(f"{UNFINISHED}*"))


def mark_unfinished(folder: Path) -> None:
    """Have `folder` be unfinished until the next save there: what belongs together is not all in it."""
    with suppress(OSError):  # the disk may be full
        (folder / f"{UNFINISHED}failed").mkdir()


def has_only_unfinished(folder: Path) -> bool:
    """Whether nothing is in `folder` but saves that have died."""
    return is_unfinished(folder) and all(path.name.startswith(UNFINISHED) for path in folder.iterdir())


def finish_interrupted(folder: Path) -> list[str]:
    """Finish saves into `folder` that died while files got their final names; returns the names that were missing."""
    finished: list[str] = []
    for temporary in sorted(folder.glob(f"{UNFINISHED}*")):
        if (temporary / _LIST).exists():
            with _locked(temporary):  # ranks that load alone may come here at the same time
                if (temporary / _LIST).exists():
                    finished.extend(_carry_out(folder, temporary))
    return finished


def _hold(folder: Path, kind: int) -> int | None:
    """Lock `folder` until what this returns is closed; None where the file system has no locks.

    Raises:
        BlockingIOError: another process, or another save of this one, holds it.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        if isinstance(error, BlockingIOError):
            raise
        return None
    return handle


def _is_held(temporary: Path) -> bool:
    """Whether the process that saves into `temporary` lives."""
    try:
        handle = _hold(temporary, fcntl.LOCK_EX)
    except (BlockingIOError, FileNotFoundError):  # the latter: its save has just ended
        return True
    if handle is not None:
        os.close(handle)
    return False


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Wait until no other process is in here with `folder`, where the file system has locks."""
    with ExitStack() as stack:
        with suppress(OSError):
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _carry_out(folder: Path, temporary: Path) -> list[str]:
    """Do what the list in `temporary` says and has not been done, then remove it."""
    order = _read_list(temporary / _LIST)
    pending = [name for name in order["renames"] if (temporary / name).exists()]
    if pending:
        for name in order["removes_first"]:
            if name in pending or name not in order["renames"]:  # else it is the new one
                _remove(folder / name)
        _sync(folder)
    for name in pending:
        target = folder / name
        if (temporary / name).is_dir() and target.exists():
            shutil.copytree(temporary / name, target, dirs_exist_ok=True)
            shutil.rmtree(temporary / name)
        else:
            os.replace(temporary / name, target)
    for name in order["removes"]:
        _remove(folder / name)
    _sync(folder)
    (temporary / _LIST).unlink()
    shutil.rmtree(temporary)
    return pending


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
