"""Streams of paper GPUs: what waits for what.

- What a GPU must not wait for, and where copies and collectives go: streams, pinned memory, backends.
- Weight streams of models on paper GPUs, under NCCL: buckets in device memory, with what a save holds.
"""

import os
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hf_zero_stream
from hf_zero_stream.checkpoint.nodes import HostTensor, View
from hf_zero_stream.destinations.exchange import Sharing
from hf_zero_stream.holdings.holding import LocalShard
from hf_zero_stream.ranks import coordinator
from tests.paper_gpu.trials import plain_model, sharded_model, zero_config, zero_model
from tests.support.cluster import PAPER_GPUS, run_ranks
from tests.support.streams import stream_changes


pytestmark = pytest.mark.usefixtures("paper_gpus")


def waits_for_whole_devices(checkpoint: Path, target: Path) -> tuple[list[str], int]:
    """Who of ours waits until a device has done all, in a load, a save, a state; and how many streams there are."""
    from hf_zero_stream import accelerators

    model = plain_model(checkpoint).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    seen: list[str] = []
    for module in (torch.cuda, torch.accelerator):
        module.synchronize = lambda *_: seen.append("synchronize")  # type: ignore[attr-defined]
    with hf_zero_stream.streaming(hf_zero_stream.StreamingConfig(progress=False)):
        for _ in range(3):
            hf_zero_stream.load_into(model, str(checkpoint))
    hf_zero_stream.save_pretrained(model, target / "weights")
    for background in (False, True):
        pending = hf_zero_stream.save_state(
            model, target / f"{background}", optimizer=optimizer, batch_size=1, asynchronous=background
        )
        if background:
            pending.wait()
    return seen, len(accelerators.side_streams(torch.device("cuda", 0)))


def test_nothing_waits_for_a_whole_device(even_checkpoint: Path, tmp_path: Path) -> None:
    """A collective of somebody else, whose ranks do not come, would hold it for ever."""
    assert run_ranks(1, waits_for_whole_devices, even_checkpoint, tmp_path, on=PAPER_GPUS) == [([], 2)]


def reserved_by_loads(checkpoint: Path) -> list[int]:
    """What the allocator has taken after each of several loads that cast on the device."""
    model = plain_model(checkpoint).cuda().float()
    found = []
    with hf_zero_stream.streaming(hf_zero_stream.StreamingConfig(progress=False, reader_threads=8)):
        for _ in range(4):
            report = hf_zero_stream.load_into(model, str(checkpoint))
            assert report.ranks[0].device_reserved == torch.cuda.memory_reserved()
            found.append(torch.cuda.memory_reserved())
    return found


def test_streams_are_kept_from_load_to_load(even_checkpoint: Path) -> None:
    """The allocator keeps memory for each stream apart: new ones for each thread and load would take ever more."""
    (found,) = run_ranks(1, reserved_by_loads, even_checkpoint, on=PAPER_GPUS)
    assert found[1:] == found[:1] * 3


