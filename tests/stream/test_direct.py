"""Weights without a gather, plans for many ranks, and ranks that are out of step.

- Without a gather: each rank sends what it holds, and workers of an engine put together what a save holds.
- The plan of a weight stream for more ranks than there are here: who sends how much, and nothing twice.
- Ranks at different passes, or at a pass and a save, get one error that says where each is, and none waits on.
"""

import os
import re
import signal
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hf_zero_stream
from benchmarks.scale import MODELS
from benchmarks.stream_plan import model_of, world_on_paper
from hf_zero_stream.errors import ConfigError, HfZeroStreamError, StreamError
from hf_zero_stream.plugins.stream.direct import MESSAGE_BYTES, plan_messages, sliced
from hf_zero_stream.plugins.stream.reads import whole
from hf_zero_stream.ranks import watchdog
from tests.support.checkpoint_files import differing, tensors_of
from tests.support.cluster import run_ranks, run_ranks_expecting_errors
from tests.support.engine_servers import DirectServer
from tests.support.live_sharded import by_transformers
from tests.support.parity import ds_config, load_with
from tests.support.streams import change, counted_gathers, lora, odd_model, taken, under_zero_3
from tests.support.zoo import Checkpoint, build_model


HOMES = ("zero3", "fsdp2", "adapters")


@pytest.fixture
def started() -> Iterator[Callable[[Path], DirectServer]]:
    """Servers that are closed after the test."""
    servers: list[DirectServer] = []

    def start(checkpoint: Path) -> DirectServer:
        servers.append(DirectServer(str(checkpoint)))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def model_in(checkpoint: Path, home: str) -> Any:
    if home == "adapters":
        return under_zero_3(checkpoint, lora, torch.float32)
    if home == "fsdp2":
        return by_transformers(checkpoint)
    return load_with("streamed", "AutoModelForCausalLM", checkpoint, ds_config(), {})


def send(checkpoint: Path, home: str, url: str, folder: Path, deltas: bool) -> int:
    """Three times, with changes before each, and a pass and a save of the same values after it (all ranks)."""
    from hf_zero_stream.plugins.stream import direct

    direct.MESSAGE_BYTES = 3000
    model = model_in(checkpoint, home)
    sender = hf_zero_stream.weight_sender(model, url, direct=True, deltas=deltas, bucket_bytes=20_000)
    whole = hf_zero_stream.weight_stream(model)
    for number in range(3):
        change(model, number)
        with counted_gathers() as gathers:
            sender.send()
        assert not gathers
        tensors = {name: tensor for bucket in whole for name, tensor in bucket}
        if dist.get_rank() == 0:
            torch.save(tensors, folder / f"{number}.pt")
    if home != "adapters":
        hf_zero_stream.save_pretrained(model, folder / "saved")
    return int(sender.stream.version)


