"""``hf-zero-stream verify``: is a checkpoint whole and sound?"""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from .output import CheckpointArgument, Format, FormatOption, RevisionOption, bytes_text, count_text, emit, table


EXAMPLE = "hf-zero-stream verify Qwen/Qwen3-30B-A3B --sha256"


def run(
    path: CheckpointArgument,
    sha256: Annotated[
        bool, typer.Option("--sha256", help="Read all shards and compare them with the Hub's checksums.")
    ] = False,
    sums: Annotated[
        str | None, typer.Option("--sums", metavar="FILE", help="Checksums to compare with, as sha256sum writes them.")
    ] = None,
    revision: RevisionOption = None,
    form: FormatOption = Format.table,
) -> None:
    """Name every fault of a checkpoint; exit code 1 if there is any.

    Checked are sizes, offsets, the index and that no shard is missing. That reads headers only; with --sha256 or
    --sums all shards are read. A repository's id means what the Hub's cache holds of it.
    """
    from ..checkpoint.soundness import check_soundness, read_sums
    from ..reports.progress import progress_bar
    from .checkpoints import cached_folder, size_of_shards

    if sums is not None and not os.path.isfile(sums):
        raise typer.BadParameter(f"--sums: there is no file {sums}")
    known = None if sums is None else read_sums(sums)
    folder = cached_folder(path, revision)
    total = size_of_shards(folder) if sha256 or sums is not None else 0
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
    looked_at = f"{count_text(len(found.shards), 'shard')}, {count_text(found.tensors, 'tensor')}"
    hashed = f", {found.hashed} compared with a checksum" if found.hashed else ""
    blocks: list[Table | str] = [f"{path}: {looked_at}, {bytes_text(found.nbytes)} with sound headers{hashed}"]
    if found.faults:
        blocks.append(count_text(len(found.faults), "fault") + ":")
        rows = [(fault.file, fault.kind, fault.message) for fault in found.faults]
        blocks.append(table(("File", "Fault", "What is wrong"), rows, left=3))
    else:
        blocks.append("No fault found.")
    blocks += [f"Note: {note}" for note in found.notes]
    emit(data, blocks, form)
    if found.faults:
        raise typer.Exit(1)
