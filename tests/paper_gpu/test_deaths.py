"""A rank that dies in a collective on a GPU: NCCL's do not notice, and the others must name it within seconds."""

import importlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import transformers
from transformers.distributed import DistributedConfig
from transformers.integrations import HfDeepSpeedConfig

import hf_zero_stream
from hf_zero_stream.accelerators import collective_device
from hf_zero_stream.destinations import exchange
from hf_zero_stream.ranks.coordinator import meeting
from hf_zero_stream.ranks.rendezvous import LOAD
from hf_zero_stream.sources import local
from tests.loading.test_odd_parameters import save, without
from tests.paper_gpu.trials import COMMON, join_a_new_group, sharded_model, zero_config, zero_model
from tests.sharded.test_load_into_sharded import with_both_ends
from tests.sharded.test_models import OF_FSDP, Doubling
from tests.support.cluster import PAPER_GPUS, SOON_S, run_ranks_expecting_errors
from tests.support.deaths import kill_this_process
from tests.support.saving import saves_with


pytestmark = [pytest.mark.usefixtures("paper_gpus"), pytest.mark.plugin("watch")]


def load_under_zero(folder: Path, target: Path, arm: Callable[[], None]) -> None:
    arm()
    zero_model(folder, zero_config(3, {}), {})


def load_together(folder: Path, target: Path, arm: Callable[[], None]) -> None:
    arm()
    zero_model(folder, zero_config(2, {}), {"share_reads": True})


def load_in_a_new_group(folder: Path, target: Path, arm: Callable[[], None]) -> None:
    """Not bound to a device: its communicator is made by its first collective, in which NCCL blocks the thread."""
    join_a_new_group()
    arm()
    sharded_model(folder, {"fsdp_size": 2}, {})


def load_by_columns(folder: Path, target: Path, arm: Callable[[], None]) -> None:
    exchange.WORTH_BYTES = 0  # the weights are tiny
    local.READS_PER_EXCHANGE = 1
    arm()
    sharded_model(folder, {"tp_size": 2}, {})


def exchange_twice(folder: Path, target: Path, arm: Callable[[], None]) -> None:
    """First nothing, so that the two ranks connect in the second exchange, whose kind was there before."""
    arm()
    device = collective_device()
    with meeting(LOAD) as coordinator:
        for length in (0, 4):
            sizes = [length] * 2
            received, sent = (torch.zeros(2 * length, device=device) for _ in range(2))
            coordinator.run(dist.all_to_all_single, received, sent, sizes, sizes)
        coordinator.agree()


def save_under_zero(folder: Path, target: Path, arm: Callable[[], None]) -> None:
    model = zero_model(folder, zero_config(3, {}), {})
    arm()
    hf_zero_stream.save_pretrained(model, target)


def save_by_rank_0(folder: Path, target: Path, arm: Callable[[], None]) -> None:
    model = zero_model(folder, zero_config(3, {}), {})
    arm()
    with saves_with(write_from="rank0"):
        hf_zero_stream.save_pretrained(model, target)


def load_by_rank_0(folder: Path, target: Path, arm: Callable[[], None]) -> None:
    arm()
    zero_model(folder, zero_config(3, {}), {"read_from": "rank0"})


def load_shards(folder: Path, target: Path, arm: Callable[[], None]) -> None:
    arm()
    sharded_model(folder, {"fsdp_size": 2}, {})


def load_quantised(folder: Path, target: Path, arm: Callable[[], None]) -> None:
    """Each weight is joined on one rank, from what all have quantised of it."""
    from bitsandbytes import functional

    # The package has no kernels for paper.
    functional.int8_vectorwise_quant = lambda rows: (rows.to(torch.int8), rows.abs().amax(1).float(), None)
    config = transformers.BitsAndBytesConfig(load_in_8bit=True)
    keep = HfDeepSpeedConfig(zero_config(3, {}))
    arm()
    with hf_zero_stream.streaming():
        transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, **COMMON)
    del keep


def load_missing_under_zero(folder: Path, target: Path, arm: Callable[[], None]) -> None:
    keep = HfDeepSpeedConfig({**zero_config(3, {}), "bf16": {"enabled": False}})
    arm()
    with hf_zero_stream.streaming():
        Doubling.from_pretrained(folder)
    del keep


def load_into_gathered(folder: Path, target: Path, arm: Callable[[], None]) -> None:
    model = zero_model(folder, zero_config(3, {}), {})
    with deepspeed.zero.GatheredParameters(list(model.parameters())[:2]):
        arm()
        hf_zero_stream.load_into(model, str(folder))


def load_both_ends_of_a_tie(folder: Path, target: Path, arm: Callable[[], None]) -> None:
    keep = HfDeepSpeedConfig({**zero_config(3, {}), "bf16": {"enabled": False}})
    arm()
    with hf_zero_stream.streaming():
        transformers.AutoModelForCausalLM.from_pretrained(folder)
    del keep


