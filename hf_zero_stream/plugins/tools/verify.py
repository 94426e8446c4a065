"""``hf-zero-stream verify``: is a checkpoint whole and sound?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...plugin_api import bytes_text, count_text, frame


EXAMPLE = "hf-zero-stream verify Qwen/Qwen3-30B-A3B"


def run(
    path: frame.CheckpointArgument,
    revision: frame.RevisionOption = None,
    form: frame.FormatOption = "table",
) -> None:
    """Name every fault of a checkpoint; exit code 1 if there is any.

    Checks sizes, offsets and the index, and that no shard is missing; of safetensors files and of other formats. Only
    headers are read; for the Hub's checksums run `hf cache verify`. The id of a repository means what the Hub's cache
    holds of it, and hf://... the repository on the Hub itself.
    """
    from .soundness import soundness_at

    found = soundness_at(path, revision)
    data = {
        "path": path,
        "sound": not found.faults,
        "shards": len(found.shards),
        "tensors": found.tensors,
        "bytes": found.nbytes,
        "faults": [fault._asdict() for fault in found.faults],
        "notes": found.notes,
    }
    frame.emit(data, _blocks(data), form, ok=not found.faults)


def _blocks(data: Mapping[str, Any]) -> Iterator[str]:
    looked_at = f"{count_text(data['shards'], 'shard')}, {count_text(data['tensors'], 'tensor')}"
    yield f"{data['path']}: {looked_at}, {bytes_text(data['bytes'])} with sound headers"
    if data["sound"]:
        yield "No fault found."
    else:
        yield count_text(len(data["faults"]), "fault") + ":"
        rows = [(fault["file"], fault["kind"], fault["message"]) for fault in data["faults"]]
        yield frame.table(("File", "Fault", "What is wrong"), rows, left=3)
    yield from (f"Note: {note}" for note in data["notes"])
