"""Objects below a URL that is saved to: listed, read, written and removed, by obstore, which tries again by itself."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from transformers.utils import logging

from ...errors import HfZeroStreamError, SaveError
from .files import CONNECT_S, STALL_S, endpoint_of, explained, is_panic, open_store, refuse_after_fork
from .lists import Version
from .urls import joined, located, scheme_of


if TYPE_CHECKING:
    from obstore.store import RetryConfig

logger = logging.get_logger(__name__)

PART_BYTES = 8 * 2**20
"""Parts of an upload, but for very large objects. S3 and Google take none below 5 MiB but the last, and 10,000."""

MOST_PARTS = 10_000

PARTS_BYTES = 24 * 2**20
"""Parts of an object in memory, on their way or being filled, and one at least. With those of the object before, which
is being finished, and what rounds of the exchange between ranks take, a rank has two parts and 64 MiB at most."""

_ADVICE = "A rule for the bucket's lifecycle that aborts incomplete multipart uploads removes their parts."

_MOST_CUT = 3
"""How often a small object is sent of which the store says that it has other bytes."""

RETRY_S = 20.0
"""Seconds in which a request is tried again, up to 8 times: a rank that gives up must do so soon."""


@functools.cache
def _store(url: str) -> Any:
    refuse_after_fork(url)
    pauses = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=5), "base": 2.0}
    retry: RetryConfig = {"max_retries": 8, "retry_timeout": timedelta(seconds=RETRY_S), "backoff": pauses}  # type: ignore[typeddict-item]
    return open_store(url, {}, retry)


@contextmanager
def _explaining(url: str, doing: str) -> Iterator[None]:
    """Turn the errors of obstore into a SaveError."""
    try:
        yield
    except FileNotFoundError:
        raise
    except BaseException as error:
        import obstore.exceptions as kinds

        is_of_obstore = isinstance(error, (kinds.BaseError, ValueError, OSError)) or is_panic(error)
        if not is_of_obstore or isinstance(error, HfZeroStreamError):
            raise
        raise SaveError(
            f"{url}: cannot {doing} it: {explained(url, error)} What could be loaded from there before still can be."
        ) from error


def part_bytes(size_bytes: int) -> int:
    """The size of the parts of an object: as many MiB as it takes to need no more than :data:`MOST_PARTS`."""
    mib = 2**20
    return max(PART_BYTES, -(-size_bytes // (MOST_PARTS * mib)) * mib)


class ObjectStatus(NamedTuple):
    """What a store lists of an object."""

    size_bytes: int
    version: Version


class ConflictError(Exception):
    """An object is another version than the one that was to be replaced; nothing was written."""


Guard = Callable[[], object]
"""Called right before a request; its error is raised in place of that."""


class RemoteFolder:
    """The objects below a URL, by the names that they have there."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._has_digests: bool | None = None
        """Whether the ETags of the store are digests of what objects hold; None: it has not been seen yet."""

    def _located(self, name: str) -> tuple[Any, str]:
        store, key = located(joined(self.url, name))
        return _store(store), key.rstrip("/")

    def names(self, folder: str = "") -> set[str]:
        """The names in `folder` ("" for the place itself): relative to it, those of folders with a slash behind."""
        with _explaining(joined(self.url, folder), "list"):
            import obstore

            store, key = self._located(folder)
            prefix = f"{key}/" if key else ""
            found = obstore.list_with_delimiter(store, prefix or None)
            paths = [entry["path"] for entry in found["objects"]]
            paths += [f"{path.rstrip('/')}/" for path in found["common_prefixes"]]
            return {path.removeprefix(prefix) for path in paths}

    def objects(self) -> dict[str, ObjectStatus]:
        """The objects in the place itself, by name."""
        with _explaining(self.url, "list"):
            import obstore

            store, key = self._located("")
            return _statuses(obstore.list_with_delimiter(store, f"{key}/" if key else None)["objects"], key)

    def below(self, folder: str) -> dict[str, ObjectStatus]:
        """All objects below `folder`, by their names relative to the place."""
        with _explaining(joined(self.url, folder), "list"):
            import obstore

            store, key = self._located(folder)
            batches = obstore.list(store, f"{key}/" if key else None)
            return _statuses((entry for batch in batches for entry in batch), self._located("")[1])

    def read(self, name: str, start: int = 0, nbytes: int | None = None) -> bytes:
        """All bytes of an object, or some of them; a FileNotFoundError if it is not there."""
        if nbytes is None:
            return self.read_version(name)[0]
        with _explaining(joined(self.url, name), "read"):
            import obstore

            store, key = self._located(name)
            return bytes(obstore.get_range(store, key, start=start, length=nbytes))

    def read_version(self, name: str) -> tuple[bytes, Version]:
        """All bytes of an object, and which version they are; a FileNotFoundError if it is not there."""
        with _explaining(joined(self.url, name), "read"):
            import obstore

            store, key = self._located(name)
            found = obstore.get(store, key)
            return bytes(found.bytes()), _version(found.meta)

    def put(
        self, name: str, data: bytes, *, over: Version | None | Literal["any"] = "any", guard: Guard | None = None
    ) -> Version:
        """Write a small object by one request, where there is the version `over`, or None; returns the new one.

        A store that compares no versions writes in any case: the `guard` is for those.

        Raises:
            ConflictError: there is another version.
        """
        url = joined(self.url, name)
        with _explaining(url, "write"):
            import obstore
            from obstore.exceptions import AlreadyExistsError, PreconditionError

            store, key = self._located(name)
            if guard is not None:
                guard()
            try:
                for _ in range(_MOST_CUT):
                    over = _version(obstore.put(store, key, data, use_multipart=False, mode=_mode(url, over)))
                    if over.is_of(data):
                        self._has_digests = True
                    elif self._has_digests is None and self.read_version(name)[0] == data:
                        self._has_digests = False
                    elif self._has_digests is not False:
                        continue
                    return over
            except (AlreadyExistsError, PreconditionError) as error:
                raise ConflictError(url) from error
            except FileNotFoundError as error:
                if isinstance(over, Version):  # which is not there any more
                    raise ConflictError(url) from error
                raise OSError(str(error)) from error
            raise SaveError(
                f"{url}: expected the {len(data)} bytes that were sent; the store has others, {_MOST_CUT} times. Look "
                "for a proxy between that cuts what is sent."
            )

    def copy(self, name: str, to: str, *, guard: Guard) -> None:
        """Have an object be there by another name too; nothing is done if it is not there itself."""
        with _explaining(joined(self.url, to), "write"):
            import obstore

            store, key = self._located(name)
            guard()
            target = self._located(to)[1]
            with suppress(FileNotFoundError):
                obstore.copy(store, key, target)
                source, copied = (obstore.head(store, each)["size"] for each in (key, target))
                if source != copied:  # Azure may still be at it
                    raise SaveError(f"{joined(self.url, to)}: expected a copy of {source} bytes, found {copied}.")

    def remove(self, names: Collection[str], *, guard: Guard | None = None) -> None:
        """Remove objects, of which some may not be there."""
        if not names:
            return
        with _explaining(self.url, "remove objects below"):
            import obstore

            store, _ = self._located("")
            keys = [self._located(name)[1] for name in names]
            if guard is not None:
                guard()
            try:
                obstore.delete(store, keys)
            except FileNotFoundError:  # what comes behind it may still be there
                for key in keys:
                    with suppress(FileNotFoundError):
                        obstore.delete(store, key)


