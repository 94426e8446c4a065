"""What a load's reader counts."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from hf_zero_stream import StreamingConfig
from hf_zero_stream.checkpoint.formats import read_map
from hf_zero_stream.engine.opened import OpenCheckpoint
from hf_zero_stream.ranks.coordinator import Coordinator


def test_reads_of_all_checkpoints_count(tmp_path: Path) -> None:
    """Also those that planning made before another checkpoint was added."""
    checkpoint = OpenCheckpoint(StreamingConfig(), Coordinator(0, 1, alone=True))
    values = torch.arange(10.0)
    for number in (1, 2):
        file = str(tmp_path / f"{number}.safetensors")
        save_file({"weight": number * values}, file)
        found = read_map([file], None, len(checkpoint.shards))
        checkpoint.add(found.shards)
        slices = found.slices(checkpoint.materialise)
        read = slices["weight"][...].materialise()
        assert torch.equal(read, number * values)
        assert (checkpoint.source.bytes_read, checkpoint.source.reads) == (number * values.nbytes, number)
    checkpoint.close()
