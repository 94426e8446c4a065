"""What paper GPUs are strict about, and that mistakes of ours would show on them: each is made, and must be seen."""

import ctypes
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch import nn

import hf_zero_stream
from hf_zero_stream import StreamingConfig
from hf_zero_stream.engine import execute, lanes
from hf_zero_stream.saving import snapshot
from tests.paper_gpu.trials import COMMON, plain_model
from tests.support.cluster import PAPER_GPUS, run_ranks, run_ranks_expecting_errors


pytestmark = pytest.mark.usefixtures("paper_gpus")

MANY_READS = StreamingConfig(staging_bytes=8 * 2048, reader_threads=2, progress=False)
"""So many that buffers come round again while copies out of them are under way."""


# ------------------------------------------------------------------------------------------------------ the devices


def without_waiting() -> dict[str, Any]:
    found: dict[str, Any] = {"overwritten": 0, "not there yet": 0}
    ones = torch.ones(2**16, device="cuda")
    for _ in range(20):  # a stream may happen to be fast
        source = torch.ones(2**16, pin_memory=True)
        copied = torch.empty(2**16, device="cuda").copy_(source, non_blocking=True)
        source.zero_()  # too early
        found["overwritten"] += int((copied == 0).sum())
        fetched = torch.empty(2**16, pin_memory=True).copy_(ones, non_blocking=True)
        found["not there yet"] += int((fetched != 1).sum())
    with torch.cuda.stream(torch.cuda.Stream()):
        found["other stream"] = bool(torch.isnan(torch.ones(2**16).to("cuda").new_empty(2**16)).all())
    where = torch.ones(2**16, device="cuda").data_ptr()  # freed at once
    again = torch.empty(2**16, device="cuda")
    found["freed"] = again.data_ptr() == where and bool(again.isnan().all())
    before = torch.cuda.memory_allocated()
    kept = torch.empty(1000, device="cuda")
    found["allocated"] = torch.cuda.memory_allocated() - before
    found["pinned"] = kept.cpu().pin_memory().is_pinned()
    with pytest.raises(torch.cuda.OutOfMemoryError):
        torch.empty(2**33, device="cuda")
    with pytest.raises(RuntimeError, match="same device"):
        kept + torch.ones(1000)
    return found


def test_devices_work_beside_the_host() -> None:
    (found,) = run_ranks(1, without_waiting, on=PAPER_GPUS)
    assert found["overwritten"] and found["not there yet"], "whoever does not wait must see it"
    assert found["other stream"] and found["freed"] and found["pinned"] and found["allocated"] == 4096


def touch_memory_of_a_device() -> None:
    ctypes.string_at(torch.ones(8, device="cuda").data_ptr(), 1)


def test_the_host_cannot_read_a_device() -> None:
    (outcome,) = run_ranks_expecting_errors(1, touch_memory_of_a_device, on=PAPER_GPUS)
    assert outcome.error_message is not None and "exit code -11" in outcome.error_message


def refused_collectives() -> list[str]:
    rank = dist.get_rank()
    own = torch.device("cuda", rank)
    tried: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(torch.ones(4)),
        lambda: dist.all_reduce(torch.ones(4, 4, device=own).t()[:2]),
        lambda: dist.all_reduce(torch.ones(4, dtype=torch.int16, device=own)),
        lambda: dist.all_reduce(torch.ones(4, device=torch.device("cuda", 1 - rank))),
    ]
    found = []
    for each in tried:
        try:
            each()
            found.append("")
        except (RuntimeError, ValueError) as error:
            found.append(str(error).partition("\n")[0])
    total = torch.ones(4, device=own)
    dist.all_reduce(total)
    return [*found, str(total.tolist())]


def test_collectives_are_as_strict_as_nccl() -> None:
    for host, rows, dtype, device, total in run_ranks(2, refused_collectives, on=PAPER_GPUS):
        assert "CUDA" in host or "backend" in host, host
        assert "contiguous" in rows and "not supported" in dtype
        assert "not on device" in device and total == "[2.0, 2.0, 2.0, 2.0]"


