"""Saves and training states on paper GPUs under NCCL, and going on at another number of ranks."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import hf_zero_stream
from tests.paper_gpu.trials import (
    in_one_process,
    outcome,
    sharded_resumed,
    sharded_states,
    zero_config,
    zero_model,
    zero_resumed,
    zero_states,
)
from tests.sampling import chosen
from tests.support.checkpoint_files import tensors_of
from tests.support.cluster import PAPER_GPUS, run_ranks
from tests.support.zoo import build_model


pytestmark = pytest.mark.usefixtures("paper_gpus")

PINNED = {"device": "cpu", "pin_memory": True}

ZERO: dict[str, tuple[int, dict[str, Any]]] = {
    "ZeRO-3": (3, {}),
    "ZeRO-3, pinned": (3, {"offload_param": PINNED, "offload_optimizer": PINNED}),
    "stage 2": (2, {}),
}
SHARDED: dict[str, dict[str, int]] = {"FSDP2": {"fsdp_size": 2}, "TP": {"tp_size": 2}}
RESUMED = {"FSDP2": {"fsdp_size": 2, "dp_replicate_size": 2}, "TP": {"fsdp_size": 2, "tp_size": 2}}
"""How the same states are sharded over four ranks: HSDP, and both at once."""


NAMES = [
    name if name in ("ZeRO-3, pinned", "FSDP2") else pytest.param(name, marks=pytest.mark.slow)
    for name in (*ZERO, *SHARDED)
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


def states_of(request: pytest.FixtureRequest, names: Iterable[str]) -> list[str]:
    """Those that a row saves, or one loads."""
    wanted = {*chosen(request, names), *chosen(request, names, "resumed")}
    return [name for name in names if name in wanted]


@pytest.fixture(scope="module")
def at_two(
    request: pytest.FixtureRequest, paper_gpus: None, even_checkpoint: Path, target: Path
) -> list[dict[str, Any]]:
    trials: dict[str, Any] = {
        name: partial(zero_states, even_checkpoint, *ZERO[name], target / name) for name in states_of(request, ZERO)
    }
    for name in states_of(request, SHARDED):
        trials[name] = partial(sharded_states, even_checkpoint, SHARDED[name], target / name)
    return run_ranks(2, in_one_process, trials, on=PAPER_GPUS, timeout=280)


@pytest.fixture(scope="module")
def at_four(
    request: pytest.FixtureRequest, even_checkpoint: Path, target: Path, at_two: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    trials: dict[str, Any] = {
        name: partial(zero_resumed, even_checkpoint, *ZERO[name], target / name)
        for name in chosen(request, ZERO, "resumed")
    }
    for name in chosen(request, RESUMED, "resumed"):
        trials[name] = partial(sharded_resumed, even_checkpoint, RESUMED[name], target / name)
    machine = replace(PAPER_GPUS, sets_device=True)
    return run_ranks(4, in_one_process, trials, on=machine, timeout=280)


@pytest.mark.parametrize("name", NAMES)
def test_saves(at_two: list[dict[str, Any]], even_checkpoint: Path, target: Path, name: str) -> None:
    """In the background while training goes on; what is loaded again goes on as if nothing had been."""
    for rank in outcome(at_two, name):
        assert rank["again"] == rank["going on"] and len(set(rank["again"])) == 2
    saved = tensors_of(target / name / "weights")
    expected = tensors_of(even_checkpoint)
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[key], values) for key, values in expected.items())


@pytest.mark.parametrize(
    "resumed", [name if name == "FSDP2" else pytest.param(name, marks=pytest.mark.slow) for name in (*ZERO, *SHARDED)]
)
def test_resumes_at_four_ranks(at_two: list[dict[str, Any]], at_four: list[dict[str, Any]], resumed: str) -> None:
    expected = outcome(at_two, resumed)[0]["going on"]
    for losses in outcome(at_four, resumed):
        assert losses[0] == pytest.approx(expected[0], rel=1e-6 if resumed in ZERO else 1e-2)  # the same weights
        assert losses == pytest.approx(expected, rel=1e-2)


def buffers_of_three_saves(checkpoint: Path, folder: Path) -> list[list[str]]:
    """What differs from the model's buffers, in the last of three saves and of three passes of a stream."""
    model = zero_model(checkpoint, zero_config(3, {}), {})
    stream = hf_zero_stream.weight_stream(model, "all")
    for number in range(3):
        for buffer in model.buffers():
            buffer += 1.0  # as trainings do, that balance experts by a bias
        hf_zero_stream.save_pretrained(model, folder / str(number))
        passed = {name: tensor.cpu() for bucket in stream for name, tensor in bucket}
    again = {name: tensor for path in (folder / "2").glob("*.safetensors") for name, tensor in load_file(path).items()}
    buffers = {name: buffer.cpu() for name, buffer in model.named_buffers() if name in again}
    assert buffers
    return [[name for name in buffers if not torch.equal(got[name], buffers[name])] for got in (again, passed)]


@pytest.mark.plugin("stream")
def test_buffers_that_change_between_saves(tmp_path: Path) -> None:
    """The plan of a save is used again; what it says of buffers must be what they hold by then."""
    build_model("deepseek_v3").save_pretrained(tmp_path / "model")
    found = run_ranks(2, buffers_of_three_saves, tmp_path / "model", tmp_path, on=PAPER_GPUS)
    assert found == [[[], []]] * 2
