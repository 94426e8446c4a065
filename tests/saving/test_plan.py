"""Save plans on integers: every element goes to its place, once, from a rank that holds it."""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero_stream.checkpoint.lazy import LazyTensor
from hf_zero_stream.checkpoint.nodes import HostTensor, Stored, View
from hf_zero_stream.checkpoint.safetensors import ShardToWrite
from hf_zero_stream.errors import SaveError, UnsupportedError
from hf_zero_stream.holdings import holder
from hf_zero_stream.holdings.holding import Holding
from hf_zero_stream.planning.boxes import Box, Cut, ParameterBox
from hf_zero_stream.planning.plan import partition_range
from hf_zero_stream.ranks.coordinator import Coordinator
from hf_zero_stream.saving import lazy_parameters, write
from hf_zero_stream.saving.lazy_parameters import Selection
from hf_zero_stream.saving.parameters import NewParameters, Values, cover, opened
from hf_zero_stream.saving.plan import Segment, Share, Sources, make_save_plan


Conversion = Callable[[LazyTensor], torch.Tensor]

CONVERSIONS: dict[str, Conversion] = {
    "as it is": lambda tensor: tensor,
    "one expert": lambda tensor: tensor[1],
    "half of each": lambda tensor: tensor.chunk(2, dim=1)[1].contiguous(),
    "transposed": lambda tensor: tensor.transpose(1, 2).contiguous(),
    "one expert transposed": lambda tensor: tensor[2].t().contiguous(),
    "interleaved": lambda tensor: tensor[:, ::2].contiguous(),
    "joined with padding": lambda tensor: torch.nn.functional.pad(tensor, (0, 0, 1, 2)),
    "joined with itself": lambda tensor: torch.cat([tensor, tensor[1:]], dim=0),
    "permuted twice": lambda tensor: tensor.permute(2, 0, 1).contiguous().permute(1, 2, 0).contiguous(),
    "cast": lambda tensor: tensor.to(torch.float64).transpose(0, 1).contiguous(),
}


class Memory:
    """A sink that keeps what it is given, and that nothing is given twice."""

    def __init__(self, nbytes: int) -> None:
        self.data = bytearray(nbytes)
        self.written = bytearray(nbytes)

    def put(self, shard: int, position: int, pieces: list[torch.Tensor]) -> None:
        for buffer in map(write.bytes_of, pieces):
            assert not any(self.written[position : position + len(buffer)])
            self.data[position : position + len(buffer)] = buffer
            self.written[position : position + len(buffer)] = b"\1" * len(buffer)
            position += len(buffer)


class Held:
    """What a rank holds, as a holding gives it."""

    is_swapped = False

    def __init__(self, values: torch.Tensor, start: int, stop: int, everywhere: bool) -> None:
        self.first = 0 if everywhere else start
        self._values = values if everywhere else values[start:stop]

    @contextmanager
    def open(self) -> Iterator[torch.Tensor]:
        yield self._values


def exchanged(segment: Segment, values: list[Values]) -> torch.Tensor:
    """What an exchange between all ranks gives the writer; each rank takes only from what it holds."""
    buffer = torch.empty(segment.numel, dtype=segment.dtype)
    for part in segment.parts:
        write._put(part, write.take(part, values[part.rank]), buffer)
    return buffer


@pytest.mark.parametrize("single_writer", [False, True])
@pytest.mark.parametrize("everywhere", [False, True], ids=["partitioned", "replicated"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 64])
@pytest.mark.parametrize("conversion", CONVERSIONS.values(), ids=CONVERSIONS)
def test_every_byte_once(conversion: Conversion, world_size: int, everywhere: bool, single_writer: bool) -> None:
    full = torch.arange(4 * 6 * 5, dtype=torch.float32).view(4, 6, 5)
    lazy = conversion(LazyTensor.whole(Stored((4, 6, 5), full.dtype, "p"), None))
    expected = conversion(full)  # type: ignore[arg-type]
    start, nbytes = 24, expected.numel() * expected.element_size()
    shard = ShardToWrite("file", b"", {"tensor": start}, {"tensor": lazy.view_of_node}, start + nbytes)
    ranges = [partition_range(full.numel(), rank, world_size)[1:] for rank in range(world_size)]
    shares = {"p": cover("p", full.numel(), [(*own, rank) for rank, own in enumerate(ranges)])}
    if everywhere and single_writer:
        shares = {"p": (Share(0, 0, full.numel()),)}
    contexts, memory, written = ExitStack(), Memory(start + nbytes), 0
    values = [
        contexts.enter_context(opened({"p": Held(full.view(-1), *own, everywhere)}))  # type: ignore[dict-item]
        for own in ranges
    ]
    for rank in range(world_size):
        plan = make_save_plan(
            [shard],
            Sources(shares, everywhere={"p"} if everywhere else set()),
            rank=rank,
            world_size=world_size,
            single_writer=single_writer,
        )
        written += plan.bytes_written
        write._write(plan.alone, values[rank], memory.put)  # type: ignore[arg-type]
        assert not single_writer or rank == 0 or not plan.alone
    for of_round in plan.rounds:
        assert not everywhere, "nobody needs to be asked for what everybody has"
        for rank in range(world_size):
            got = sum(segment.nbytes for writer, segment in of_round if writer == rank)
            assert got <= 64 or sum(writer == rank for writer, _ in of_round) == 1
        for _, segment in of_round:
            memory.put(0, segment.position, [exchanged(segment, values)])
    assert bytes(memory.data[start:]) == expected.contiguous().numpy().tobytes()
    assert all(memory.written[start:]) and written == nbytes


