"""A shared disk, for which a FUSE file system stands: it is known as one, and what it gives is what the files hold."""

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

import hf_zero_stream
from benchmarks.slow_disk import slow_folder
from hf_zero_stream.checkpoint.formats import map_from_headers
from hf_zero_stream.engine.opened import OpenCheckpoint
from hf_zero_stream.ranks.coordinator import Coordinator
from hf_zero_stream.settings.config import StreamingConfig
from hf_zero_stream.sources.local import is_on_network
from scripts.system_packages import FUSE
from tests.conftest import skip_if_lacking
from tests.support.cluster import run_ranks
from tests.support.parity import ds_config


needs_fuse = pytest.mark.skipif(
    not os.access("/dev/fuse", os.W_OK), reason="this system does not let FUSE be used (/dev/fuse)"
)


@pytest.mark.slow
@needs_fuse
def test_a_slow_shared_disk(tmp_path: Path) -> None:
    skip_if_lacking(FUSE)
    tensors = {"a": torch.randn(1000, 1100), "b": torch.arange(7)}
    save_file(tensors, tmp_path / "x.safetensors")
    with slow_folder(tmp_path, latency=5, rate=400) as place:
        assert is_on_network(str(place)) and not is_on_network(str(tmp_path))
        with closing(OpenCheckpoint(StreamingConfig(), Coordinator(0, 1, alone=True))) as checkpoint:
            paths = [str(place / "x.safetensors")]
            index = map_from_headers(paths, checkpoint.read_headers(paths))
            checkpoint.add(index.shards)
            assert checkpoint.threads() == 32
            slices = index.slices(checkpoint.materialise)
            for name, expected in tensors.items():
                assert torch.equal(slices[name][...].materialise(), expected)


def load_replicas(folder: str) -> None:
    with hf_zero_stream.streaming(StreamingConfig(progress=False)):
        model = transformers.AutoModel.from_pretrained(folder)
        assert sum(rank.bytes_read for rank in model.streaming_report.ranks)


def load_partitions(folder: str) -> None:
    hf_zero_stream.StreamingAutoModel.from_pretrained(folder, ds_config=ds_config())


@needs_fuse
@pytest.mark.parametrize("load", [load_partitions, load_replicas])
def test_each_byte_crosses_the_wire_once_per_host(cluster: None, tmp_path: Path, load: Callable[[str], None]) -> None:
    """Two ranks whose parts lie side by side in each tensor; what the kernel asks the server for is counted."""
    skip_if_lacking(FUSE)
    folder, log = tmp_path / "model", tmp_path / "log"
    config = transformers.BertConfig(
        hidden_size=256, num_hidden_layers=6, num_attention_heads=2, intermediate_size=1024, vocab_size=1009
    )
    transformers.BertModel(config).save_pretrained(folder)
    size = (folder / "model.safetensors").stat().st_size
    with slow_folder(folder, latency=1, rate=1000, log=log) as place:
        run_ranks(2, load, str(place))
    lines = [line.split() for line in log.read_text().splitlines()]
    asked = sum(int(nbytes) for name, _, nbytes in lines if name == "model.safetensors")
    assert size <= asked <= 1.02 * size, (size, asked)
