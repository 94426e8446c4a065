"""How much of a server's bytes a rank asks for: planned for DeepSeek-V3 at its true size, behind a URL."""

from collections.abc import Iterator

import pytest

import hf_zero_stream
from benchmarks.scale import deepseek_v3
from benchmarks.sparse_checkpoint import make_sparse_checkpoint
from tests.support.http_files import Behaviour, http_files


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Behaviour]:
    """1.3 TB in 168 shards, whose data are holes in the files."""
    with http_files(make_sparse_checkpoint(tmp_path_factory.mktemp("served") / "v3", deepseek_v3())) as how:
        yield how


@pytest.mark.plugin("forecast")
@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "rank", "most"), [(2, 1, 1.01), (512, 37, 1.02)])
def test_bytes_asked_for(deepseek: Behaviour, world_size: int, rank: int, most: float) -> None:
    deepseek.requests.clear()
    planned = hf_zero_stream.plan(deepseek.address, world_size=world_size, rank=rank)
    cost = planned.load.cost
    assert cost.target_bytes > 1.3e12 / world_size
    assert cost.bytes_needed <= cost.bytes_read <= most * cost.target_bytes, cost
    assert max(read.length for read in planned.load) <= 2 * 2**20, "as of a server"
    shards = [path for path, _, _ in deepseek.requests if path.endswith("-of-00168.safetensors")]
    assert len(set(shards)) == 168
