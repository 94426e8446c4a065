"""Folders of this host that stand for URLs, while code of others writes small files beside what we save there.

The Trainer, accelerate and DeepSpeed's engine write random numbers, schedulers, ``trainer_state.json``. Each rank has
a folder of its own for them, its *mirror*. What we save goes to the URL for which the mirror stands; its files follow.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import SaveError
from ..ranks.coordinator import meeting
from ..ranks.rendezvous import LOAD, SAVE
from ..settings.scope import set_in_context
from .pending import finish_pending, save_under_way
from .places import UrlPlaces, places_at


LARGEST_BYTES = 256 * 2**20
"""Of a file of a mirror: larger ones are those that stock writes in place of what we save."""

_mirrors: ContextVar[Mapping[Path, str]] = ContextVar("hf_zero_stream_mirrors", default={})


def url_of(folder: Any) -> str | None:
    """The URL for which `folder` stands, in a mirror; None of any other."""
    for mirror, url in _mirrors.get().items() if folder else ():
        if Path(folder).is_relative_to(mirror):
            return "/".join([url, *Path(folder).relative_to(mirror).parts])
    return None


@contextmanager
def mirrored(url: str, last: str = "") -> Iterator[Path]:
    """Inside, a folder of this rank stands for `url`; at the end its files are sent there (all ranks).

    A file that is named `last` is sent after all others.

    Raises:
        UrlError: nothing can be saved to the URL. SaveError: a file is too large, or could not be sent.
    """
    url, places = url.rstrip("/"), places_at(url)
    with ExitStack() as until_sent:
        mirror = _new_mirror(until_sent)
        with _standing_for(url, mirror):
            yield mirror
        with meeting(SAVE, "what lies beside a training state") as coordinator:
            send = partial(_send, places, url, mirror, last)
            pending = save_under_way()
            if pending is None:
                coordinator.run_on_all(lambda: None if coordinator.is_main else send())
                coordinator.run_on_main(send)  # which has the last file
                return
            others = coordinator.gather_results(lambda: {} if coordinator.is_main else _files_of(mirror, url, last))
            if coordinator.is_main:  # more may come into its mirror when the state is whole
                pending.then(partial(_send_later, places, others, send, kept := until_sent.pop_all()))
                pending.otherwise(kept.close)


def _send_later(
    places: UrlPlaces, others: Sequence[Mapping[str, bytes]], send: Callable[[], object], until_sent: ExitStack
) -> None:
    with until_sent:
        for files in others:
            _put(places, files)
        send()


@contextmanager
def fetched(url: str) -> Iterator[Path]:
    """A mirror of `url` with the small files that lie there, for code that goes on from them (all ranks)."""
    url, places = url.rstrip("/"), places_at(url)
    finish_pending()
    with ExitStack() as until_read:
        mirror = _new_mirror(until_read)
        with meeting(LOAD) as coordinator:
            files = coordinator.broadcast(partial(places.small_files, url))
            for name, data in files.items():
                (mirror / name).parent.mkdir(parents=True, exist_ok=True)
                (mirror / name).write_bytes(data)
        with _standing_for(url, mirror):
            yield mirror


def _new_mirror(stack: ExitStack) -> Path:
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hf-zero-stream-")))


def _standing_for(url: str, mirror: Path) -> AbstractContextManager[object]:
    return set_in_context(_mirrors, {**_mirrors.get(), mirror: url})


def _files_of(mirror: Path, url: str, last: str) -> dict[str, bytes]:
    """What lies in a mirror, by URLs, files that are named `last` behind all others."""
    files = sorted((path for path in mirror.rglob("*") if path.is_file()), key=lambda path: (path.name == last, path))
    for path in files:
        if (nbytes := path.stat().st_size) > LARGEST_BYTES:
            raise SaveError(
                f"{url}: {path.relative_to(mirror)} has {nbytes} bytes, and is not of what hf_zero_stream saves. Only "
                "small files can be written beside that. Save into a folder, then upload it."
            )
    return {"/".join([url, *path.relative_to(mirror).parts]): path.read_bytes() for path in files}


def _send(places: UrlPlaces, url: str, mirror: Path, last: str) -> None:
    _put(places, _files_of(mirror, url, last))


def _put(places: UrlPlaces, files: Mapping[str, bytes]) -> None:
    for url, data in files.items():
        places.put(url, data)
