"""A rank that dies in a collective on a GPU: NCCL's do not notice, and the others must name it within seconds."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.cluster import PAPER_GPUS, SOON_S, run_ranks_expecting_errors
from tests.paper_gpu.trials import sharded_model, zero_config, zero_model
from tests.test_dying_ranks import kill_this_process


pytestmark = pytest.mark.usefixtures("paper_gpus")


def load_under_zero(folder: Path, target: Path, arm: Callable[[], None]) -> None:
    arm()
    zero_model(folder, zero_config(3, {}), {})


def load_together(folder: Path, target: Path, arm: Callable[[], None]) -> None:
    arm()
    zero_model(folder, zero_config(2, {}), {"replicas_on": "device"})


def load_in_a_new_group(folder: Path, target: Path, arm: Callable[[], None]) -> None:
    """Not bound to a device: its communicator is made by its first collective, in which NCCL blocks the thread."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.PrefixStore("again", dist.TCPStore(address, port, is_master=False, wait_for_workers=False))
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world_size)
    arm()
    sharded_model(folder, {"fsdp_size": 2}, {})


def load_by_columns(folder: Path, target: Path, arm: Callable[[], None]) -> None:
    from hf_zero_stream.destinations import columns

    columns.WORTH_BYTES = 0  # the weights are tiny
    arm()
    sharded_model(folder, {"tp_size": 2}, {})


def save_under_zero(folder: Path, target: Path, arm: Callable[[], None]) -> None:
    import hf_zero_stream

    model = zero_model(folder, zero_config(3, {}), {})
    arm()
    hf_zero_stream.save_pretrained(model, target, progress=False)


def save_by_rank_0(folder: Path, target: Path, arm: Callable[[], None]) -> None:
    import hf_zero_stream

    model = zero_model(folder, zero_config(3, {}), {})
    arm()
    hf_zero_stream.save_pretrained(model, target, write_from="rank0", progress=False)


def outlive(folder: Path, target: Path, act: Any, places: list[tuple[str, str]], number: int, victim: int) -> Any:
    """What a survivor's call raised; the `victim` is killed when it makes that collective for the `number`-th time."""
    import importlib

    calls = []
    os.environ["PAPER_GPU_SHUTDOWN_S"] = "0"  # what waits for the dead rank comes to no end

    def arm() -> None:
        for module, name in places:
            owner = importlib.import_module(module)
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
EXCHANGE = [("hf_zero_stream.destinations.replicated", "all_gather")]
COLUMNS = [("torch.distributed", "all_to_all_single")]


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    ("act", "places", "number"),
    [
        (load_under_zero, AGREEMENT, 3),
        (load_in_a_new_group, AGREEMENT, 1),
        (load_together, EXCHANGE, 1),
        (load_by_columns, COLUMNS, 1),
        (save_under_zero, AGREEMENT, 2),
        (save_by_rank_0, COLUMNS, 1),
    ],
    ids=["agreement", "first agreement", "exchange of replicas", "columns", "save", "save by rank 0"],
)
def test_killed_in_a_collective(
    even_checkpoint: Path,
    tmp_path: Path,
    act: Any,
    places: list[tuple[str, str]],
    number: int,
    victim: int,
) -> None:
    args = (even_checkpoint, tmp_path / "saved", act, places, number, victim)
    outcomes = run_ranks_expecting_errors(2, outlive, *args, on=PAPER_GPUS, timeout=60)
    assert outcomes[victim].error_type == "Died", outcomes[victim]
    survivor = outcomes[1 - victim]
    assert survivor.error_type is None, survivor.traceback
    kind, message, seconds = survivor.value
    assert kind == "PeerError" and f"rank {victim} " in message, survivor.value
    assert seconds < SOON_S