def stream_of_a_send() -> tuple[bool, bool]:
    """Whether a background send is on the stream of the training, and whether the next one waits for it."""
    from hf_zero_stream.accelerators import side_streams
    from hf_zero_stream.plugins.stream.servers import EngineServer

    device, streams = torch.device("cuda", 0), []

    def background(work: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(work())
        return future

    waited: list[Any] = []
    calls = SimpleNamespace(background=background, wait=lambda *futures: waited.append(futures))
    server = EngineServer(calls, 2**20, lambda info: None, device)  # type: ignore[arg-type]
    for _ in range(2):
        server._send_in_background(lambda: streams.append(torch.cuda.current_stream().stream_id))
    ours = side_streams(device)[0].stream.stream_id
    return streams == [ours, ours] and ours != torch.cuda.current_stream().stream_id, len(waited) == 1


@pytest.mark.plugin("stream")
def test_a_background_send_has_a_stream_of_its_own() -> None:
    assert run_ranks(1, stream_of_a_send, on=PAPER_GPUS) == [(True, True)]


def given_of_a_stream(checkpoint: Path) -> tuple[list[bool], float]:
    """Whether what a pass has given is kept in pinned memory; and how much of other sizes would be."""
    from hf_zero_stream.saving.room import pinned_parts

    stream = hf_zero_stream.weight_stream(plain_model(checkpoint).cuda(), "all", deltas=True)
    for _ in stream:
        pass
    sizes = [70_000 + 7_001 * number for number in range(40)]
    parts = pinned_parts(sizes)
    assert [part.nbytes for part in parts] == sizes
    pinned = sum(part.nbytes for part in parts if part.is_pinned())
    return [value.is_pinned() for value in stream._sent._values.values()], pinned / sum(sizes)


@pytest.mark.plugin("stream")
def test_what_has_changed_is_told_by_pinned_copies(even_checkpoint: Path) -> None:
    ((pinned, share),) = run_ranks(1, given_of_a_stream, even_checkpoint, on=PAPER_GPUS)
    assert len(pinned) > 10 and sum(pinned) >= 0.9 * len(pinned) and share >= 0.9


def reserved_by_blocks() -> list[float]:
    """Growths of what is reserved, in MiB: by tensors of 3, 3 and 11 MiB, and by all of them when they are gone."""
    torch.cuda.empty_cache()
    first, tensors, grown = torch.cuda.memory_reserved(), [], []
    for nbytes in (3 * 2**20, 3 * 2**20, 11 * 2**20 - 2**19):
        before = torch.cuda.memory_reserved()
        tensors.append(torch.empty(nbytes, dtype=torch.uint8, device="cuda"))
        grown.append((torch.cuda.memory_reserved() - before) / 2**20)
    tensors.clear()
    torch.cuda.empty_cache()
    return [*grown, (torch.cuda.memory_reserved() - first) / 2**20]


def test_the_allocator_reserves_segments() -> None:
    """As CUDA's: 20 MiB for tensors below 10 MiB, their size rounded to 2 MiB for larger ones."""
    assert run_ranks(1, reserved_by_blocks, on=PAPER_GPUS) == [[20, 0, 12, 0]]


def pinned_by_a_load(checkpoint: Path) -> tuple[int, bool]:
    """How often memory that exists is pinned, which takes a copy, in a load; and whether all partitions are pinned."""
    copies: list[Any] = []
    torch.Tensor.pin_memory = lambda self, *_: copies.append(self) or self  # type: ignore[assignment, method-assign]
    model = zero_model(checkpoint, zero_config(3, {"offload_param": {"device": "cpu", "pin_memory": True}}), {})
    on_host = [param.ds_tensor for param in model.parameters() if param.ds_tensor.device.type == "cpu"]
    return len(copies), bool(on_host) and all(each.is_pinned() for each in on_host)


def test_offloaded_partitions_are_pinned_once(even_checkpoint: Path) -> None:
    assert run_ranks(1, pinned_by_a_load, even_checkpoint, on=PAPER_GPUS) == [(0, True)]


def where_collectives_go(backend: str) -> tuple[str, str]:
    """The device of the collectives of a group of this backend, and where an exchange of whole models is made."""
    dist.get_backend_config = lambda group=None: str(dist.BackendConfig(backend))
    made: list[str] = []
    empty = torch.empty

    def noted(*sizes: Any, **options: Any) -> torch.Tensor:
        made.append(torch.device(options.get("device", "cpu")).type)
        return empty(*sizes, **options)

    who = SimpleNamespace(is_alone=False, world_size=2, rank=0)
    sharing, values = Sharing(who, room=64), empty(4)  # type: ignore[arg-type]
    assert sharing.takes("a", values, View.whole(HostTensor.of(values)), LocalShard.whole((4,)), values, None)
    (batch,) = sharing.batches()
    torch.empty = noted  # type: ignore[assignment]
    try:
        batch.items[0].memory()
    finally:
        torch.empty = empty
    return coordinator.collective_device().type, made[0]


@pytest.mark.parametrize(
    ("backend", "expected"),
    [("nccl", "cuda"), ("cuda:nccl,cpu:gloo", "cuda"), ("cpu:gloo,cuda:nccl", "cuda"), ("gloo", "cpu")],
)
def test_collectives_go_where_the_backend_serves_them(backend: str, expected: str) -> None:
    assert run_ranks(1, where_collectives_go, backend, on=PAPER_GPUS) == [(expected, expected)]


def device_of_one_shown(local_rank: str) -> str:
    """Where ZeRO consumes parameters, where the launcher shows this rank one GPU and says that it is not the first."""
    os.environ["LOCAL_RANK"] = local_rank
    from hf_zero_stream.holdings.deepspeed.partitions import local_device

    torch.accelerator.device_count = lambda: 1  # type: ignore[method-assign]
    return str(local_device())


def test_a_launcher_that_shows_each_rank_one_gpu() -> None:
    assert run_ranks(1, device_of_one_shown, "1", on=PAPER_GPUS) == ["cuda:0"]


def held_up_by_a_collective() -> bool:
    """Whether a wait for the whole device, on rank 0, lasts until rank 1 comes to the collective."""
    device = torch.device("cuda", dist.get_rank())
    tensor = torch.ones(4, device=device)
    dist.all_reduce(tensor)
    torch.cuda.synchronize(device)
    if dist.get_rank() == 1:
        time.sleep(1)
    start = time.monotonic()
    dist.all_reduce(tensor, async_op=True)
    torch.cuda.synchronize(device)
    return time.monotonic() - start > 0.5


def test_a_wait_for_the_whole_device_is_one_for_collectives() -> None:
    """So the imitation shows what :func:`test_nothing_waits_for_a_whole_device` is for."""
    assert run_ranks(2, held_up_by_a_collective, on=PAPER_GPUS) == [True, False]


def streamed(checkpoint: Path, folder: Path, home: str, to: str) -> tuple[list[Any], set[str]]:
    """What differs from saves, in three updates of what has changed, and where a whole pass has its buckets."""
    if home == "ZeRO-3":
        model = zero_model(checkpoint, zero_config(3, {}), {})
    else:
        model, _ = sharded_model(checkpoint, {"fsdp_size": 2}, {})
    devices = {bucket.packed.device.type for bucket in hf_zero_stream.weight_stream(model, to)}
    assert {param.device.type for param in model.parameters()} == {"cuda"}
    return stream_changes(model, folder, to, bucket_bytes=20_000), devices


@pytest.mark.plugin("stream")
@pytest.mark.parametrize(
    ("home", "to"),
    [
        ("ZeRO-3", "rank0"),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in (("ZeRO-3", "all"), ("ZeRO-3", "owners"))),
        pytest.param("FSDP2", "rank0", marks=pytest.mark.slow),
    ],
)
def test_streams(even_checkpoint: Path, tmp_path: Path, home: str, to: str) -> None:
    for steps, devices in run_ranks(2, streamed, even_checkpoint, tmp_path, home, to, on=PAPER_GPUS):
        assert [differences for differences, _ in steps] == [[]] * 3
        assert devices == {"cuda"} and torch.version.cuda is None
