"""The arena takes a part again when nobody refers to it; a supply reads what comes next, and keeps what was last."""

import gc
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from hf_zero_stream.errors import ReadError
from hf_zero_stream.plugins.from_files.arena import ALIGNMENT, Arena
from hf_zero_stream.plugins.from_files.supply import Supply


CPU = torch.device("cpu")


def test_a_part_is_taken_again_once_nobody_refers_to_it() -> None:
    arena = Arena(4 * ALIGNMENT, CPU)
    first, second = arena.take(ALIGNMENT), arena.take(3 * ALIGNMENT)
    assert first is not None and second is not None and arena.take(1) is None
    first.fill_(1)
    view = first[:4].view(torch.float32)  # as autograd keeps one
    del first
    assert arena.take(1) is None
    second.fill_(2)
    assert view.view(torch.uint8).tolist() == [1, 1, 1, 1]
    del view
    assert arena.take(ALIGNMENT) is not None


def test_parts_of_all_sizes_lie_side_by_side() -> None:
    """Random sizes, taken and dropped: no two overlap, and in the end it is one piece again."""
    arena, rng, held = Arena(64 * ALIGNMENT, CPU), random.Random(0), dict[int, torch.Tensor]()
    for number in range(400):
        if held and rng.random() < 0.5:
            del held[rng.choice(list(held))]
        elif (part := arena.take(rng.randrange(1, 9 * ALIGNMENT))) is not None:
            held[number] = part.fill_(number % 251)
        assert all(bool((part == number % 251).all()) for number, part in held.items())
    held.clear()
    del part
    assert arena.take(64 * ALIGNMENT) is not None


def test_parts_outlive_the_arena() -> None:
    arena = Arena(ALIGNMENT, CPU)
    part = arena.take(ALIGNMENT)
    assert part is not None
    part.fill_(7)
    del arena
    gc.collect()
    assert bool((part == 7).all())


@dataclass
class Files:
    """Stands for the files of a checkpoint: weight N has bytes that are N."""

    reads: list[int] = field(default_factory=list)
    fails: set[int] = field(default_factory=set)
    may_read: threading.Event = field(default_factory=threading.Event)

    def read(self, weight: Any, memory: torch.Tensor) -> None:
        assert self.may_read.wait(10)
        self.reads.append(weight.number)
        if weight.number in self.fails:
            raise ReadError(f"{weight.number}: cannot read")
        memory.fill_(weight.number)

    def path_of(self, weight: Any) -> str:
        return f"file of {weight.name}"


@dataclass
class Weight:
    number: int
    nbytes: int
    name: str = "w"

    @property
    def plan(self) -> Any:
        return self

    @property
    def cost(self) -> Any:
        return self

    @property
    def bytes_read(self) -> int:
        return self.nbytes


def supply_of(sizes: list[int], room: int) -> tuple[Supply, Files]:
    files: Any = Files()
    files.may_read.set()
    weights: Any = {number: Weight(number, size * ALIGNMENT) for number, size in enumerate(sizes)}
    return Supply(weights, files, Arena(room * ALIGNMENT, CPU)), files


def run_pass(supply: Supply, order: list[int]) -> None:
    supply.begin_pass("training")
    for number in order:
        memory = supply.take(number)
        assert bool((memory == number).all()), number
        supply.give_back(number, memory)


@pytest.mark.parametrize("seed", range(20))
def test_it_gives_what_the_files_have_whatever_there_is_room_for(seed: int) -> None:
    """Sizes and room at random: the right bytes, and at most one reading for each time that one is asked for."""
    rng = random.Random(seed)
    sizes = [rng.randrange(1, 8) for _ in range(30)]
    supply, files = supply_of(sizes, rng.randrange(8, sum(sizes) + 8))
    order = [*range(30), *reversed(range(30))]
    for number in range(4):
        run_pass(supply, order)
        assert len(files.reads) <= len(order) * (number + 1) + 30


def test_what_was_used_last_is_not_read_again() -> None:
    """A pass forward and back, and a layer that is asked for three times, as checkpointing has attention."""
    supply, files = supply_of([1] * 10, 4)
    order = [*range(10), *(number for layer in reversed(range(10)) for number in (layer, layer))]
    run_pass(supply, order)
    run_pass(supply, order)
    before = len(files.reads)
    run_pass(supply, order)
    assert len(files.reads) - before <= 20 - 6


def test_all_that_there_is_room_for_is_read_once() -> None:
    supply, files = supply_of([1, 2, 3], 6)
    for _ in range(3):
        run_pass(supply, [0, 1, 2, 2, 1, 0])
    assert sorted(files.reads) == [0, 1, 2]


def test_what_comes_next_is_read_while_one_is_in_use() -> None:
    supply, files = supply_of([1] * 6, 4)
    supply.begin_pass("training")
    memory = supply.take(0)
    supply._worker.submit(int).result(10)  # the thread has come to rest
    assert files.reads == [0, 1, 2, 3]
    supply.give_back(0, memory)


def test_several_threads_may_ask() -> None:
    supply, _ = supply_of([1] * 40, 6)

    def right(number: int) -> bool:
        memory = supply.take(number, in_order=False)
        is_right = bool((memory == number).all())
        supply.give_back(number, memory, keeps=False)
        return is_right

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(right, range(40), timeout=30))


def test_an_error_is_raised_where_the_weight_is_needed() -> None:
    supply, files = supply_of([1] * 4, 4)
    files.fails = {2}
    supply.begin_pass("training")
    for number in (0, 1):
        supply.give_back(number, supply.take(number))
    with pytest.raises(ReadError, match="2: cannot read"):
        supply.take(2)
    supply.give_back(3, supply.take(3))
    assert files.reads.count(2) < 8, "it was read again and again while nobody needed it"
    files.fails = set()
    assert bool((supply.take(2) == 2).all())


def test_what_is_kept_by_others_is_not_overwritten(caplog: pytest.LogCaptureFixture) -> None:
    """As by autograd, without checkpointing: what there is no room for is read beside the arena, with a warning."""
    supply, _ = supply_of([1] * 6, 2)
    kept = []
    supply.begin_pass("training")
    for number in range(6):
        memory = supply.take(number)
        kept.append(memory[:])
        supply.give_back(number, memory)
    assert all(bool((memory == number).all()) for number, memory in enumerate(kept))
    assert "gradient_checkpointing_enable" in caplog.text


def test_a_read_that_stalls_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("hf_zero_stream.plugins.from_files.supply.STALL_SECONDS", 0.05)
    supply, files = supply_of([1], 1)
    files.may_read.clear()
    threading.Timer(0.3, files.may_read.set).start()
    assert bool((supply.take(0) == 0).all())
    assert "file of w" in caplog.text