def load_missing_shards(folder: Path, target: Path, arm: Callable[[], None]) -> None:
    """Loaded values are gathered for a user's initialisation that computes with them."""
    arm()
    with hf_zero_stream.streaming():
        Doubling.from_pretrained(folder, distributed_config=DistributedConfig(**OF_FSDP))


def outlive(folder: Path, target: Path, act: Any, places: list[tuple[str, str]], number: int, victim: int) -> Any:
    """What a survivor's call raised; the `victim` is killed when it makes that collective for the `number`-th time."""
    calls = []
    os.environ["PAPER_GPU_SHUTDOWN_S"] = "0"  # what waits for the dead rank comes to no end

    def arm() -> None:
        for module, name in places:
            module, _, name_of_class = module.partition(":")
            owner = importlib.import_module(module)
            owner = getattr(owner, name_of_class) if name_of_class else owner
            collective = getattr(owner, name)

            def counted(*args: Any, collective: Any = collective, **kwargs: Any) -> Any:
                calls.append(name)
                if dist.get_rank() == victim and len(calls) == number:
                    time.sleep(0.5)  # the others wait in it already
                    kill_this_process()
                return collective(*args, **kwargs)

            setattr(owner, name, counted)

    began = time.monotonic()
    try:
        act(folder, target, arm)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "nothing", f"{len(calls)} calls", 0.0


AGREEMENT = [("hf_zero_stream.ranks.coordinator", "all_gather")]
EXCHANGE = [("hf_zero_stream.destinations.exchange", "all_gather")]
COLUMNS = [("torch.distributed", "all_to_all_single")]
BROADCAST = [("torch.distributed", "broadcast")]
SUM = [("torch.distributed", "all_reduce")]
QUANTISED = [("hf_zero_stream.plugins.packed.batches", "all_gather")]
REQUEST = [("hf_zero_stream.plugins.relay.relay:RelayedFiles", "_ask")]
ANSWER = [("hf_zero_stream.plugins.relay.relay:RelayServer", "_answer")]
OF_DEEPSPEED = [("deepspeed.comm", "all_gather_into_tensor")]


CASES: dict[str, tuple[Any, list[tuple[str, str]], int]] = {
    "agreement": (load_under_zero, AGREEMENT, 3),
    "first agreement": (load_in_a_new_group, AGREEMENT, 1),
    "exchange of replicas": (load_together, EXCHANGE, 1),
    "columns": (load_by_columns, COLUMNS, 1),
    "a connection in a later exchange": (exchange_twice, COLUMNS, 2),
    "save": (save_under_zero, AGREEMENT, 2),
    "save by rank 0": (save_by_rank_0, COLUMNS, 1),
    "broadcast": (load_shards, BROADCAST, 1),
    "gather of quantised parts": (load_quantised, QUANTISED, 1),
    "sum of shards": (load_missing_shards, SUM, 1),
    "comparison of tied parameters": (load_both_ends_of_a_tie, SUM, 1),
    "gathered by DeepSpeed": (load_missing_under_zero, OF_DEEPSPEED, 1),
    "gathered again": (load_into_gathered, OF_DEEPSPEED, 1),
}
NAMES = [
    pytest.param(name, marks=pytest.mark.plugin("packed")) if act is load_quantised else name
    for name, (act, *_) in CASES.items()
]


@pytest.mark.sample(6)  # six cases, with one victim or the other
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_killed_in_a_collective(even_checkpoint: Path, tmp_path: Path, name: str, victim: int) -> None:
    act, places, number = CASES[name]
    folder = even_checkpoint
    if act in (load_missing_shards, load_missing_under_zero):
        folder = without(save(Doubling, tmp_path / "odd"), "first.bias", "second.bias")
    if act is load_both_ends_of_a_tie:
        folder = with_both_ends(tmp_path / "tied", 0.0)
    check_survivor(folder, tmp_path, act, places, number, victim)


@pytest.mark.plugin("relay")
@pytest.mark.parametrize(("places", "victim"), [(REQUEST, 1), (ANSWER, 0)], ids=["client", "reader"])
def test_killed_while_reads_are_relayed(even_checkpoint: Path, tmp_path: Path, places: Any, victim: int) -> None:
    check_survivor(even_checkpoint, tmp_path, load_by_rank_0, places, 1, victim)


def check_survivor(folder: Path, target: Path, act: Any, places: Any, number: int, victim: int) -> None:
    args = (folder, target / "saved", act, places, number, victim)
    outcomes = run_ranks_expecting_errors(2, outlive, *args, on=PAPER_GPUS, timeout=60)
    assert outcomes[victim].error_type == "Died", outcomes[victim]
    survivor = outcomes[1 - victim]
    assert survivor.error_type is None, survivor.traceback
    kind, message, seconds = survivor.value
    assert kind == "PeerError" and f"rank {victim} " in message, survivor.value
    assert seconds < SOON_S
