"""Faults in the middle of a load into shards: all ranks raise, nobody hangs, and the next load succeeds."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

import hf_zero_stream
from hf_zero_stream.holdings import fsdp
from tests.faults import test_dying_ranks, test_one_faulty_rank
from tests.faults.test_dying_ranks import kill_in_first_read, load_with_a_victim
from tests.faults.test_one_faulty_rank import (
    Fault,
    fail_then_load,
    interrupted,
    io_error,
    no_memory_while_reading,
    replaced,
    truncated,
)
from tests.support.cluster import run_ranks, run_ranks_expecting_errors
from tests.support.zoo import Checkpoint


def load(folder: Path, *args: Any, **settings: Any) -> Any:
    config = hf_zero_stream.StreamingConfig(reader_threads=2, staging_bytes=8 * 4096, **settings)
    with hf_zero_stream.streaming(config):
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, distributed_config={"fsdp_size": dist.get_world_size()}
        )


def no_memory(folder: Path) -> Any:
    """As torch's allocator on a CPU says it, for the storage that FSDP2 owns."""

    class Torch:
        def __getattr__(self, name: str) -> Any:
            return empty if name == "empty" else getattr(torch, name)

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory")

    return replaced(fsdp, "torch", Torch())


def fail_then_load_sharded(folder: Path, own: Path, fault: Fault) -> dict[str, Any]:
    test_one_faulty_rank.load = load  # type: ignore[assignment]
    return fail_then_load(folder, own, fault)


FAULTS: dict[Fault, tuple[str, str]] = {
    io_error: ("ReadError", "Input/output error"),
    truncated: ("CheckpointError", "was truncated while it was being loaded"),
    no_memory: ("LoadError", "out of memory on rank 1"),
    no_memory_while_reading: ("LoadError", "out of memory on rank 1"),
    interrupted: ("PeerError", "rank 1 failed"),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_one_faulty_rank_among_three(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, fault: Fault) -> None:
    kind, text = FAULTS[fault]
    results = run_ranks(3, fail_then_load_sharded, zoo_checkpoint("qwen3_moe"), tmp_path, fault, timeout=90)
    for rank, result in enumerate(results):
        if rank == 1 and fault is interrupted:
            assert result["error"][0] == "KeyboardInterrupt", result
        else:
            assert result["error"][0] == kind and text in result["error"][1], result
        assert result["loaded"] == 3 and result["threads"] == [] and not result["patched"]


def load_with_a_victim_sharded(folder: Path, victim: int, settings: dict[str, Any]) -> dict[str, Any]:
    test_dying_ranks.load = load  # type: ignore[assignment]
    return load_with_a_victim(folder, victim, kill_in_first_read, None, None, settings)


@pytest.mark.parametrize(("victim", "settings"), [(2, {}), (0, {"read_from": "rank0"})])
def test_killed(cluster: None, zoo_checkpoint: Checkpoint, victim: int, settings: dict[str, Any]) -> None:
    outcomes = run_ranks_expecting_errors(
        3, load_with_a_victim_sharded, zoo_checkpoint("qwen3_moe"), victim, settings, timeout=90
    )
    assert outcomes[victim].error_type == "Died", outcomes[victim]
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            kind, message = outcome.value["caught"]
            assert kind == "PeerError" and f"rank {victim} " in message, outcome.value
            assert not outcome.value["patched"] and outcome.value["shards open"] == []


def load_another(folder: Path, others: Path) -> str:
    try:
        load(folder if dist.get_rank() else others)
    except Exception as error:
        return type(error).__name__
    return "no error"


def test_another_checkpoint_on_one_rank(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    found = run_ranks(2, load_another, zoo_checkpoint("llama"), zoo_checkpoint("qwen3_moe"), timeout=90)
    assert found == ["CheckpointError"] * 2


def load_on_rank_0(folder: Path) -> str:
    test_dying_ranks.make_contact()
    if dist.get_rank():
        os._exit(0)  # a script that ends without the call
    try:
        load(folder)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_one_rank_alone(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    """In stock it waits for the other until the process group's time limit."""
    found, _ = run_ranks_expecting_errors(2, load_on_rank_0, zoo_checkpoint("llama"), timeout=90)
    assert found.value is not None and found.value.startswith("PeerError") and "rank 1 " in found.value, found
