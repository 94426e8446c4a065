"""Streamed models equal plain `from_pretrained` bit for bit, at every world size, in every dtype."""

import pytest
import torch

from tests.support.cluster import run_ranks
from tests.support.parity import compare
from tests.support.zoo import ZOO, Checkpoint


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", list(ZOO))
def test_equals_plain_loading(
    cluster: None, zoo_checkpoint: Checkpoint, name: str, dtype: str, world_size: int
) -> None:
    folder = zoo_checkpoint(name, DTYPES[dtype])
    for result in run_ranks(
        world_size, compare, ZOO[name].auto_class, folder, {"dtype": DTYPES[dtype]}, DTYPES[dtype]
    ):
        assert result["differences"] == []
        assert result["info"] == result["plain_info"]
        assert all(not rank["materialised"] for rank in result["report"]["ranks"])


@pytest.mark.parametrize("ds_dtype", list(DTYPES))
@pytest.mark.parametrize("file_dtype", list(DTYPES))
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_vl_moe", "t5"])
def test_casts_as_stock(cluster: None, zoo_checkpoint: Checkpoint, name: str, file_dtype: str, ds_dtype: str) -> None:
    """Parameters take DeepSpeed's dtype, whatever the file's: the cast is torch's own."""
    folder = zoo_checkpoint(name, DTYPES[file_dtype])
    kwargs = {"dtype": DTYPES[file_dtype]}
    for result in run_ranks(2, compare, ZOO[name].auto_class, folder, kwargs, DTYPES[ds_dtype]):
        assert result["differences"] == []
