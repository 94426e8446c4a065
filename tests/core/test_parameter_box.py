"""Cuts are torch's own: what is left of a dimension is what `Shard` and `_StridedShard` would leave."""

from collections.abc import Sequence
from itertools import product
from math import prod

import pytest
import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

from hf_zero_stream.planning.boxes import Cut, ParameterBox


def torch_cut(tensor: torch.Tensor, cut: Cut) -> torch.Tensor:
    placement = _StridedShard(cut.dim, split_factor=cut.groups) if cut.groups > 1 else Shard(cut.dim)
    return placement._split_tensor(tensor, cut.parts, with_padding=False)[0][cut.part]


def picked(tensor: torch.Tensor, cuts: Sequence[Cut]) -> torch.Tensor:
    return picked_by_intervals(tensor, ParameterBox.of_cuts(tensor.shape, cuts))


def picked_by_intervals(tensor: torch.Tensor, box: ParameterBox) -> torch.Tensor:
    for dim, intervals in enumerate(box.intervals):
        tensor = torch.cat([tensor.narrow(dim, start, stop - start) for start, stop in intervals], dim)
    return tensor


@pytest.mark.parametrize("size", range(1, 17))
def test_one_and_two_cuts_of_a_dimension(size: int) -> None:
    values = torch.arange(size)
    for parts, groups, parts_after, groups_after in product((1, 2, 3, 4), (1, 2, 3), (1, 2, 3), (1, 2)):
        for index, index_after in product(range(parts), range(parts_after)):
            cuts = [Cut(0, parts, index, groups), Cut(0, parts_after, index_after, groups_after)]
            assert torch.equal(picked(values, cuts[:1]), torch_cut(values, cuts[0]))
            if groups_after == 1 or picked(values, cuts[:1]).numel():
                assert torch.equal(picked(values, cuts), torch_cut(torch_cut(values, cuts[0]), cuts[1]))


def test_cuts_of_several_dimensions() -> None:
    values = torch.arange(7 * 12 * 5).view(7, 12, 5)
    cuts = [Cut(1, 2, 1, groups=2), Cut(0, 3, 2), Cut(2, 2, 0), Cut(1, 3, 0)]
    expected = values
    for cut in cuts:
        expected = torch_cut(expected, cut)
    assert torch.equal(picked(values, cuts), expected)


def test_boxes_are_data() -> None:
    assert ParameterBox.of_cuts((8, 6), [Cut(0, 2, 1, groups=2), Cut(1, 3, 2)]).intervals == (
        ((2, 4), (6, 8)),
        ((4, 6),),
    )
    assert ParameterBox.of_cuts((2,), [Cut(0, 3, 2)]).intervals == (((0, 0),),)
    assert ParameterBox.of_cuts((), []) == ParameterBox.whole(())
    assert ParameterBox.of_cuts((8,), [Cut(0, 2, 0), Cut(0, 1, 0, groups=4)]).intervals == (((0, 4),),)


BOXES = [
    ParameterBox.whole(()),
    ParameterBox.whole((3, 4)),
    ParameterBox.of_cuts((6, 4), [Cut(0, 2, 1, groups=3)]),
    ParameterBox.of_cuts((5, 4, 3), [Cut(0, 2, 1), Cut(1, 2, 0, groups=2)]),
    ParameterBox.of_cuts((5, 9), [Cut(1, 2, 1, groups=3)]),
    ParameterBox.of_cuts((2, 3), [Cut(0, 3, 2)]),
]


@pytest.mark.parametrize("box", BOXES)
def test_runs(box: ParameterBox) -> None:
    whole = torch.arange(prod(box.shape)).view(box.shape)
    inside = picked_by_intervals(whole, box).reshape(-1).tolist()
    for start in range(box.numel + 1):
        for stop in range(start, box.numel + 1):
            found = [element for first, count in box.runs(start, stop) for element in range(first, first + count)]
            assert found == inside[start:stop]


@pytest.mark.parametrize("box", BOXES)
def test_blocks(box: ParameterBox) -> None:
    whole = torch.arange(prod(box.shape)).view(box.shape)
    inside = picked_by_intervals(whole, box)
    elements = 0
    for block, within in box.blocks():
        assert torch.equal(picked_by_intervals(whole, block), picked_by_intervals(inside, within))
        elements += block.numel
    assert elements == box.numel
