"""A fingerprint of weights, by which a state knows those that were saved with it.

The weights beside a state can be replaced without it: by a newer state, while the older one is loaded by its tag; by
``save_pretrained``. Moments of one step and weights of another would go on together without a word.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from ..checkpoint.format import NotAMap
from ..checkpoint.formats import read_map
from ..checkpoint.index_file import read_index_file
from ..errors import CheckpointError, ReadError
from ..seams.saving import index_name


_MOST_TENSORS = 1024
_SAMPLE_BYTES = 64


def fingerprint(folder: Path) -> str | None:
    """That of the weights in `folder`, whatever their shards; None if there are none that can be read.

    It is made of the names, dtypes, shapes and some bytes of all tensors, or of every n-th of very many: a step of an
    optimizer changes nearly all of them, and reading all bytes would take as long as a load.
    """
    try:
        return fingerprint_of_new(folder)
    except (OSError, CheckpointError, ReadError, NotAMap):
        return None


def fingerprint_of_new(folder: Path) -> str | None:
    """As :func:`fingerprint`, of weights that were written just now: raises an OSError or a ReadError if need be."""
    found = read_map(_files(folder))
    digest = hashlib.sha256()
    entries = found.entries
    names = sorted(entries)
    for name in names[:: -(-len(names) // _MOST_TENSORS) or 1]:
        entry = entries[name]
        digest.update(f"{name} {entry.dtype} {list(entry.shape)} ".encode())
        with open(found.shards[entry.shard].path, "rb") as file:
            file.seek(max(entry.start, (entry.start + entry.stop - _SAMPLE_BYTES) // 2))
            digest.update(file.read(min(_SAMPLE_BYTES, entry.stop - entry.start)))
    return digest.hexdigest() if names else None


def _files(folder: Path) -> list[Path]:
    """The shards that ``from_pretrained`` reads."""
    index = folder / index_name(None)
    if not index.exists():
        return [folder / "model.safetensors"]
    return [folder / name for name in sorted(set(read_index_file(index)["weight_map"].values()))]
