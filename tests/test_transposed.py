"""Copies between tensors whose dimensions lie in another order."""

import pytest
import torch

from hf_zero_stream.engine import transposed
from hf_zero_stream.engine.transposed import copy_strided


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transposed, "SMALL_BYTES", 0)
    monkeypatch.setattr(transposed, "TILE_BYTES", 2**14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn, torch.bool])
@pytest.mark.parametrize("sizes", [(65, 64), (300, 100), (3, 70, 129), (2, 1, 200, 80)])
def test_every_order_of_dimensions(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    values = torch.randint(0, 2 if dtype == torch.bool else 100, sizes).to(dtype)
    for first in range(len(sizes)):
        for second in range(len(sizes)):
            destination = torch.zeros_like(values.transpose(first, second).contiguous()).transpose(first, second)
            copy_strided(destination, values)
            assert torch.equal(destination.contiguous().view(torch.uint8), values.view(torch.uint8))


def test_casts_into_part_of_a_wider_matrix() -> None:
    values = torch.randn(2, 150, 90)[:, 7:140, 5:85]  # rows with holes
    wider = torch.zeros(2, 100, 200, dtype=torch.bfloat16)
    destination = wider[:, 10:90, 20:153].transpose(1, 2)
    copy_strided(destination, values)
    assert torch.equal(destination, values.bfloat16())
    assert wider.count_nonzero() == values.bfloat16().count_nonzero()