@pytest.mark.sample(2)
@pytest.mark.parametrize("deltas", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("home", HOMES)
def test_what_workers_get(
    cluster: None,
    zoo_checkpoint: Checkpoint,
    started: Callable[[Path], DirectServer],
    tmp_path: Path,
    home: str,
    world_size: int,
    deltas: bool,
) -> None:
    checkpoint = zoo_checkpoint("qwen3_moe" if home == "zero3" else "llama")
    server = started(checkpoint)
    assert run_ranks(world_size, send, checkpoint, home, server.url, tmp_path, deltas) == [3] * world_size
    assert len(server.updates) == 3
    for number, update in enumerate(server.updates):
        assert differing(update, torch.load(tmp_path / f"{number}.pt")) == []
    if home != "adapters":
        assert differing(server.updates[-1], tensors_of(tmp_path / "saved")) == []
    numel = sum(tensor.numel() for tensor in server.updates[0].values())
    nbytes = sum(tensor.nbytes for tensor in server.updates[0].values())
    assert server.shared[0] == nbytes <= server.received[0] < 1.05 * nbytes  # messages are aligned
    for received, shared in zip(server.received[1:], server.shared[1:], strict=True):
        assert deltas or home == "adapters" or (0 < shared < 0.7 * nbytes <= received < 1.5 * nbytes)
    assert len(server.patched) == (2 if deltas else 0)
    assert home == "adapters" or all(0 < count < numel / 3 for count in server.patched)
    calls = ["pause?mode=keep", "start_weight_update", "update_weights"]
    calls += ["finish_weight_update", "reset_prefix_cache", "resume"]
    assert server.paths[-18:] == calls * 3


def test_an_engine_that_moves_experts(
    cluster: None, zoo_checkpoint: Checkpoint, started: Callable[[Path], DirectServer], tmp_path: Path
) -> None:
    """Its workers get all of each update."""
    checkpoint = zoo_checkpoint("qwen3_moe")
    server = started(checkpoint)
    server.keeps_slices = False
    run_ranks(2, send, checkpoint, "zero3", server.url, tmp_path, False)
    nbytes = sum(tensor.nbytes for tensor in server.updates[0].values())
    assert server.shared == [nbytes] * 3
    assert differing(server.updates[-1], tensors_of(tmp_path / "saved")) == []


def send_until_refused(checkpoint: Path, url: str) -> list[str]:
    sender = hf_zero_stream.weight_sender(model_in(checkpoint, "zero3"), url, direct=True)
    sender.send()
    sender.send()
    if dist.get_rank() == 0:
        urllib.request.urlopen(f"{url}/moved").close()
    dist.barrier()
    messages = []
    for _ in range(2):
        with pytest.raises(StreamError) as caught:
            sender.send()
        messages.append(str(caught.value))
    return messages


def test_a_loader_that_reads_more_than_before(
    cluster: None, zoo_checkpoint: Checkpoint, started: Callable[[Path], DirectServer]
) -> None:
    """It would load what nobody has sent."""
    checkpoint = zoo_checkpoint("qwen3_moe")
    for messages in run_ranks(2, send_until_refused, checkpoint, started(checkpoint).url):
        assert all("so no more was sent" in each and "so it is lost" in each for each in messages)


def computed_everywhere(folder: Path, url: str) -> None:
    """Of tensors that are computed from whole parameters."""
    model = odd_model(folder / "odd")
    sender = hf_zero_stream.weight_sender(
        model, url, direct=True, deltas=True, checkpoint=folder / "odd", bucket_bytes=1000
    )
    sender.send()
    change(model, 1)
    sender.send()
    hf_zero_stream.save_pretrained(model, folder / "saved")


def test_conversions(cluster: None, started: Callable[[Path], DirectServer], tmp_path: Path) -> None:
    server = started(tmp_path / "odd")
    run_ranks(2, computed_everywhere, tmp_path, server.url)
    assert differing(server.updates[-1], tensors_of(tmp_path / "saved")) == []


def send_and_die(checkpoint: Path, url: str) -> None:
    sender = hf_zero_stream.weight_sender(model_in(checkpoint, "zero3"), url, direct=True, bucket_bytes=20_000)
    give, began = sender._server.give, time.perf_counter()

    def dying(item: Any, coordinator: Any) -> None:
        if sender._server._number == 2 and coordinator.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        give(item, coordinator)

    sender._server.give = dying
    try:
        sender.send()
    finally:
        assert time.perf_counter() - began < 30


@pytest.mark.plugin("watch")
def test_a_rank_dies(cluster: None, zoo_checkpoint: Checkpoint, started: Callable[[Path], DirectServer]) -> None:
    checkpoint = zoo_checkpoint("llama")
    first, _, last = run_ranks_expecting_errors(3, send_and_die, checkpoint, started(checkpoint).url)
    for outcome in (first, last):
        assert outcome.error_type == "StreamError", outcome.traceback
        assert "rank 1" in str(outcome.error_message) and "so it is lost" in str(outcome.error_message)


def test_a_server_without_the_plugin(zoo_checkpoint: Checkpoint, started: Callable[[Path], DirectServer]) -> None:
    model, server = build_model("llama"), started(zoo_checkpoint("llama"))
    server.backend = "nccl"
    with pytest.raises(StreamError, match="pip install --no-deps FOLDER"):
        hf_zero_stream.weight_sender(model, server.url, direct=True)
    for options in ({"deltas": True}, {"direct": True, "engine": "sglang"}, {"direct": True, "join": print}):
        with pytest.raises(ConfigError, match="direct"):
            hf_zero_stream.weight_sender(model, server.url, **options)
    assert "init_weight_transfer_engine" not in server.paths


WORLD = 64


def test_bytes_of_each_rank() -> None:
    """Of two layers of Qwen3-30B-A3B in their true size: each rank sends what it holds, once, in small messages."""
    config = MODELS["qwen3-30b-a3b"][0]()
    config.num_hidden_layers = 2
    model = model_of(config)
    nbytes = sum(param.nbytes for param in model.parameters())
    with world_on_paper(model, WORLD):
        stream = hf_zero_stream.weight_stream(model)
    assert sum(max(bucket.nbytes.values()) for bucket in stream.buckets) == nbytes > 3e9
    sent: Counter[int] = Counter()
    for bucket in stream.buckets:
        layout = plan_messages(bucket, 0).layout
        assert sum(piece.message_bytes for each in layout.messages for piece in each.pieces) == layout.nbytes
        for message in layout.messages:
            size = sum(piece.message_bytes for piece in message.pieces)
            assert size <= MESSAGE_BYTES or len(message.pieces) == 1
            sent[message.sender] += size
    assert sent.total() == nbytes and len(sent) == WORLD
    assert max(sent.values()) < 1.01 * nbytes / WORLD


def test_bytes_of_each_worker() -> None:
    """Of experts that are dealt out to workers, each gets its own; the rest goes to one, which shares it."""
    config = MODELS["qwen3-30b-a3b"][0]()
    config.num_hidden_layers = 1
    model = model_of(config)
    with world_on_paper(model, WORLD):
        stream = hf_zero_stream.weight_stream(model)
    sizes = {each.name: each.shape for each in stream.metadata}
    read = [
        {name: whole(shape) for name, shape in sizes.items() if owner_of(name) in (worker, None)}
        for worker in range(4)
    ]
    received: Counter[int] = Counter()
    shared = 0
    for bucket in stream.buckets:
        for layout in (each.layout for each in sliced(bucket, 0, read)):
            assert {slot.name for slot in layout.slots} <= read[layout.worker].keys()
            nbytes = sum(piece.message_bytes for each in layout.messages for piece in each.pieces)
            shared += nbytes if layout.is_shared else 0
            received[layout.worker] += 0 if layout.is_shared else nbytes
    experts = sum(2 * prod(shape) for name, shape in sizes.items() if owner_of(name) is not None)
    assert shared == sum(2 * prod(shape) for name, shape in sizes.items() if owner_of(name) is None)
    assert set(received.values()) == {experts // 4} and experts > 1e9


def owner_of(name: str) -> int | None:
    found = re.search(r"experts\.(\d+)", name)
    return None if found is None else int(found[1]) % 4


ACTOR, CRITIC = "weight stream 1 of LlamaForCausalLM to rank0", "weight stream 2 of LlamaForCausalLM to all"


def go_apart(checkpoint: Path, folder: Path, ways: list[str]) -> tuple[str, float, list[int]]:
    """The error of this rank at its own one of `ways`, after how long, and how complete passes of all ranks are then.

    Rank 0 is in the middle of a pass by then if its way says so, and so is any other rank, which leaves it open.
    """
    watchdog.STUCK_S = 1.0
    model = load_with("streamed", "AutoModelForCausalLM", checkpoint, ds_config(), {})
    actor = hf_zero_stream.weight_stream(model, bucket_bytes=2000, deltas=True)
    critic = hf_zero_stream.weight_stream(model, "all")
    taken(actor)
    held = iter(actor)
    if ways[0] == "goes on":
        next(held)
    does: dict[str, Callable[[], object]] = {
        "goes on": lambda: list(held),
        "actor": lambda: list(actor),
        "changes": lambda: list(actor.deltas()),
        "critic": lambda: list(critic),
        "save": lambda: hf_zero_stream.save_pretrained(model, folder / "saved"),
        "another": lambda: hf_zero_stream.weight_stream(model),
    }
    start, message = time.perf_counter(), ""
    try:
        does[ways[dist.get_rank()]]()
    except HfZeroStreamError as error:
        message = f"{type(error).__name__}: {error}"
    seconds = time.perf_counter() - start
    return message, seconds, [len(taken(stream)) - len(stream.metadata) for stream in (actor, critic)]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("ways", "places"),
    [
        (["actor", "critic"], [f"a pass of {ACTOR}", f"a pass of {CRITIC}"]),
        (["changes", "actor"], [f"the changes of {ACTOR}", f"a pass of {ACTOR}"]),
        (["another", "critic"], ["a new weight stream", f"a pass of {CRITIC}"]),
        (["goes on", "critic"], [f"has begun to stream weights (a pass of {ACTOR})", f"(a pass of {CRITIC})"]),
        (["goes on", "save"], [f"has begun to stream weights (a pass of {ACTOR})", "waits for all ranks to save"]),
        (
            ["save", "critic"],
            ["waits for all ranks to save", f"waits for all ranks to stream weights (a pass of {CRITIC})"],
        ),
        (
            ["goes on", "critic", "critic"],
            [f"has begun to stream weights (a pass of {ACTOR})", f"(a pass of {CRITIC})"],
        ),
    ],
    ids=lambda value: "-".join(value) if len(value[0]) < 10 else "",
)
def test_each_rank_at_its_own(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, ways: list[str], places: list[str]
) -> None:
    found = run_ranks(len(ways), go_apart, zoo_checkpoint("llama"), tmp_path, ways, timeout=60)
    for rank, (message, seconds, lacking) in enumerate(found):
        assert all(place in message for place in places), (rank, message)
        assert seconds < 15
        assert lacking[1] == 0 and (rank or lacking[0] == 0)