def test_ranges_that_overlap_or_come_in_any_order() -> None:
    generator = random.Random(3)
    for _ in range(300):
        held = [tuple(sorted(generator.choices(range(31), k=2))) for _ in range(12)] + [(0, 7), (7, 30)]
        generator.shuffle(held)
        shares = cover("p", 30, [(start, stop, rank) for rank, (start, stop) in enumerate(held)])
        assert [element for share in shares for element in range(share.start, share.stop)] == list(range(30))
        assert all(held[share.rank][0] <= share.start and share.stop <= held[share.rank][1] for share in shares)


def test_an_element_that_nobody_holds() -> None:
    with pytest.raises(SaveError, match="q_proj: .* nobody holds number 7"):
        cover("q_proj", 12, [(0, 7, 0), (8, 12, 1)])


def test_a_constant_among_what_another_rank_holds() -> None:
    """A buffer that is joined with a parameter: its values may be others on every rank, and rank 0's are saved."""
    buffer = LazyTensor.whole(HostTensor.of(torch.ones(2)), None)
    param = LazyTensor.whole(Stored((4,), torch.float32, "p"), None)
    joined = torch.cat([param, buffer])
    assert isinstance(joined, LazyTensor)
    shard = ShardToWrite("file", b"", {"joined": 0}, {"joined": joined.view_of_node}, 24)
    sources = Sources({"p": (Share(1, 0, 4),)})
    plan = make_save_plan([shard], sources, rank=1, world_size=2, single_writer=False)
    assert [writer for of_round in plan.rounds for writer, _ in of_round] == [0] and plan.alone == ()


def test_constants_are_everybodys() -> None:
    """A buffer of the model: rank 0 writes it."""
    values = torch.arange(6.0)
    view = View.whole(HostTensor.of(values))
    shard = ShardToWrite("file", b"", {"buffer": 0}, {"buffer": view}, 24)
    plans = [make_save_plan([shard], Sources(), rank=rank, world_size=2, single_writer=False) for rank in range(2)]
    (segment,) = plans[0].alone
    assert plans[1].alone == () and plans[0].rounds == ()
    memory = Memory(24)
    with opened({}) as nothing:
        write._write([segment], nothing, memory.put)  # type: ignore[arg-type]
    assert bytes(memory.data) == values.numpy().tobytes()
    assert segment.parts[0].box == Box((6,), 0, (1,), 0, (1,))


def test_a_parameter_without_elements_needs_no_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut along another dimension than the empty one: no rank holds its whole shape."""
    box = ParameterBox.of_cuts((0, 8), [Cut(1, 2, 0)])
    holding = Holding(box, torch.float32, 0, 0, lambda: nullcontext(torch.empty(0)))
    monkeypatch.setattr(holder, "holdings", lambda model, **_: {"p": holding})
    model = nn.Module()
    model.register_parameter("p", nn.Parameter(torch.empty(0, 8)))
    parameters = NewParameters(model, Coordinator.of_default_group(), [Selection()], compares=False, threads=1)
    assert parameters.sources.shares == {"p": ()}


class TwoRanks:
    """Stands in for a coordinator of two ranks, of which the other one has other values of all that both hold."""

    rank, world_size, is_main, is_alone = 0, 2, True, False

    def reporting(self) -> nullcontext[None]:
        return nullcontext()

    def all_gather(self, mine: Any) -> list[Any]:
        if isinstance(mine, str):
            return [mine, mine]
        held, names = mine
        other = {each: each._replace(digest=b"other") for each in held}
        return [mine, ([other[each] for each in held], names)]


def test_each_replica_that_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beside others of the same shape and values, and where ranks are expected to differ for one of these."""
    model = nn.Module()
    found = {}
    for name in ("gathered", "first", "second"):
        model.register_parameter(name, nn.Parameter(torch.ones(4)))
        values = torch.ones(4)
        box, is_gathered = ParameterBox.whole((4,)), name == "gathered"
        opened = partial(nullcontext, values)
        found[name] = Holding(box, torch.float32, 0, 4, opened, is_whole=True, is_gathered=is_gathered)
    monkeypatch.setattr(lazy_parameters, "holdings", lambda model, **_: found)
    with pytest.raises(UnsupportedError, match=r"for 2 parameter\(s\): first \(rank 1\); second \(rank 1\)"):
        NewParameters(model, TwoRanks(), [Selection()], compares=True, threads=1, is_state=True)  # type: ignore[arg-type]
