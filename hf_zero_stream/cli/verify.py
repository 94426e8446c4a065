"""``hf-zero-stream verify``: is a checkpoint whole and sound?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ..reports.text import bytes_text, count_text
from ..sources.urls import is_url
from . import frame


EXAMPLE = "hf-zero-stream verify Qwen/Qwen3-30B-A3B --sha256"


def run(
    path: frame.CheckpointArgument,
    sha256: Annotated[
        bool, typer.Option("--sha256", help="Read all shards and compare them with the Hub's checksums.")
    ] = False,
    sums: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", exists=True, dir_okay=False, help="Checksums to compare with, as sha256sum writes them."
        ),
    ] = None,
    revision: frame.RevisionOption = None,
    form: frame.FormatOption = "table",
) -> None:
    """Name every fault of a checkpoint; exit code 1 if there is any.

    Checks sizes, offsets and the index, and that no shard is missing; of safetensors files and of other formats. That
    reads headers only; --sha256 and --sums read all shards. The id of a repository means what the Hub's cache holds of
    it, and hf://... the repository on the Hub itself.
    """
    from ..checkpoint.at_url import check_soundness_at
    from ..checkpoint.contents import soundness_of
    from ..checkpoint.soundness import read_sums
    from ..reports.progress import progress_bar
    from .checkpoints import cached_folder, place_of

    known = None if sums is None else read_sums(sums)
    reads_all = sha256 or sums is not None
    how: dict[str, Any] = {"sha256": sha256, "sums": known}
    with place_of(path, revision) if is_url(path) else nullcontext(cached_folder(path, revision)) as place:
        with progress_bar(_size_of(place) if reads_all else 0, "Hashing", reads_all) as advance:
            if isinstance(place, str):
                found = check_soundness_at(place, on_bytes=advance, **how)
            else:
                found = soundness_of(place, on_bytes=advance, **how)

    data = {
        "path": path,
        "sound": not found.faults,
        "shards": len(found.shards),
        "tensors": found.tensors,
        "bytes": found.nbytes,
        "hashed_shards": found.hashed,
        "faults": [asdict(fault) for fault in found.faults],
        "notes": found.notes,
    }
    frame.emit(data, _blocks(data), form, ok=not found.faults)


def _size_of(place: Path | str) -> int:
    """Bytes of all files of weights, more or less; 0 if that is not known, as behind a URL."""
    if isinstance(place, str):
        return 0
    from ..checkpoint.kinds import OF_VALUES

    files = [place] if place.is_file() else (file for file in place.rglob("*") if file.suffix in OF_VALUES)
    return sum(file.stat().st_size for file in files if file.is_file())


def _blocks(data: Mapping[str, Any]) -> Iterator[str]:
    looked_at = f"{count_text(data['shards'], 'shard')}, {count_text(data['tensors'], 'tensor')}"
    hashed = f", {data['hashed_shards']} compared with a checksum" if data["hashed_shards"] else ""
    yield f"{data['path']}: {looked_at}, {bytes_text(data['bytes'])} with sound headers{hashed}"
    if data["sound"]:
        yield "No fault found."
    else:
        yield count_text(len(data["faults"]), "fault") + ":"
        rows = [(fault["file"], fault["kind"], fault["message"]) for fault in data["faults"]]
        yield frame.table(("File", "Fault", "What is wrong"), rows, left=3)
    yield from (f"Note: {note}" for note in data["notes"])
