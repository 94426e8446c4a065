"""Models of DTensors are saved as the whole model is, byte for byte, whatever training has left them in."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.testing._internal.two_tensor import TwoTensor

import hf_zero_stream
from tests.support import live_sharded as live
from tests.support.allocations import AllocationWatch
from tests.support.cluster import run_ranks, run_ranks_expecting_errors
from tests.support.live_sharded import save_live
from tests.support.saving import SHARD_SIZE, contents, different
from tests.support.zoo import Checkpoint


ON_TWO = [
    live.fully_sharded,
    live.after_an_eval,
    live.after_a_step_and_an_eval,
    live.one_group,
    live.offloaded,
    live.mixed_precision,
    live.other_dimension,
    live.checkpointed,
    live.compiled,
    live.partly_sharded,
    live.tp,
    live.by_transformers,
]
ON_FOUR = [live.hsdp, live.fsdp_of_tp, live.by_transformers_in_two_ways]


def assert_whole(folder: Path, ways: list[live.Way]) -> None:
    found = {way.__name__: different(folder / way.__name__ / "ours", folder / way.__name__ / "whole") for way in ways}
    assert found == {way.__name__: [] for way in ways}


@pytest.mark.sample(1)
@pytest.mark.parametrize(("world_size", "ways"), [(2, ON_TWO), (4, ON_FOUR)], ids=["2", "4"])
def test_live_models(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, world_size: int, ways: list[live.Way]
) -> None:
    run_ranks(world_size, save_live, zoo_checkpoint("llama"), tmp_path, ways, {})
    assert_whole(tmp_path, ways)


@pytest.mark.slow
def test_ranks_with_empty_shards(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    run_ranks(4, save_live, zoo_checkpoint("qwen3_moe"), tmp_path, [live.on_four_ranks], {})
    assert_whole(tmp_path, [live.on_four_ranks])


@pytest.mark.slow
def test_tied_heads(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    ways = [live.after_an_eval, live.after_a_step, live.by_transformers]
    run_ranks(2, save_live, zoo_checkpoint("qwen3"), tmp_path, ways, {})
    assert_whole(tmp_path, ways)


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        ({"dtype": torch.bfloat16}, {"verify": "full"}),
        ({}, {"write_from": "rank0", "verify": "full"}),
        ({"variant": "trained"}, {"chunk_bytes": 1000}),
    ],
    ids=["dtype", "rank0", "variant"],
)
def test_settings(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, arguments: dict[str, Any], settings: dict[str, Any]
) -> None:
    how = [live.after_a_step], arguments, settings
    for reports in run_ranks(2, save_live, zoo_checkpoint("deepseek_v3"), tmp_path, *how):
        assert not reports["after_a_step"].materialised
    assert_whole(tmp_path, [live.after_a_step])


def watched_save(checkpoint: Path, folder: Path) -> tuple[int, int, int, list[int]]:
    """Bytes of the largest allocation of our save, of one by torch's gathering, and of the largest parameter; rounds.

    Bytes that pass from one rank to another do so in rounds.
    """
    model = live.fully_sharded(checkpoint)
    with AllocationWatch() as ours:
        report = hf_zero_stream.save_pretrained(model, folder, max_shard_size=SHARD_SIZE)
    with AllocationWatch() as gathering:
        model.lm_head.weight.full_tensor()
    largest = max(param.nbytes for param in model.parameters())
    return ours.largest, gathering.largest, largest, [of_rank.rounds for of_rank in report.ranks]


def test_no_parameter_is_gathered(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Each rank writes its own rows from where they lie."""
    for ours, gathering, parameter, rounds in run_ranks(2, watched_save, zoo_checkpoint("llama"), tmp_path):
        assert ours < parameter <= gathering
        assert rounds == [0, 0]


