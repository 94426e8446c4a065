"""The arithmetic of strided boxes, against numpy doing the same copies one element at a time."""

import itertools
import random
from collections.abc import Iterator
from math import prod

import numpy
import pytest

from hf_zero_stream.planning.boxes import Box, CoordinateBox, flat_range, simplify, to_coordinates


def random_view(rng: random.Random) -> tuple[numpy.ndarray, numpy.ndarray]:
    """A buffer of distinct numbers and a view of it: permuted, sliced with steps, sometimes expanded."""
    shape = [rng.randint(1, 5) for _ in range(rng.randint(0, 4))]
    buffer = numpy.arange(prod(shape)).reshape(shape)
    view = buffer.transpose(rng.sample(range(len(shape)), len(shape)))
    view = view[tuple(slice(rng.randrange(size), None, rng.randint(1, 3)) for size in view.shape)]
    if rng.random() < 0.3:
        view = numpy.broadcast_to(view, (3, *view.shape))
    return buffer, view


def boxes_of(view: numpy.ndarray, start: int, stop: int) -> list[Box]:
    strides = tuple(stride // view.itemsize for stride in view.strides)
    return list(flat_range(view.shape, strides, int(view.flat[0]), start, stop))


def copies(box: Box) -> Iterator[tuple[int, int]]:
    for index in itertools.product(*map(range, box.sizes)):
        at = sum(i * stride for i, stride in zip(index, box.at_strides, strict=True))
        to = sum(i * stride for i, stride in zip(index, box.to_strides, strict=True))
        yield box.at + at, box.to + to


def placed_copies(coordinates: CoordinateBox) -> Iterator[tuple[tuple[int, ...], int]]:
    for index in itertools.product(*(range(axis.size) for axis in coordinates.axes)):
        at, to = list(coordinates.at), coordinates.to
        for i, axis in zip(index, coordinates.axes, strict=True):
            if axis.dim >= 0:
                at[axis.dim] += i * axis.step
            to += i * axis.to_stride
        yield tuple(at), to


@pytest.mark.parametrize("seed", range(300))
def test_flat_range_and_place(seed: int) -> None:
    rng = random.Random(seed)
    buffer, view = random_view(rng)
    start = rng.randint(0, view.size)
    stop = rng.randint(start, view.size)
    expected = {position: int(value) for position, value in enumerate(view.reshape(-1)[start:stop])}
    boxes = boxes_of(view, start, stop)
    assert len(boxes) <= max(1, 2 * view.ndim - 1)
    assert {to: at for box in boxes for at, to in copies(box)} == expected
    assert {to: at for box in boxes for at, to in copies(simplify(box))} == expected
    parts = [part for box in boxes for part in to_coordinates(simplify(box), buffer.shape)]
    assert {to: int(buffer[at]) for part in parts for at, to in placed_copies(part)} == expected
    assert sum(prod(axis.size for axis in part.axes) for part in parts) == stop - start, "nothing is copied twice"


def test_contiguous_range_is_one_box() -> None:
    (box,) = flat_range((4, 5, 6), (30, 6, 1), 0, 30, 90)
    assert simplify(box) == Box((60,), 30, (1,), 0, (1,))


def test_placing_a_run_needs_few_cuts() -> None:
    """A run over [8, 6, 10] that begins and ends inside rows: two partial rows at each end and whole ones between."""
    run = Box((300,), 47, (1,), 0, (1,))
    assert len(list(to_coordinates(run, (8, 6, 10)))) <= 5


def test_empty_range() -> None:
    assert list(flat_range((3, 4), (4, 1), 0, 5, 5)) == []
