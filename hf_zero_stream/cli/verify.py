"""``hf-zero-stream verify``: is a checkpoint whole and sound?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from .options import CheckpointArgument, FormatOption, RevisionOption
from .output import bytes_text, count_text, emit, table


if TYPE_CHECKING:
    from ..checkpoint.soundness import Soundness

EXAMPLE = "hf-zero-stream verify Qwen/Qwen3-30B-A3B --sha256"


def run(
    path: CheckpointArgument,
    sha256: Annotated[
        bool, typer.Option("--sha256", help="Read all shards and compare them with the Hub's checksums.")
    ] = False,
    sums: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", exists=True, dir_okay=False, help="Checksums to compare with, as sha256sum writes them."
        ),
    ] = None,
    revision: RevisionOption = None,
    form: FormatOption = "table",
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
    with progress_bar(total, "Hashing", total > 0) as bar:
        found = check_soundness(folder, sha256=sha256, sums=known, on_bytes=bar.update)

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
    emit(data, _blocks(path, found), form, ok=not found.faults)


def _blocks(path: str, found: Soundness) -> Iterator[Table | str]:
    looked_at = f"{count_text(len(found.shards), 'shard')}, {count_text(found.tensors, 'tensor')}"
    hashed = f", {found.hashed} compared with a checksum" if found.hashed else ""
    yield f"{path}: {looked_at}, {bytes_text(found.nbytes)} with sound headers{hashed}"
    if found.faults:
        yield count_text(len(found.faults), "fault") + ":"
        rows = [(fault.file, fault.kind, fault.message) for fault in found.faults]
        yield table(("File", "Fault", "What is wrong"), rows, left=3)
    else:
        yield "No fault found."
    yield from (f"Note: {note}" for note in found.notes)