def save_in_and_outside(checkpoint: Path, folder: Path) -> None:
    model = live.by_transformers(checkpoint)
    model.save_pretrained(folder / "outside", max_shard_size=SHARD_SIZE)
    model.save_pretrained(folder / "dcp outside", distributed_checkpoint=True)
    with hf_zero_stream.streaming():
        model.save_pretrained(folder / "inside", max_shard_size=SHARD_SIZE)
        model.save_pretrained(folder / "dcp inside", distributed_checkpoint=True)
    plain = live.fully_sharded(checkpoint)
    with hf_zero_stream.streaming():
        plain.save_pretrained(folder / "by the user", max_shard_size=SHARD_SIZE)
    whole = live.gathered(plain, checkpoint)
    if dist.get_rank() == 0:
        whole.save_pretrained(folder / "whole", max_shard_size=SHARD_SIZE)


def test_transformers_own_saves(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    run_ranks(2, save_in_and_outside, zoo_checkpoint("llama"), tmp_path)
    # Stock counts the elements of the local shards as those of the model.
    assert different(tmp_path / "inside", tmp_path / "outside") == ["model.safetensors.index.json"]
    assert different(tmp_path / "by the user", tmp_path / "whole") == []
    outside, inside = contents(tmp_path / "dcp outside"), contents(tmp_path / "dcp inside")
    assert inside.keys() == outside.keys() and any(name.endswith(".safetensors") for name in inside)


def with_a_partial_sum(checkpoint: Path) -> Any:
    model = live.plain_model(checkpoint)
    mesh = init_device_mesh("cpu", (2,))
    model.lm_head.weight = nn.Parameter(DTensor.from_local(model.lm_head.weight.detach(), mesh, [Partial()]))
    return model


def with_a_sharded_buffer(checkpoint: Path) -> Any:
    model = live.plain_model(checkpoint)
    mesh = init_device_mesh("cpu", (2,))
    model.register_buffer("scale", DTensor.from_local(torch.ones(3), mesh, [Shard(0)]))
    return model


def by_fsdp1(checkpoint: Path) -> Any:
    return FullyShardedDataParallel(live.plain_model(checkpoint), device_id=torch.device("cpu"))


def with_wrappers_inside(checkpoint: Path) -> Any:
    """As torchao puts its tensors into DTensors."""
    model = live.plain_model(checkpoint)
    mesh = init_device_mesh("cpu", (2,))
    wrapper = TwoTensor(model.lm_head.weight.detach(), model.lm_head.weight.detach())
    model.lm_head.weight = nn.Parameter(DTensor.from_local(wrapper, mesh, [Shard(0)], run_check=False))
    return model


def on_one_rank(checkpoint: Path) -> Any:
    """Both ranks make the mesh, and one is in it."""
    model = live.plain_model(checkpoint)
    mesh = DeviceMesh("cpu", [0], _init_backend=True)
    model.lm_head.weight = nn.Parameter(
        DTensor.from_local(model.lm_head.weight.detach(), mesh, [Shard(0)], run_check=False)
    )
    return model


def save_refused(checkpoint: Path, folder: Path, way: live.Way) -> None:
    hf_zero_stream.save_pretrained(way(checkpoint), folder)


@pytest.mark.parametrize(
    ("way", "expected"),
    [
        (with_a_partial_sum, "partial sum"),
        (with_a_sharded_buffer, "each rank has this buffer in full"),
        (by_fsdp1, "FSDP1"),
        (with_wrappers_inside, "TwoTensor"),
        (on_one_rank, "hold the same model"),
    ],
)
def test_refused(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, way: live.Way, expected: str) -> None:
    outcomes = run_ranks_expecting_errors(2, save_refused, zoo_checkpoint("llama"), tmp_path, way)
    assert expected in "".join(outcome.error_message or "" for outcome in outcomes)
    for outcome in outcomes:
        assert outcome.error_type in ("UnsupportedError", "PeerError"), outcome
        assert outcome.seconds < 60
    assert contents(tmp_path) == {}
