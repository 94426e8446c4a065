"""A shared disk, for which a FUSE file system stands: it is known as one, and what it gives is what the files hold."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.slow_disk import slow_folder
from hf_zero_stream.checkpoint.index import CheckpointIndex, checkpoint_slices
from hf_zero_stream.config import StreamingConfig
from hf_zero_stream.engine.opened import OpenCheckpoint
from hf_zero_stream.ranks.coordinator import Coordinator
from hf_zero_stream.sources.local import is_on_network
from scripts.system_packages import FUSE
from tests.conftest import skip_if_lacking


@pytest.mark.skipif(not os.access("/dev/fuse", os.W_OK), reason="this system does not let FUSE be used (/dev/fuse)")
@pytest.mark.parametrize("direct_io", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_slow_shared_disk(tmp_path: Path, direct_io: bool) -> None:
    skip_if_lacking(FUSE)
    tensors = {"a": torch.randn(1000, 1100), "b": torch.arange(7)}
    save_file(tensors, tmp_path / "x.safetensors")
    settings = StreamingConfig(direct_io=direct_io)
    with slow_folder(tmp_path, latency=5, rate=400) as place:
        assert is_on_network(str(place)) and not is_on_network(str(tmp_path))
        with closing(OpenCheckpoint(settings, Coordinator(0, 1, alone=True))) as checkpoint:
            paths = [str(place / "x.safetensors")]
            index = CheckpointIndex.from_headers(paths, checkpoint.read_headers(paths))
            checkpoint.add(index.shards)
            assert checkpoint.threads() == (8 if direct_io else 32)
            slices = checkpoint_slices(index, checkpoint.materialise)
            for name, expected in tensors.items():
                assert torch.equal(slices[name][...].materialise(), expected)
