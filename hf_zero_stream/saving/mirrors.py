"""Folders of this host that stand for URLs, while code of others writes small files beside what we save there.

The Trainer, accelerate and DeepSpeed's engine write random numbers, schedulers, ``trainer_state.json``. Each rank has
a folder of its own for them, its *mirror*. What we save goes to the URL for which the mirror stands; its files follow.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import SaveError
from ..ranks.coordinator import meeting
from ..ranks.rendezvous import LOAD, SAVE
from ..settings.scope import set_in_context
from .pending import finish_pending
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
    with _standing_for(url) as mirror:
        yield mirror
        finish_pending()
        with meeting(SAVE, "what lies beside a training state") as coordinator:
            send = partial(_send, places, url, mirror, last)
            coordinator.run_on_all(lambda: None if coordinator.is_main else send())
            coordinator.run_on_main(send)  # which has the last file


@contextmanager
def fetched(url: str) -> Iterator[Path]:
    """A mirror of `url` with the small files that lie there, for code that goes on from them (all ranks)."""
    url, places = url.rstrip("/"), places_at(url)
    with _standing_for(url) as mirror:
        with meeting(LOAD) as coordinator:
            files = coordinator.broadcast(partial(places.small_files, url))
            for name, data in files.items():
                (mirror / name).parent.mkdir(parents=True, exist_ok=True)
                (mirror / name).write_bytes(data)
        yield mirror


@contextmanager
def _standing_for(url: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hf-zero-stream-") as name:
        mirror = Path(name)
        with set_in_context(_mirrors, {**_mirrors.get(), mirror: url}):
            yield mirror


def _send(places: UrlPlaces, url: str, mirror: Path, last: str) -> None:
    files = sorted((path for path in mirror.rglob("*") if path.is_file()), key=lambda path: (path.name == last, path))
    for path in files:
        if (nbytes := path.stat().st_size) > LARGEST_BYTES:
            raise SaveError(
                f"{url}: {path.relative_to(mirror)} has {nbytes} bytes, and is not of what hf_zero_stream saves. Only "
                "small files can be written beside that. Save into a folder, then upload it."
            )
        places.put("/".join([url, *path.relative_to(mirror).parts]), path.read_bytes())
