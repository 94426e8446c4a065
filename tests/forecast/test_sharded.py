"""Plans of models that DTensor shards are what real loads of all ranks read and hold."""

import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from transformers.distributed import DistributedConfig

import hf_zero_stream
from benchmarks.moe_checkpoint import make_moe_checkpoint
from hf_zero_stream.errors import ConfigError, UnsupportedError
from hf_zero_stream.holdings.introspection import local_of
from hf_zero_stream.plugins.forecast.fake_group import fake_group
from hf_zero_stream.plugins.forecast.sharded import HeldShard, sharded_footprint
from hf_zero_stream.reports.measures import AnonymousMemory
from tests.forecast.test_footprint import assert_close, give_back_what_is_freed
from tests.support.cluster import run_ranks
from tests.support.sharded import Sizes, load_sharded, plan_of, world_of
from tests.support.zoo import Checkpoint


TWO: list[Sizes] = [{"fsdp_size": 2}, {"tp_size": 2}, {"fsdp_size": 2, "ep_size": 2}]
FOUR: list[Sizes] = [
    {"dp_replicate_size": 2, "fsdp_size": 2},
    {"fsdp_size": 2, "tp_size": 2},
    {"fsdp_size": 2, "tp_size": 2, "ep_size": 2},
]


# ------------------------------------------------------------------------------------------------- real loads


def load_and_plan(folder: Path, of_sizes: list[Sizes]) -> list[dict[str, Any]]:
    """What this rank reads in real loads, what it holds then, and what it planned before, inside the same job."""
    found = []
    for sizes in of_sizes:
        planned = plan_of(folder, sizes, dist.get_rank())
        model = load_sharded(transformers.AutoModelForCausalLM, folder, sizes)
        found.append(
            {
                "planned": planned,
                "report": model.streaming_report.ranks[dist.get_rank()],
                "announced": model.streaming_report.footprint,
                "held": {name: local_of(param).numel() for name, param in model.named_parameters()},
            }
        )
    assert dist.get_backend() == "gloo"
    dist.barrier()
    return found


@pytest.mark.parametrize(
    ("name", "world_size", "of_sizes"), [("deepseek_v3", 2, TWO), ("deepseek_v3", 4, FOUR), ("gpt_oss", 2, TWO[:2])]
)
def test_plans_are_what_loads_read(
    cluster: None, zoo_checkpoint: Checkpoint, name: str, world_size: int, of_sizes: list[Sizes]
) -> None:
    folder = zoo_checkpoint(name)
    for rank, found in enumerate(run_ranks(world_size, load_and_plan, folder, of_sizes)):
        for sizes, real in zip(of_sizes, found, strict=True):
            planned, report = plan_of(folder, sizes, rank), real["report"]
            assert real["planned"] == planned, "in a job that has a process group of its own"
            cost = planned.load.cost
            assert (cost.bytes_read, cost.bytes_needed, cost.reads) == (
                report.bytes_read,
                report.bytes_needed,
                report.reads,
            )
            targets = {target.name: target.numel for target in planned.load.targets}
            assert {name: targets[name] for name in real["held"]} == real["held"]
            assert planned.memory == real["announced"]
    assert not dist.is_initialized()


