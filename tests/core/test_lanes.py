"""Staging buffers are not reused before the copies out of them are done, also where copies run on by themselves."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hf_zero_stream.checkpoint.formats import read_map
from hf_zero_stream.engine import execute
from hf_zero_stream.engine.execute import execute_reads
from hf_zero_stream.engine.lanes import Lane
from hf_zero_stream.planning.plan import BatchPlan, Target, plan_batch
from hf_zero_stream.sources.local import LocalFiles


class LateLane(Lane):
    """As late as a stream may be: nothing is copied before somebody waits for it."""

    buffers = 2

    def __init__(self, nbytes: int) -> None:
        super().__init__([], nbytes)
        self.pending: list[Callable[[], None]] = []
        self.allocated = 0
        self.waits = 0
        self.done = 0

    def _allocate(self, nbytes: int) -> torch.Tensor:
        self.allocated += 1
        return torch.empty(nbytes, dtype=torch.uint8)

    def _submit(self, copy: Callable[[], None]) -> None:
        self.pending.append(copy)

    def _mark(self) -> int:
        return self.done + len(self.pending)

    def _wait(self, mark: int) -> None:
        self.waits += 1
        while self.done < mark:
            self.pending.pop(0)()
            self.done += 1


REQUEST_BYTES = 256


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[BatchPlan, LocalFiles, list[torch.Tensor]]:
    """A plan with casts, a transposition and plain runs, and what it should give."""
    torch.manual_seed(0)
    tensors = {f"t{number}": torch.randn(12, 10) for number in range(9)}
    save_file(tensors, tmp_path / "model.safetensors")
    index = read_map([tmp_path / "model.safetensors"])
    lazy = {name: item[...] for name, item in index.slices(lambda view: torch.empty(0)).items()}
    views: list[tuple[Target, Any]] = []
    expected = []
    for number, (name, tensor) in enumerate(tensors.items()):
        dtype = torch.bfloat16 if number % 3 else torch.float32
        turned = number % 3 == 2
        views.append((Target(name, dtype, 120, 0, 120), (lazy[name].t() if turned else lazy[name]).view_of_node))
        expected.append((tensor.t() if turned else tensor).to(dtype).reshape(-1))
    plan, _ = plan_batch(views, request_bytes=REQUEST_BYTES, seek_bytes=64)
    return plan, LocalFiles(index.shards), expected


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[LateLane]:
    """The lanes of loads, which go as if to a device."""
    lanes: list[LateLane] = []

    def lane_for(destinations: Sequence[torch.Tensor], nbytes: int) -> Callable[[], LateLane]:
        return lambda: lanes.append(LateLane(nbytes)) or lanes[-1]  # type: ignore[func-returns-value]

    monkeypatch.setattr(execute, "lane_for", lane_for)
    monkeypatch.setattr(execute, "_buffers_in_place", lambda *args: None)
    return lanes


Checkpoint = tuple[BatchPlan, LocalFiles, list[torch.Tensor]]


@pytest.mark.parametrize("threads", [1, 3])
def test_late_copies_give_the_same_values(made: list[LateLane], checkpoint: Checkpoint, threads: int) -> None:
    plan, files, expected = checkpoint
    found = [torch.full((120,), float("nan"), dtype=target.dtype) for target in plan.targets]
    _, staging_bytes = execute_reads(plan, found, files, threads=threads)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    assert not any(lane.pending for lane in made)
    assert max(lane.allocated for lane in made) == 2
    assert staging_bytes == REQUEST_BYTES * sum(lane.allocated for lane in made)
    if threads == 1:
        # A buffer is waited for only when it comes round again, and once at the end.
        assert made[0].waits == len(plan.reads) - 2 + 1


def test_after_an_error_no_copy_is_under_way(made: list[LateLane], checkpoint: Checkpoint) -> None:
    """Or it would write into memory that somebody else has been given meanwhile."""
    plan, files, _ = checkpoint

    def full() -> None:
        raise RuntimeError("full")

    found = [torch.empty(120, dtype=target.dtype) for target in plan.targets]
    with pytest.raises(RuntimeError, match="full"):
        execute_reads(plan, found, files, threads=2, on_bytes=lambda nbytes: full())
    assert sum(lane.done for lane in made) > 0 and not any(lane.pending for lane in made)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("device", range(max(1, torch.cuda.device_count())))
def test_copies_to_a_gpu(checkpoint: tuple[BatchPlan, LocalFiles, list[torch.Tensor]], device: int) -> None:
    """Also from inside a stream of the caller's, which stays on the device that it is on."""
    plan, files, expected = checkpoint
    torch.cuda.set_device(device)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        found = [torch.full((120,), float("nan"), dtype=target.dtype, device="cuda") for target in plan.targets]
        execute_reads(plan, found, files, threads=3)
        assert all(torch.equal(mine.cpu(), theirs) for mine, theirs in zip(found, expected, strict=True))
    assert torch.cuda.current_device() == device


def test_lane_without_reads_has_no_buffer() -> None:
    lane = LateLane(64)
    lane.finish()
    assert lane.allocated_bytes == lane.allocated == lane.waits == 0
