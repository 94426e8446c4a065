"""A server gets what a save would hold, by the calls that it wants; anything wrong is one error on all ranks."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

import hf_zero_stream
from examples.vllm_on_cpu import join
from hf_zero_stream.checkpoint.nodes import HostTensor, View
from hf_zero_stream.errors import ConfigError, StreamError
from hf_zero_stream.plugins.stream.plan import StreamedTensor
from hf_zero_stream.plugins.stream.sender import differences
from tests.support.checkpoint_files import differing, tensors_of
from tests.support.cluster import run_ranks, run_ranks_expecting_errors
from tests.support.engine_servers import EngineServer, SGLangServer, VLLMServer
from tests.support.parity import ds_config, load_with
from tests.support.streams import counted_buckets
from tests.support.zoo import Checkpoint, build_model


Started = Callable[..., EngineServer]

SERVERS = {"vllm": VLLMServer, "sglang": SGLangServer}
MODEL = "qwen3_moe"


@pytest.fixture
def started() -> Iterator[Started]:
    """`started(engine, checkpoint, faults)` gives a server that is closed after the test."""
    servers: list[EngineServer] = []

    def start(engine: str, *args: Any) -> EngineServer:
        servers.append(SERVERS[engine](*args))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def sender_of(checkpoint: Path, engine: str, url: str, **options: Any) -> Any:
    model = load_with("streamed", "AutoModelForCausalLM", checkpoint, ds_config(), {})
    if engine == "vllm":
        options["join"] = join
    return hf_zero_stream.weight_sender(model, url, engine, bucket_bytes=5000, **options)


def send_twice(checkpoint: Path, engine: str, url: str) -> int:
    sender = sender_of(checkpoint, engine, url)
    with counted_buckets() as others:
        sender.send()
        with torch.no_grad():
            for param in sender.stream.model.parameters():
                param.ds_tensor.mul_(2)
        sender.send(version="doubled")
    assert len(others) > 8 and max(others) <= 1
    return int(sender.stream.version)


CONNECTS = {
    "vllm": ["v1/models", "server_info?config_format=json", "get_world_size", "init_weight_transfer_engine"],
    "sglang": ["model_info", "server_info", "init_weights_update_group"],
}
BEGINS = {
    "vllm": ["pause?mode=keep", "start_weight_update", "update_weights"],
    "sglang": ["pause_generation", "begin_weight_update", "update_weights_from_distributed"],
}
ENDS = {
    "vllm": ["finish_weight_update", "reset_prefix_cache", "resume"],
    "sglang": ["end_weight_update", "flush_cache", "continue_generation"],
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("engine", SERVERS)
def test_order_of_calls(cluster: None, zoo_checkpoint: Checkpoint, started: Started, engine: str) -> None:
    checkpoint = zoo_checkpoint(MODEL)
    server = started(engine, str(checkpoint))
    assert run_ranks(2, send_twice, checkpoint, engine, server.url) == [2, 2]
    once = [path for number, path in enumerate(server.paths) if path != server.paths[number - 1]]
    assert once == [*CONNECTS[engine], *(BEGINS[engine] + ENDS[engine]) * 2]
    first, second = server.updates
    expected = tensors_of(checkpoint)
    assert differing(first, expected) == []
    assert differing(second, {name: tensor * 2 for name, tensor in expected.items()}) == []
    bodies = [body for path, body in server.calls if path in ("finish_weight_update", BEGINS["sglang"][2])]
    assert [bodies[0]["weight_version"], bodies[-1]["weight_version"]] == ["1", "doubled"]
    several = server.paths.count(BEGINS[engine][2])
    assert several == 2 if engine == "vllm" else several > 4


def failing(checkpoint: Path, engine: str, url: str, options: dict[str, Any]) -> list[Any]:
    """The errors of two sends, and how long these took."""
    messages: list[Any] = []
    try:
        sender = sender_of(checkpoint, engine, url, **options)
    except StreamError as error:
        return [str(error)]
    began = time.perf_counter()
    for _ in range(2):
        try:
            sender.send()
            messages.append("none")
        except StreamError as error:
            messages.append(str(error))
    return [*messages, time.perf_counter() - began]


@pytest.mark.sample(2)
@pytest.mark.parametrize("engine", SERVERS)
@pytest.mark.parametrize("changes", ["names", "shapes"])
def test_another_checkpoint(
    cluster: None, zoo_checkpoint: Checkpoint, started: Started, tmp_path: Path, changes: str, engine: str
) -> None:
    """Nothing is begun, and all ranks have one error, with the first five differences."""
    tensors = tensors_of(zoo_checkpoint(MODEL))
    if changes == "names":
        found = {name.replace("experts.1.", "experts.9."): tensor for name, tensor in tensors.items()}
        told = "model.layers.0.mlp.experts.1.down_proj.weight: the checkpoint has no such tensor"
    else:
        found = {name: t[:-1].contiguous() if "q_proj" in name else t for name, t in tensors.items()}
        told = "model.layers.0.self_attn.q_proj.weight: shape "
    save_file(found, tmp_path / "model.safetensors")
    server = started(engine, str(tmp_path))
    mine, others = run_ranks(2, failing, zoo_checkpoint(MODEL), engine, server.url, {})
    assert mine[0] in others[0] and others[0].startswith("rank 0: ")
    assert told in mine[0] and "Nothing has been sent." in mine[0]
    assert len(mine[0].splitlines()) == (8 if changes == "names" else 4)
    assert server.paths == CONNECTS[engine][:1]


FAULTS: dict[str, Callable[[], tuple[int, Any]]] = {
    "error": lambda: (500, {"error": "out of memory"}),
    "slow": lambda: (time.sleep(300), None),  # type: ignore[dict-item, func-returns-value]
}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("engine", "route"), [(engine, route) for engine in SERVERS for route in (*BEGINS[engine], *ENDS[engine])]
)
def test_an_error_of_the_server(
    cluster: None, zoo_checkpoint: Checkpoint, started: Started, engine: str, route: str
) -> None:
    server = started(engine, str(zoo_checkpoint(MODEL)), {route: FAULTS["error"]})
    found = run_ranks(2, failing, zoo_checkpoint(MODEL), engine, server.url, {})
    for first, second, seconds in found:
        assert f"{route} answered 500: " in first and "out of memory" in first
        assert "so it is lost: end it" in first and second == first
        assert seconds < 30
    assert server.updates == [] or route in ENDS[engine][1:]


@pytest.mark.slow
@pytest.mark.parametrize("engine", SERVERS)
def test_a_server_that_is_silent(cluster: None, zoo_checkpoint: Checkpoint, started: Started, engine: str) -> None:
    """Its host may be gone: nothing says so."""
    silent = {SERVERS[engine].alive: FAULTS["slow"], BEGINS[engine][2]: FAULTS["slow"]}
    server = started(engine, str(zoo_checkpoint(MODEL)), silent)
    for first, second, seconds in run_ranks(2, failing, zoo_checkpoint(MODEL), engine, server.url, {}):
        assert f"/{server.alive}: no answer: " in first and "timed out" in first and second == first
        assert seconds < 30


def die(checkpoint: Path, engine: str, url: str, victim: int) -> None:
    from hf_zero_stream.plugins.stream import buckets

    sender = sender_of(checkpoint, engine, url)
    original, count = buckets.begin_exchange, [0]

    def begin(*args: Any) -> Any:
        count[0] += 1
        if count[0] == 4 and dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args)

    buckets.begin_exchange = begin
    sender.send()


@pytest.mark.plugin("watch")
@pytest.mark.parametrize("engine", SERVERS)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_dies(cluster: None, zoo_checkpoint: Checkpoint, started: Started, victim: int, engine: str) -> None:
    checkpoint = zoo_checkpoint(MODEL)
    server = started(engine, str(checkpoint))
    outcomes = run_ranks_expecting_errors(3, die, checkpoint, engine, server.url, victim, timeout=60)
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert outcome.error_type == "StreamError" and f"rank {victim}" in str(outcome.error_message)
            assert "so it is lost" in str(outcome.error_message) and outcome.seconds < 30
    assert ENDS[engine][0] not in server.paths


def test_differences() -> None:
    def tensor(name: str, dtype: torch.dtype = torch.bfloat16) -> StreamedTensor:
        return StreamedTensor(name, dtype, (2, 3), (0,))

    def view(dtype: torch.dtype, *shape: int) -> View:
        return View.whole(HostTensor.of(torch.zeros(shape, dtype=dtype)))

    there = {"same": view(torch.bfloat16, 2, 3), "wider": view(torch.float32, 2, 3), "fp8": view(torch.uint8, 2, 3)}
    assert differences([tensor("same"), tensor("wider"), tensor("fp8", torch.uint8)], there) == []
    assert differences([tensor("same"), tensor("wider"), tensor("fp8")], there) == [
        "fp8: torch.bfloat16, and torch.uint8 in the checkpoint"
    ]
    assert differences([tensor("same"), tensor("wider")], there, ["^fp"]) == []
    assert differences([tensor("same"), tensor("wider")], there) == ["fp8: only the checkpoint has it"]


def test_arguments() -> None:
    model = build_model("llama")
    with pytest.raises(ConfigError, match="engine: expected one of vllm, sglang; got 'tgi'"):
        hf_zero_stream.weight_sender(model, "http://localhost:1", "tgi")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="url: expected the address of a server"):
        hf_zero_stream.weight_sender(model, "localhost:8000")
    with pytest.raises(StreamError, match="no answer"):
        hf_zero_stream.weight_sender(model, "http://127.0.0.1:9")