def _statuses(entries: Iterable[Any], place: str) -> dict[str, ObjectStatus]:
    prefix = f"{place}/" if place else ""
    return {it["path"].removeprefix(prefix): ObjectStatus(it["size"], _version(it)) for it in entries}


def _version(found: Any) -> Version:
    return Version(found["e_tag"], found["version"])


def _mode(url: str, over: Version | None | Literal["any"]) -> Any:
    """The mode of obstore's ``put``. Google's store compares generations alone, which not every answer of it has."""
    if over is None:
        return "create"
    compared = over != "any" and (over.generation if scheme_of(url) == "gs" else over.e_tag)
    if not compared:
        return "overwrite"
    return {name: it for name, it in zip(("e_tag", "version"), over, strict=True) if it is not None}


class StreamedObject:
    """An object that is sent in parts while its bytes come."""

    def __init__(self, url: str, size_bytes: int, *, checks: bool) -> None:
        self._url, self._size_bytes = url, size_bytes
        self._part_bytes = part_bytes(size_bytes)
        self._digest = hashlib.sha256() if checks else None
        store, key = located(url)
        with _explaining(url, "write"):
            import obstore

            self._upload = obstore.open_writer(
                _store(store),
                key,
                buffer_size=self._part_bytes,
                max_concurrency=max(1, PARTS_BYTES // self._part_bytes),  # it counts the part that is filled
            )

    def write(self, data: memoryview) -> None:
        if self._digest is not None:
            self._digest.update(data)
        with _explaining(self._url, "write"):
            for start in range(0, len(data), self._part_bytes):  # else more parts than allowed would be on their way
                self._upload.write(data[start : start + self._part_bytes])

    def finish(self) -> None:
        with _explaining(self._url, "write"):
            self._upload.close()

    def check(self) -> None:
        assert self._digest is not None
        found, size_bytes = hashlib.sha256(), 0
        with _explaining(self._url, "read"):
            import obstore

            store, key = located(self._url)
            for piece in obstore.get(_store(store), key).stream(min_chunk_size=PART_BYTES):
                found.update(piece)
                size_bytes += len(piece)
        if (size_bytes, found.digest()) != (self._size_bytes, self._digest.digest()):
            raise SaveError(
                f"{self._url}: expected the {self._size_bytes} bytes that were sent; found {size_bytes} bytes, or "
                "others. What could be loaded from there before still can be. Save again."
            )


def abort_uploads(place: RemoteFolder, names: Collection[str]) -> None:
    """Abort all uploads that nobody will finish of objects with these `names` below `place`, or say what is left.

    Parts cost as much as objects do, and no list shows them. There is no object of any of these names.
    """
    scheme = scheme_of(place.url)
    if scheme == "s3":
        _abort_in_s3(place, names)
    elif scheme == "az":
        # A blob that is put takes the place of all parts that have been sent for it.
        for name in names:
            place.put(name, b"")
        place.remove(names)
    else:
        logger.info(f"{place.url}: parts of an upload that was not finished may be left. {_ADVICE}")


def _abort_in_s3(place: RemoteFolder, names: Collection[str]) -> None:
    """By boto3: obstore neither lists uploads nor aborts those of other processes."""
    try:
        import boto3
        from botocore import UNSIGNED
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        logger.warning(f"{place.url}: parts of an upload may be left; boto3, which aborts it, is missing. {_ADVICE}")
        return
    store, prefix = located(place.url)
    bucket = store.partition("://")[2]
    is_public = os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true")
    signature = UNSIGNED if is_public else None
    keys = {located(joined(place.url, name)).key for name in names}
    try:
        client = boto3.client(
            "s3",
            endpoint_url=endpoint_of("s3") or None,
            region_name=os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"),
            config=Config(signature_version=signature, connect_timeout=CONNECT_S, read_timeout=STALL_S),
        )
        for page in client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix):
            for upload in page.get("Uploads", ()):
                if upload["Key"] in keys:
                    client.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
    except (BotoCoreError, ClientError) as error:  # such as no right to list uploads; the save needs none of it
        logger.warning(f"{place.url}: parts of an upload may be left; aborting it failed: {error}. {_ADVICE}")
