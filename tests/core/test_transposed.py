"""Copies between tensors whose dimensions lie in another order."""

from math import prod

import pytest
import torch

from hf_zero_stream.engine import lanes
from hf_zero_stream.engine.lanes import copy_strided


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "SMALL_BYTES", 0)
    monkeypatch.setattr(lanes, "TILE_BYTES", 2**14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn, torch.bool])
@pytest.mark.parametrize("sizes", [(65, 64), (300, 100), (3, 70, 129), (2, 1, 200, 80)])
def test_every_order_of_dimensions(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    nbytes = prod(sizes) * dtype.itemsize  # all patterns of bits, of numbers that are none, too
    values = torch.randint(0, 2 if dtype == torch.bool else 256, (nbytes,)).to(torch.uint8).view(dtype).view(sizes)
    for first in range(len(sizes)):
        for second in range(len(sizes)):
            destination = torch.zeros_like(values.transpose(first, second).contiguous()).transpose(first, second)
            copy_strided(destination, values)
            assert torch.equal(destination.contiguous().view(torch.uint8), values.view(torch.uint8))


def test_rows_that_begin_between_words() -> None:
    """Pairs of neighbours cannot move as one word of four bytes."""
    values = torch.arange(3 * 80 * 90 + 1).to(torch.int16)[1:].view(3, 80, 90)
    destination = torch.zeros(3, 90, 80, dtype=torch.int16)
    copy_strided(destination.transpose(1, 2), values)
    assert torch.equal(destination, values.transpose(1, 2))


def test_casts_into_part_of_a_wider_matrix() -> None:
    values = torch.randn(2, 150, 90)[:, 7:140, 5:85]  # rows with holes
    wider = torch.zeros(2, 100, 200, dtype=torch.bfloat16)
    destination = wider[:, 10:90, 20:153].transpose(1, 2)
    copy_strided(destination, values)
    assert torch.equal(destination, values.bfloat16())
    assert wider.count_nonzero() == values.bfloat16().count_nonzero()
