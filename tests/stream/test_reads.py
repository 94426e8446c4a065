"""What a loader reads of the tensors that a worker gets is seen, whatever it does with them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_zero_stream.plugins.stream.reads import Ranges, Reads, whole


def watched(reads: Reads, **shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Tensors in one piece of memory, as in a bucket."""
    sizes = [torch.Size(shape).numel() for shape in shapes.values()]
    pieces = torch.arange(sum(sizes), dtype=torch.float32).split(sizes)
    tensors = [(name, piece.view(shape)) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)]
    return dict(reads.watched(tensors, [whole(shape) for shape in shapes.values()]))


def as_parameter(values: torch.Tensor) -> torch.nn.Parameter:
    """Loaders of quantised parameters do this: it has the memory, and is no tensor of ours."""
    param = torch.nn.Parameter(torch.empty(6), requires_grad=False)
    param.data = values
    return param


LOADERS: dict[str, tuple[Callable[[torch.Tensor], Any], Ranges]] = {
    "nothing": (lambda given: (given.shape, given.dim(), given.dtype, given.narrow(0, 1, 2).numel()), ()),
    "rows": (lambda given: torch.empty(2, 6).copy_(given.narrow(0, 1, 2)), ((1, 3), (0, 6))),
    "columns": (lambda given: torch.empty(4, 2).copy_(given[:, 3:5]), ((0, 4), (3, 5))),
    "a transposed block": (lambda given: torch.empty(2, 2).copy_(given.t()[2:4, 1:3]), ((1, 3), (2, 4))),
    "a piece of a chunk": (lambda given: given.chunk(2, dim=1)[1].chunk(2)[0].clone(), ((0, 2), (3, 6))),
    "flat rows": (lambda given: given.view(-1)[7:17].sum(), ((1, 3), (0, 6))),
    "every other row": (lambda given: given[1::2].contiguous(), ((1, 4), (0, 6))),
    "two places": (lambda given: (given[0, 1].item(), given[2, 3].item()), ((0, 3), (1, 4))),
    "bytes": (lambda given: given[2].view(torch.uint8).clone(), ((2, 3), (0, 6))),
    "by assignment": (lambda given: torch.empty(6).__setitem__(slice(None), given[3]), ((3, 4), (0, 6))),
    "its data": (lambda given: torch.empty(6).copy_(given.data[3]), ((3, 4), (0, 6))),
    "a copy of a copy": (lambda given: given[1].to(torch.bfloat16).to(torch.float32)[:2], ((1, 2), (0, 6))),
    "in numpy": (lambda given: given[2].numpy(), ((2, 3), (0, 6))),
    "an address": (lambda given: given[2].data_ptr(), ((2, 3), (0, 6))),
    "an operator": (lambda given: torch.ops.aten.add(given[0], 1), ((0, 1), (0, 6))),
    "as a parameter": (lambda given: as_parameter(given[1]).sum(), ((1, 2), (0, 6))),
    "a test": (lambda given: bool(given[0, 0] > 3), ((0, 1), (0, 1))),
}


@pytest.mark.parametrize("name", LOADERS)
def test_what_is_read(name: str) -> None:
    load, expected = LOADERS[name]
    reads = Reads()
    given = watched(reads, before=(5,), it=(4, 6), behind=(3,))
    plain = torch.arange(5, 29, dtype=torch.float32).view(4, 6)
    with reads:
        found = load(given["it"])
    right = load(plain)
    assert isinstance(found, (tuple, type(None))) or name == "an address" or (torch.as_tensor(found) == right).all()
    del given, found
    assert reads.end() == ({"it": expected} if expected else {})


def test_of_a_tensor_that_is_copied_into_another() -> None:
    reads = Reads()
    given = watched(reads, it=(4,), other=(4,))
    given["it"][:2].copy_(given["other"][2:])
    del given
    assert reads.end()["other"] == ((2, 4),)


def test_of_memory_that_others_get_later() -> None:
    """New tensors may lie where a watched one has been: they are not taken for it."""
    reads = Reads()
    for _ in range(50):
        it = watched(reads, it=(1000,))["it"]
        address = it.data_ptr()
        del it
        mine = torch.empty(1000)
        if mine.data_ptr() == address:
            break
    assert mine.data_ptr() == address
    assert type(mine[:3].as_subclass(type(watched(reads, other=(3,))["other"])).clone()) is torch.Tensor


def test_of_what_is_kept() -> None:
    """Nobody sees what is done with it later."""
    reads = Reads()
    kept = watched(reads, it=(4, 6))["it"][:1]
    assert reads.end() == {"it": whole((4, 6))}
    assert kept.sum() == 15


def test_more_than_there_is() -> None:
    reads = Reads()
    ((_, it),) = reads.watched([("it", torch.zeros(4, 6))], [((0, 2), (0, 6))])
    it[:2].clone()
    with pytest.raises(RuntimeError, match=r"it: .* reads \[\(1, 3\), \(0, 6\)\] of it"):
        it[1:3].clone()


def test_of_nothing() -> None:
    reads = Reads()
    given = watched(reads, empty=(0, 3), scalar=())
    given["empty"].clone()
    given["scalar"].clone()
    del given
    assert reads.end() == {"scalar": ()}