def test_ranks_one_after_the_other(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    """torch keeps what it has derived from device meshes, and takes those of other ranks for the same."""
    folder, sizes = zoo_checkpoint("deepseek_v3"), {"fsdp_size": 8, "tp_size": 8}
    found = [plan_of(folder, sizes, rank) for rank in (0, 37, 0)]
    assert found[0] == found[2] != found[1]
    for rank, planned in zip((0, 37), found, strict=False):
        (fresh,) = run_ranks(1, plan_of, folder, sizes, rank)
        assert fresh == planned, "in a process that has planned nothing else"


def test_ranks_share_the_checkpoint(zoo_checkpoint: Checkpoint) -> None:
    """Together the ranks hold each element of each parameter once, and all of them each buffer."""
    folder = zoo_checkpoint("deepseek_v3")
    whole = {target.name: target.numel for target in hf_zero_stream.plan(str(folder), world_size=1).load.targets}
    buffers = {name for name in whole if name.endswith(("inv_freq", "e_score_correction_bias"))}
    assert 0 < len(buffers) < len(whole) / 2
    for sizes in ({"fsdp_size": 7}, {"fsdp_size": 3, "ep_size": 3}):
        plans = [plan_of(folder, sizes, rank).load for rank in range(world_of(sizes))]
        for name, numel in whole.items():
            held = [target.numel for plan in plans for target in plan.targets if target.name == name]
            assert sum(held) == numel * (len(plans) if name in buffers else 1), name


# ------------------------------------------------------------------------------------------------- the stand-in


def test_the_stand_in_leaves_nothing(zoo_checkpoint: Checkpoint) -> None:
    hook = sys.excepthook
    seen = []
    with pytest.raises(KeyError), fake_group(5, 8):
        assert (dist.get_rank(), dist.get_world_size()) == (5, 8)
        thread = threading.Thread(target=lambda: seen.append(dist.is_initialized()))
        thread.start()
        thread.join()
        raise KeyError
    assert seen == [False], "other threads do not see it"
    assert not dist.is_initialized() and sys.excepthook is hook


def plan_beside_collectives(folder: Path) -> list[int]:
    """Plan while another thread of this process uses the job's own groups, and then use them here."""
    subgroup, results = dist.new_group([0, 1]), []

    def reduce() -> None:
        for _ in range(20):
            values = torch.ones(1)
            dist.all_reduce(values, group=subgroup)
            results.append(int(values) * dist.get_world_size())

    thread = threading.Thread(target=reduce)
    thread.start()
    for rank in (0, 37):
        plan_of(folder, {"fsdp_size": 64, "tp_size": 2}, rank)
    thread.join()
    values = torch.ones(1)
    dist.all_reduce(values)
    return [*results, int(values) * dist.get_world_size()]


def test_inside_a_job(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    assert run_ranks(2, plan_beside_collectives, zoo_checkpoint("llama")) == [[4] * 21] * 2


# ------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"distributed_config": {"fsdp_size": 4}}, ConfigError, r"world_size: expected 4, .*fsdp_size 4.*; got 8"),
        ({"distributed_config": {"fsdp_size": 8}, "ds_config": {}}, ConfigError, "ds_config or distributed_config"),
        ({"distributed_config": {"pp_size": 8}}, UnsupportedError, "expected pp_size 1; got 8"),
        ({"distributed_config": {"tp_plan": "auto"}}, ConfigError, "tp_size"),
        ({"tp_plan": "auto"}, ConfigError, "tp_size"),
        ({"distributed_config": {"fsdp_size": 8}, "rank": 8}, ConfigError, "rank: expected"),
    ],
)
def test_refused(zoo_checkpoint: Checkpoint, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        hf_zero_stream.plan(str(zoo_checkpoint("llama")), world_size=8, **arguments)


def test_ways_to_say_it(zoo_checkpoint: Checkpoint) -> None:
    folder = str(zoo_checkpoint("llama"))
    as_dict = hf_zero_stream.plan(folder, world_size=2, distributed_config={"tp_size": 2})
    config = DistributedConfig(tp_size=2)
    assert hf_zero_stream.plan(folder, world_size=2, distributed_config=config) == as_dict
    # Nothing is sharded by sizes of one: the plan is that of ZeRO-3.
    alone = hf_zero_stream.plan(folder, world_size=2, distributed_config={"fsdp_size": 1})
    assert alone == hf_zero_stream.plan(folder, world_size=2)


# ------------------------------------------------------------------------------------------------- memory


def test_memory_by_hand() -> None:
    shards = [HeldShard(100, "cuda", True), HeldShard(10, "cuda", False), HeldShard(8, "cpu", True)]
    found = sharded_footprint(shards, [("a", 7), ("b", 9)], device="cuda", buffer_bytes=5, staging_bytes=3)
    assert found.partitions == {"cuda": 110, "cpu": 8}
    assert found.load_peak == {"cuda": 115, "cpu": 11}
    assert found.gradients == {"cuda": 100, "cpu": 8} and found.optimizer_states == {"cuda": 200, "cpu": 16}
    assert found.held == {"cuda": 415, "cpu": 32}
    assert (found.largest_gather, found.largest_gather_of) == (9, "b")
    assert found.started == {} and found.start_peak == {"cuda": 115, "cpu": 8}
    # torch steps over lists of tensors on a GPU, tensor by tensor on a CPU.
    assert found.step_peak == {"cuda": 415 + 100, "cpu": 32 + 2 * 8}
    assert found.step_cures == {"a fused optimizer": {"cuda": 415, "cpu": 32}}


def test_peak_of_a_step_by_hand() -> None:
    shards = [HeldShard(100, "cuda", True), HeldShard(60, "cuda", True), HeldShard(800, "cuda", False)]

    def on_top(adamw: Any) -> int:
        found = sharded_footprint(shards, [], device="cuda", adamw=adamw)
        return found.step_peak["cuda"] - found.held["cuda"]

    assert {adamw: on_top(adamw) for adamw in ("foreach", "single", "fused")} == {
        "foreach": 160,
        "single": 200,
        "fused": 0,
    }


def test_offload_and_mixed_precision(zoo_checkpoint: Checkpoint) -> None:
    folder = zoo_checkpoint("deepseek_v3")

    def memory(device: str = "cuda", **changes: Any) -> Any:
        return plan_of(folder, {"fsdp_size": 2, **changes}, 0, device=device).memory

    plain, offloaded, mixed = memory(), memory(fsdp_cpu_offload=True), memory(fsdp_mixed_precision=True)
    assert set(plain.partitions) == {"cuda"} and set(offloaded.optimizer_states) == {"cpu"}
    assert offloaded.partitions["cpu"] == plain.partitions["cuda"]
    # Half of the bytes for each of two ranks, and the cast copy of this rank's own shard.
    assert mixed.largest_gather == plain.largest_gather * 3 // 4
    assert mixed.most_gathered == mixed.largest_gather
    assert mixed.passes_peak["cuda"] == plain.passes_peak["cuda"] - plain.largest_gather + mixed.largest_gather
    rest = {name: getattr(plain, name) for name in ("largest_gather", "most_gathered", "passes_peak")}
    assert replace(mixed, **rest) == plain
    assert memory("cpu").partitions == {"cpu": plain.partitions["cuda"]}


@pytest.fixture(scope="module")
def medium_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """160 MB in four layers."""
    return make_moe_checkpoint(tmp_path_factory.mktemp("medium"), 1.6e8, num_layers=4, num_experts=16)


def train_two_steps(folder: Path, tiny: Path, sizes: Sizes, adamw: str) -> dict[str, Any]:
    """Load and take steps of AdamW; memory is counted from before the load."""
    give_back_what_is_freed()
    gathers: list[int] = []
    # FSDP2 calls the one or the other, depending on the version of torch.
    for name in ("all_gather_single", "all_gather_into_tensor"):
        if hasattr(dist, name):
            setattr(dist, name, recorded(getattr(dist, name), gathers))

    def step(model: Any) -> Any:
        tokens = torch.arange(5, 37).view(1, -1)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer = torch.optim.AdamW(model.parameters(), foreach=adamw == "foreach", fused=adamw == "fused")
        optimizer.step()
        return optimizer

    def load(path: Path) -> Any:
        return load_sharded(transformers.AutoModelForCausalLM, path, sizes)

    step(load(tiny))
    gathers.clear()
    with AnonymousMemory() as memory:
        model = load(folder)
        loaded, load_peak = memory.sample(), memory.growth_peak
        optimizer = step(model)
        stepped = memory.sample()
        with AnonymousMemory() as stepping:
            optimizer.step()
    assert optimizer.state
    return {
        "announced": model.streaming_report.footprint,
        "loaded": loaded,
        "load_peak": load_peak,
        "stepped": stepped,
        "step_peak": stepped + stepping.growth_peak,
        "gather": max(gathers),
    }


def recorded(original: Callable[..., Any], sizes: list[int]) -> Callable[..., Any]:
    def gather(output: torch.Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        tensor = kwargs.get("output_tensor") if output is None else output
        assert tensor is not None
        sizes.append(tensor.nbytes)
        return original(*args, **kwargs) if output is None else original(output, *args, **kwargs)

    return gather


@pytest.mark.slow
@pytest.mark.parametrize("adamw", ["single", "foreach", "fused"])
def test_memory_of_training_is_as_announced(
    cluster: None, zoo_checkpoint: Checkpoint, medium_checkpoint: Path, adamw: Any
) -> None:
    sizes = {"fsdp_size": 2}
    arguments = medium_checkpoint, zoo_checkpoint("qwen3_moe", torch.bfloat16), sizes, adamw
    for rank, found in enumerate(run_ranks(2, train_two_steps, *arguments, timeout=240)):
        announced = found["announced"]
        assert asdict(announced) == asdict(plan_of(medium_checkpoint, sizes, rank, device="cpu").memory)
        assert found["gather"] == announced.largest_gather
        assert_close(found["loaded"], sum(announced.partitions.values()) + sum(announced.buffers.values()))
        assert found["load_peak"] <= announced.load_peak["cpu"] + 32 * 2**20
        assert_close(found["stepped"], announced.held["cpu"])
        planned = plan_of(medium_checkpoint, sizes, rank, device="cpu", adamw=adamw).memory
        assert_close(found["step_peak"], planned.step_peak["cpu"])