def different_collectives() -> None:
    values = torch.ones(4 + dist.get_rank(), device=torch.device("cuda", dist.get_rank()))
    dist.all_reduce(values)
    torch.cuda.synchronize(dist.get_rank())
    time.sleep(20)


def test_different_collectives_end_the_process() -> None:
    outcomes = run_ranks_expecting_errors(2, different_collectives, on=PAPER_GPUS, timeout=60)
    assert all("exit code 77" in (outcome.error_message or "") for outcome in outcomes)


# --------------------------------------------------------------------------------- one process with several devices


def spread(model: Any, devices: int) -> Any:
    """As ``device_map="auto"`` does."""
    model.to("cuda:0")
    if devices == 2:
        for module in (model.model.layers[1], model.model.norm, model.lm_head):
            module.to("cuda:1")
    return model


def wrong(model: nn.Module, expected: dict[str, torch.Tensor]) -> list[str]:
    return [name for name, param in model.named_parameters() if not torch.equal(param.cpu(), expected[name])]


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach().cpu().clone() for name, param in model.named_parameters()}


def wrong_after_load_into(folder: Path, devices: int, mistake: str = "") -> list[str]:
    model = plain_model(folder)
    expected = values_of(model)
    with torch.no_grad():
        for param in spread(model, devices).parameters():
            param.zero_()
    if mistake == "no lane":
        execute.lane_for = lambda destinations, nbytes: partial(lanes.Lane, [], nbytes)
        lanes.Lane._allocate = lambda self, nbytes: torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    elif mistake == "no event is waited for":
        lanes.SideLane._wait = lambda self, mark: None
    elif mistake == "the first device's event for all":
        lanes.SideLane._mark = lambda self: [next(iter(self._streams.values())).stream.record_event()]
    elif mistake == "memory that is still in use":
        lanes.SideLane.__enter__ = lambda self: self._on_device.__enter__() or self
        last = model.lm_head.weight.detach()
        other = torch.ones_like(last)
        for _ in range(10_000):  # a second or more
            last.copy_(other)
    with hf_zero_stream.streaming(MANY_READS):
        hf_zero_stream.load_into(model, folder)
    return wrong(model, expected)


@pytest.mark.parametrize("devices", [1, 2])
def test_load_into_several_devices(even_checkpoint: Path, devices: int) -> None:
    assert run_ranks(1, wrong_after_load_into, even_checkpoint, devices, on=PAPER_GPUS) == [[]]


@pytest.mark.parametrize(
    "mistake", ["no lane", "no event is waited for", "the first device's event for all", "memory that is still in use"]
)
def test_mistakes_in_lanes_show(even_checkpoint: Path, mistake: str) -> None:
    tries = (run_ranks(1, wrong_after_load_into, even_checkpoint, 2, mistake, on=PAPER_GPUS) for _ in range(3))
    assert any(found for (found,) in tries), "on a busy machine a copy may be done before its buffer comes round again"


