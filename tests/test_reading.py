"""What a load's reader counts."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from hf_zero_stream import StreamingConfig
from hf_zero_stream.checkpoint.index import CheckpointIndex
from hf_zero_stream.checkpoint.lazy import checkpoint_slices
from hf_zero_stream.engine.reader import Reader
from hf_zero_stream.ranks.coordinator import Coordinator
from hf_zero_stream.reports.load import PhaseClock
from hf_zero_stream.reports.memory import AnonymousMemory


def test_reads_of_all_checkpoints_count(tmp_path: Path) -> None:
    """Also those that planning made before another checkpoint was added."""
    reader = Reader(StreamingConfig(), Coordinator(0, 1, alone=True), PhaseClock(), AnonymousMemory())
    values = torch.arange(10.0)
    for number in (1, 2):
        file = str(tmp_path / f"{number}.safetensors")
        save_file({"weight": number * values}, file)
        index = CheckpointIndex.from_files([file])
        index = index.numbered_from(reader.add(index.shards))
        read = checkpoint_slices(index, reader.materialise)["weight"][...].materialise()
        assert torch.equal(read, number * values)
        assert (reader.bytes_read, reader.reads) == (number * values.nbytes, number)
    reader.close()
