"""``hf-zero-stream verify``: is a checkpoint whole and sound?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ..reports.text import bytes_text, count_text
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

    Checked are sizes, offsets, the index and that no shard is missing. That reads headers only; with --sha256 or
    --sums all shards are read. A repository's id means what the Hub's cache holds of it.
    """
    from ..checkpoint.soundness import check_soundness, read_sums
    from ..reports.progress import progress_bar
    from .checkpoints import cached_folder

    known = None if sums is None else read_sums(sums)
    folder = cached_folder(path, revision)
    total = 0
    if sha256 or sums is not None:
        files = [folder] if folder.is_file() else folder.glob("*.safetensors")
        total = sum(file.stat().st_size for file in files if file.is_file())
    with progress_bar(total, "Hashing", total > 0) as advance:
        found = check_soundness(folder, sha256=sha256, sums=known, on_bytes=advance)

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