def saved_in_the_background(folder: Path, target: Path, devices: int, waited_for: int = 2) -> dict[str, Any]:
    """Save a model of so many `devices`, of which the last is busy, and of which the first are `waited_for`.

    One that is not waited for is busy until all is saved, and so is the training: its first step would wait there.
    """
    from tests.paper_gpu.cuda import paper

    model = spread(plain_model(folder), devices)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    expected = values_of(model)
    fill, copy = snapshot.Snapshot._fill, torch.Tensor.copy_
    values = torch.ones(8, device=f"cuda:{devices - 1}")

    def fill_on_a_busy_device(*args: Any) -> None:
        if waited_for < devices:
            paper.hold(devices - 1)
        for _ in range(500):
            copy(values, values[:1].expand(8))
        fill(*args)

    def copy_and_wait(to: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        return copy(to, of, non_blocking=of.is_cuda and of.device.index >= waited_for)

    snapshot.Snapshot._fill, torch.Tensor.copy_ = fill_on_a_busy_device, copy_and_wait
    before = paper.pinned()["locked"]
    pending = hf_zero_stream.save_state(model, target, optimizer=optimizer, asynchronous=True, snapshot_bytes="all")
    if waited_for >= devices:
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()  # training goes on
    report = pending.wait()
    paper.release()
    (file,) = target.rglob("model.safetensors")
    saved = load_file(file)
    fresh = transformers.AutoModelForCausalLM.from_pretrained(file.parent, **COMMON)
    return {
        "wrong": wrong(fresh, expected),
        "tensors": len(saved),
        "pinned": paper.pinned()["locked"] - before,
        "written": report.bytes_written,
    }


@pytest.mark.parametrize("devices", [1, 2])
def test_a_save_in_the_background(even_checkpoint: Path, tmp_path: Path, devices: int) -> None:
    (found,) = run_ranks(1, saved_in_the_background, even_checkpoint, tmp_path, devices, on=PAPER_GPUS)
    assert found["wrong"] == [] and found["tensors"] > 20
    in_one_block = 1 << (found["written"] - 1).bit_length()
    assert found["written"] <= found["pinned"] <= found["written"] * (1 + 1 / 32) + 2**16 < in_one_block


def saved_beside_steps(folder: Path, target: Path, devices: int, room: int) -> dict[str, Any]:
    """Save from the memory of `devices`, with steps before anything is written."""
    from tests.support.held_writer import held_writer

    model = spread(plain_model(folder), devices)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    hf_zero_stream.save_state(model, target / "waited", optimizer=optimizer, tag="state")
    with held_writer() as writer:
        writer.hold_at(0)
        arguments = {"optimizer": optimizer, "tag": "state", "snapshot_bytes": room}
        pending = hf_zero_stream.save_state(model, target / "background", asynchronous=True, **arguments)
        assert writer.wait_until_held()
        for _ in range(2):
            optimizer.step()
        writer.let_go()
        mine = pending.wait().ranks[0]
    return {"copied": mine.bytes_copied, "written": mine.bytes_written, "held": mine.seconds["held"]}


@pytest.mark.parametrize(("devices", "room"), [(1, 0), (2, 0), (2, 2**24), (1, 1)])
def test_a_snapshot_beside_steps(even_checkpoint: Path, tmp_path: Path, devices: int, room: int) -> None:
    (found,) = run_ranks(1, saved_beside_steps, even_checkpoint, tmp_path, devices, room, on=PAPER_GPUS)
    assert found["held"] > 0 and found["copied"] <= (room or found["written"] // 8)
    assert (found["copied"] > 0) == (room != 1)
    names = {path.relative_to(tmp_path / "waited") for path in (tmp_path / "waited").rglob("*") if path.is_file()}
    assert len(names) > 5
    for name in names:
        assert (tmp_path / "waited" / name).read_bytes() == (tmp_path / "background" / name).read_bytes(), name


@pytest.mark.parametrize("waited_for", [0, 1])
def test_a_save_that_does_not_wait_shows(even_checkpoint: Path, tmp_path: Path, waited_for: int) -> None:
    (found,) = run_ranks(1, saved_in_the_background, even_checkpoint, tmp_path, 2, waited_for, on=PAPER_GPUS)
    assert found["wrong"]


def test_sizes_of_pinned_blocks() -> None:
    from hf_zero_stream.saving.room import pinned_sizes

    assert pinned_sizes(0) == [] and pinned_sizes(1) == [2**16] and pinned_sizes(66 << 30) == [64 << 30, 2 << 30]
    for nbytes in (2**16 + 1, 10**6, 3 * 10**9 + 7, 20 * 10**9):
        sizes = pinned_sizes(nbytes)
        assert nbytes <= sum(sizes) <= nbytes + max(2**16, nbytes // 64)
        assert all(size & (size - 1) == 0 for size in sizes), "torch rounds others up"
