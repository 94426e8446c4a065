"""Training on paper GPUs under NCCL: bits of a plain load, and stock's losses."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from hf_zero_stream.destinations import parallel
from tests.paper_gpu.trials import by_accelerate, by_transformers, in_one_process, outcome, zero
from tests.sampling import chosen
from tests.support.cluster import PAPER_GPUS, run_ranks


pytestmark = pytest.mark.usefixtures("paper_gpus")

BOTH_GROUPS = replace(PAPER_GPUS, backend="cuda:nccl,cpu:gloo", sets_device=True)
NO_ROOM = ", no room on the device"
PINNED = {"device": "cpu", "pin_memory": True}

ZERO: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "ZeRO-3": (3, {}, {}),
    "ZeRO-3, verify": (3, {}, {"verify": "full"}),
    "ZeRO-3, rank 0 reads": (3, {}, {"read_from": "rank0"}),
    "ZeRO-3, pinned parameters": (3, {"offload_param": PINNED}, {}),
    "ZeRO-3, pinned optimizer": (3, {"offload_optimizer": PINNED}, {}),
    "ZeRO-3, hpZ": (3, {"zero_hpz_partition_size": 2}, {}),
    "stage 1": (1, {}, {}),
    f"stage 1{NO_ROOM}": (1, {}, {}),
    "stage 2": (2, {}, {}),
    f"stage 2{NO_ROOM}": (2, {}, {}),
}
SHARDED: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "FSDP2": ({"fsdp_size": 2}, {}),
    "FSDP2, verify": ({"fsdp_size": 2}, {"verify": "full"}),
    "FSDP2, rank 0 reads": ({"fsdp_size": 2}, {"read_from": "rank0"}),
    "TP": ({"tp_size": 2}, {}),
    "EP": ({"fsdp_size": 2, "ep_size": 2}, {}),
    "TP and EP": ({"tp_size": 2, "ep_size": 2}, {}),
}
NO_STOCK = "TP and EP"
"""Stock's values are others there."""

ACCELERATE = {"accelerate": False, "accelerate, on the host": True}

IN_MAKE_TEST = {"ZeRO-3", f"stage 2{NO_ROOM}"}
IN_MAKE_TEST |= {"FSDP2, verify", "TP and EP", "accelerate, on the host"}


def rows(names: Iterable[str]) -> list[Any]:
    """For ``parametrize``. A trial costs seconds of all ranks, and the others differ less from these."""
    needs = {"verify": pytest.mark.plugin("verify"), "rank 0 reads": pytest.mark.plugin("relay")}
    marks = {name: [mark for what, mark in needs.items() if name.endswith(f", {what}")] for name in names}
    return [pytest.param(name, marks=[pytest.mark.slow] * (name not in IN_MAKE_TEST) + marks[name]) for name in marks]


def stock_of_zero(name: str) -> tuple[int, dict[str, Any]]:
    """The stage and what `zero_optimization` has beside it, where stock trains as `name` must."""
    stage, variation, _ = ZERO[name]
    return 3 if stage == 3 else 2, {key: value for key, value in variation.items() if "offload" in key}


def stock_of_sharded(name: str) -> str:
    return f"stock {name.partition(', verify')[0].partition(', rank')[0]}"


def without_room(*arguments: Any) -> dict[str, Any]:
    """As :func:`zero`, with a model that stays in host memory until its engine takes it."""
    with patch.object(parallel, "free_bytes", lambda device: 0):
        return zero(*arguments)


@pytest.fixture(scope="module")
def of_zero(request: pytest.FixtureRequest, paper_gpus: None, even_checkpoint: Path) -> list[dict[str, Any]]:
    """Nobody sets the current device: with DeepSpeed alone, nobody does before a model is loaded."""
    trials: dict[str, Any] = {}
    for name in chosen(request, ZERO):
        trials[name] = partial(without_room if NO_ROOM in name else zero, even_checkpoint, *ZERO[name])
        stock = stock_of_zero(name)
        trials[f"stock {stock}"] = partial(zero, even_checkpoint, *stock, None)
    return run_ranks(2, in_one_process, trials, on=PAPER_GPUS, timeout=280)


@pytest.mark.parametrize("name", rows(ZERO))
def test_zero(of_zero: list[dict[str, Any]], name: str) -> None:
    found = outcome(of_zero, name)
    assert [rank["differences"] + rank["loaded into"] for rank in found] == [[], []]
    stock = outcome(of_zero, f"stock {stock_of_zero(name)}")
    assert [rank["losses"] for rank in found] == [rank["losses"] for rank in stock]
    assert len(set(found[0]["losses"])) == 3, "steps must change the loss"


@pytest.mark.slow
def test_zero_with_a_group_for_each_kind_of_device(of_zero: list[dict[str, Any]], even_checkpoint: Path) -> None:
    """As under NCCL alone, also if somebody has set the current device."""
    names = ("ZeRO-3", "ZeRO-3, pinned parameters")
    trials: dict[str, Any] = {name: partial(zero, even_checkpoint, *ZERO[name]) for name in names}
    found = run_ranks(2, in_one_process, trials, on=BOTH_GROUPS, timeout=200)
    for name in trials:
        assert outcome(found, name) == outcome(of_zero, name)


@pytest.fixture(scope="module")
def of_sharded(request: pytest.FixtureRequest, paper_gpus: None, even_checkpoint: Path) -> list[dict[str, Any]]:
    sharded, accelerate = partial(by_transformers, even_checkpoint), partial(by_accelerate, even_checkpoint)
    trials: dict[str, Any] = {}
    for name in chosen(request, SHARDED):
        trials[name] = partial(sharded, *SHARDED[name])
        if name != NO_STOCK:
            trials[stock_of_sharded(name)] = partial(sharded, SHARDED[name][0], None)
    for name in chosen(request, ACCELERATE):
        trials[name] = partial(accelerate, ACCELERATE[name], {})
        trials[stock_of_sharded(name)] = partial(accelerate, ACCELERATE[name], None)
    return run_ranks(2, in_one_process, trials, on=BOTH_GROUPS, timeout=280)


@pytest.mark.slow
@pytest.mark.parametrize("name", rows([*SHARDED, *ACCELERATE]))
def test_sharded(of_sharded: list[dict[str, Any]], name: str) -> None:
    check_sharded(of_sharded, name, stock=name != NO_STOCK)


@pytest.mark.slow  # a state is loaded as HSDP in test_states.py
def test_four_ranks(even_checkpoint: Path) -> None:
    hsdp = partial(by_transformers, even_checkpoint, {"fsdp_size": 2, "dp_replicate_size": 2})
    trials: dict[str, Any] = {"HSDP": partial(hsdp, {}), "stock HSDP": partial(hsdp, None)}
    check_sharded(run_ranks(4, in_one_process, trials, on=PAPER_GPUS, timeout=200), "HSDP")


def check_sharded(results: list[dict[str, Any]], name: str, stock: bool = True) -> None:
    found = outcome(results, name)
    assert [rank["differences"] + rank["loaded into"] for rank in found] == [[]] * len(found)
    assert len(set(found[0]["losses"])) == 3, "steps must change the loss"
    if stock:
        expected = outcome(results, stock_of_sharded(name))
        assert [rank["losses"] for rank in found] == [rank["losses"] for rank in expected]
