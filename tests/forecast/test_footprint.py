"""The memory that a plan and a report announce is what DeepSpeed then takes."""

import ctypes
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

import hf_zero_stream
from benchmarks.moe_checkpoint import make_moe_checkpoint
from hf_zero_stream.errors import ConfigError
from hf_zero_stream.plugins.forecast.footprint import EngineSettings, ParameterShape, memory_footprint
from hf_zero_stream.reports.measures import AnonymousMemory
from tests.support.cluster import run_ranks
from tests.support.parity import ds_config
from tests.support.zoo import ZOO, Checkpoint


MIB = 2**20
BF16, FP32 = torch.bfloat16, torch.float32

# How far what is measured may be off: gloo gathers through a buffer of its own, and Linux counts late.
RELATIVE, ABSOLUTE = 0.05, 32 * MIB


def shapes(*numels: int, ranks: int = 2, **changes: Any) -> list[ParameterShape]:
    return [
        ParameterShape(f"layers.{number}.weight", numel, BF16, ranks=ranks, **changes)
        for number, numel in enumerate(numels)
    ]


# ------------------------------------------------------------------------------------------------- by hand


def test_training_in_bf16_on_a_gpu() -> None:
    """7 and 8 elements on two ranks: partitions of 4 each."""
    found = memory_footprint(
        shapes(7, 8), EngineSettings(device="cuda", reduce_bucket_bytes=20), buffer_bytes=5, staging_bytes=9
    )
    assert found.partitions == {"cuda": 8 * 2}
    assert found.buffers == {"cuda": 5}
    assert found.load_peak == {"cuda": 21, "cpu": 9}
    assert (found.largest_gather, found.largest_gather_of) == (8 * 2, "layers.0.weight")
    assert found.master == {"cuda": 8 * 4}
    assert found.optimizer_states == {"cuda": 8 * 4 * 2}
    assert found.gradients == {"cuda": 8 * 2}
    assert found.reduce_bucket == {"cuda": 10 * 2}
    assert found.held == {"cuda": 16 + 5 + 32 + 64 + 16 + 20}
    # A step: gradients in fp32, and two temporary tensors of that size.
    assert found.step_peak == {"cuda": 153 + 32 + 2 * 32}
    assert found.step_cures == {"a fused optimizer": {"cuda": 153 + 16 + 32}}
    # Casting takes twice the copies; later gradients, the bucket and the largest parameter are there as well. All
    # partitions pass through the host while they are put in a row.
    assert found.start_peak == {"cuda": 21 + max(2 * 32, 32 + 20 + 16 + 16), "cpu": 8 * 2}


def test_frozen_and_tied_parameters() -> None:
    frozen = ParameterShape("embed.weight", 100, BF16, requires_grad=False, ranks=2)
    tied = ParameterShape("lm_head.weight", 100, BF16, ranks=2, tied=True)
    found = memory_footprint([frozen, *shapes(8), tied], EngineSettings())
    assert found.partitions == {"cpu": 2 * (50 + 4)}
    assert found.master == {"cpu": 4 * 4}
    assert found.largest_gather == 200
    nothing_trained = memory_footprint([frozen], EngineSettings(reduce_bucket_bytes=0))
    assert nothing_trained.held == nothing_trained.partitions == {"cpu": 100}


def test_parameters_of_one_module_are_gathered_together() -> None:
    names = {"a.w": 6, "a.b": 2, "moe.gate.w": 1, "moe.experts.up": 5, "moe.experts.down": 5, "moe2.w": 9}
    parameters = [ParameterShape(name, numel, FP32) for name, numel in names.items()]
    experts = memory_footprint(parameters, EngineSettings())
    assert (experts.largest_gather, experts.largest_gather_of) == (10 * 4, "moe.experts")
    block = memory_footprint(parameters, EngineSettings(), leaf_modules=["moe", "moe.experts"])
    assert (block.largest_gather, block.largest_gather_of) == (11 * 4, "moe")


def test_gathers_are_padded_and_groups_have_their_own_size() -> None:
    parameters = [*shapes(7, ranks=3), ParameterShape("expert.weight", 7, BF16, ranks=1)]
    found = memory_footprint(parameters, EngineSettings())
    assert found.partitions == {"cpu": 2 * (3 + 7)}
    assert found.largest_gather == 9 * 2


def test_optimizer_on_the_host() -> None:
    settings = EngineSettings(device="cuda", offload_optimizer="cpu", pinned_optimizer=True, reduce_bucket_bytes=2)
    found = memory_footprint(shapes(8, 8), settings)
    assert found.partitions == {"cuda": 16}
    assert found.master == {"cpu": 32} and found.optimizer_states == {"cpu": 64}
    assert found.gradients == {"cpu": 16 + 32}, "accumulated ones, and those that the optimizer reads"
    assert found.held == {"cuda": 16 + 2, "cpu": 32 + 64 + 48}
    # Zeros become page-locked gradients while as many are still to be freed.
    assert found.start_peak == {"cuda": 16 + 2 + 16, "cpu": 32 + 3 * 32}
    # Its gradients are there already.
    assert found.step_peak == {"cuda": 18, "cpu": 144 + 2 * 32}
    fused = memory_footprint(shapes(8, 8), replace(settings, step_copies=0))
    assert fused.step_peak == {"cuda": 18, "cpu": 144 + 16}, "new values are cast before they go to the device"
    assert fused.step_cures == {}


def test_part_of_the_optimizer_on_the_host() -> None:
    settings = EngineSettings(device="cuda", offload_optimizer="cpu", offload_ratio=0.7, sub_group_size=4)
    found = memory_footprint(shapes(*[8] * 10), settings)
    assert found.master == {"cuda": 3 * 16, "cpu": 7 * 16}
    assert found.optimizer_states == {"cuda": 3 * 32, "cpu": 7 * 32}


@pytest.mark.plugin("nvme")
def test_everything_on_disk() -> None:
    settings = EngineSettings(
        device="cuda",
        offload_param="nvme",
        offload_optimizer="nvme",
        swap_from_bytes=8,
        parameter_swap_bytes=1000,
        optimizer_swap_buffers=3,
        sub_group_size=4,
    )
    found = memory_footprint(shapes(8, 2, 8), settings)
    assert found.partitions == {"nvme": 16, "cpu": 2}, "1 element is too little for the disk"
    assert found.load_peak == {"cpu": 2 + 1000}
    # The second sub-group is full with its second parameter.
    assert found.master == {"nvme": (4 + 5) * 4}
    assert found.swap_buffers == 1000 + 3 * 5 * 4
    assert found.held["nvme"] == 16 + 36 + 72
    assert "nvme" not in found.start_peak


def test_small_sub_groups_lower_the_peak() -> None:
    parameters = shapes(*[2000] * 8)
    at_once = memory_footprint(parameters, EngineSettings())
    one_by_one = memory_footprint(parameters, EngineSettings(sub_group_size=1000))
    assert at_once.start_peak["cpu"] == 16000 + 2 * 32000
    # All copies, the gradients, and the largest parameter.
    assert one_by_one.start_peak["cpu"] == 16000 + 32000 + 16000 + 4000
    assert at_once.held == one_by_one.held
    held = at_once.held["cpu"]
    assert at_once.step_peak["cpu"] == held + 3 * 32000
    assert one_by_one.step_peak["cpu"] == held + 3 * 4000


def test_what_lowers_the_peak_of_a_step() -> None:
    parameters, settings = shapes(*[10**8] * 6), EngineSettings(reduce_bucket_bytes=0)
    found = memory_footprint(parameters, settings)
    assert found.step_peak["cpu"] == found.held["cpu"] + 3 * 12 * 10**8
    assert found.step_cures == {
        '"sub_group_size": 100000000': {"cpu": found.held["cpu"] + 3 * 4 * 10**8},
        "a fused optimizer": {"cpu": found.held["cpu"] + 18 * 10**8},
    }
    small = memory_footprint(parameters, replace(settings, sub_group_size=10**8))
    assert small.step_peak == found.step_cures['"sub_group_size": 100000000']


def test_norms_are_taken_in_fp64() -> None:
    found = memory_footprint(shapes(8, 2), EngineSettings(step_copies=0, reduce_bucket_bytes=0, sub_group_size=1))
    assert found.step_peak["cpu"] == found.held["cpu"] + 8 * 4


def test_second_partitions_of_hpz() -> None:
    found = memory_footprint(shapes(70, ranks=8), EngineSettings(secondary_ranks=2))
    assert found.secondary == {"cpu": 36 * 2}


# ------------------------------------------------------------------------------------------------- from a config


TORCH = {"torch_adam": True}


@pytest.mark.parametrize(
    ("optimizer", "zero", "adamw", "device", "copies"),
    [
        (None, {}, None, "cuda", 1),
        (None, {}, None, "cpu", 2),
        (None, {}, "fused", "cuda", 0),
        (None, {"offload_optimizer": {"device": "cpu"}}, "single", "cuda", 0),
        ({"type": "AdamW", "params": TORCH}, {"offload_optimizer": {"device": "cpu"}}, None, "cuda", 2),
        ({"type": "AdamW"}, {}, "single", "cuda", 0),
        ({"type": "AdamW", "params": {**TORCH, "foreach": False}}, {}, "fused", "cuda", 2),
        ({"type": "AdamW", "params": {**TORCH, "foreach": True}}, {}, None, "cpu", 1),
        ({"type": "AdamW", "params": {**TORCH, "fused": True}}, {}, None, "cpu", 0),
        ({"type": "SGD", "params": {"weight_decay": 0.1}}, {}, None, "cuda", 1),
    ],
)
def test_temporary_tensors_of_a_step(
    zoo_checkpoint: Checkpoint,
    optimizer: dict[str, Any] | None,
    zero: dict[str, Any],
    adamw: Any,
    device: str,
    copies: int,
) -> None:
    """In sub-groups of a single parameter: the gradient in fp32 is as large as a temporary tensor."""
    zero = {"stage": 3, "sub_group_size": 1, **zero}
    config = {"bf16": {"enabled": True}, "zero_optimization": zero, **({"optimizer": optimizer} if optimizer else {})}
    folder = str(zoo_checkpoint("llama"))
    found = hf_zero_stream.plan(folder, world_size=2, ds_config=config, device=device, adamw=adamw)
    place = "cpu" if "offload_optimizer" in zero else device
    largest = max(target.stop - target.start for target in found.load.targets)
    on_top = found.memory.step_peak[place] - found.memory.held[place]
    # At least: the norm in fp64 on the device, the cast of new values on the host.
    least = 2 * largest if place != device else 8 * largest
    gradient = 0 if place != device else 4 * largest
    assert on_top == max(least, gradient + copies * 4 * largest)


def test_unknown_way_to_step(zoo_checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match="adamw: expected one of single, foreach, fused; got 'quick'"):
        hf_zero_stream.plan(str(zoo_checkpoint("llama")), world_size=2, adamw="quick")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "states", "itemsize"),
    [
        ({}, 2, 4),
        ({"optimizer": {"type": "SGD", "params": {"lr": 1}}}, 0, 4),
        ({"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}}, 1, 4),
        ({"optimizer": {"type": "Lion"}}, 1, 4),
        ({"optimizer": {"type": "Adam", "params": {"amsgrad": True, "torch_adam": True}}}, 3, 4),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, 2, 2),
    ],
)
def test_states_of_optimizers(zoo_checkpoint: Checkpoint, changes: dict[str, Any], states: int, itemsize: int) -> None:
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}, **changes}
    found = hf_zero_stream.plan(str(zoo_checkpoint("llama")), world_size=2, ds_config=config).memory
    assert found is not None
    trained = sum(found.partitions.values()) // 2
    assert sum(found.optimizer_states.values()) == trained * states * itemsize
    assert sum(found.master.values()) == trained * itemsize


def test_settings_come_from_deepspeeds_own_parser(zoo_checkpoint: Checkpoint) -> None:
    folder = str(zoo_checkpoint("llama"))

    def bucket(**zero: Any) -> Any:
        found = hf_zero_stream.plan(folder, world_size=2, ds_config=ds_config(BF16, **zero)).memory
        return found and found.reduce_bucket

    assert bucket() == {"cpu": 5 * 10**8 * 2}
    assert bucket(reduce_bucket_size="auto") == {"cpu": 35**2 * 2}, "transformers takes the square of hidden_size"
    assert bucket(reduce_bucket_size=1e3) == {"cpu": 2000}
    assert bucket(contiguous_gradients=False) == {}


@pytest.mark.parametrize(
    ("name", "why"), [("mics_shard_size", "MiCS ZeRO-3 sharding has been removed"), ("?", "Extra")]
)
def test_a_section_that_deepspeed_does_not_take(zoo_checkpoint: Checkpoint, name: str, why: str) -> None:
    config = ds_config(BF16, **{name: 2})
    with pytest.raises(ConfigError, match=f"zero_optimization: DeepSpeed does not take .*(\n.*)*{why}"):
        hf_zero_stream.plan(str(zoo_checkpoint("llama")), world_size=2, ds_config=config)


def test_plan_for_a_device_that_is_not_here(zoo_checkpoint: Checkpoint) -> None:
    config = ds_config(BF16, offload_optimizer={"device": "cpu"})
    found = hf_zero_stream.plan(str(zoo_checkpoint("llama")), world_size=64, ds_config=config, device="cuda").memory
    assert found is not None
    assert set(found.partitions) == set(found.reduce_bucket) == {"cuda"}
    assert set(found.master) == set(found.optimizer_states) == set(found.gradients) == {"cpu"}


def test_deepspeeds_default_leaf_modules_count_whole(tmp_path: Path) -> None:
    folder = str(make_moe_checkpoint(tmp_path, 3e6, num_layers=1, num_experts=8))
    whole = hf_zero_stream.plan(folder, world_size=2, ds_config=ds_config()).memory
    none = {"leaf_module": {"classes": [], "name_suffixes": ["self_attn"]}}
    parts = hf_zero_stream.plan(folder, world_size=2, ds_config=ds_config(**none)).memory
    assert whole is not None and parts is not None
    assert whole.largest_gather_of == "model.layers.0.mlp"
    assert parts.largest_gather_of == "model.layers.0.mlp.experts"
    assert whole.largest_gather > parts.largest_gather


# ------------------------------------------------------------------------------------------------- measured


@contextmanager
def gathers() -> Iterator[list[int]]:
    """Bytes of every buffer that DeepSpeed's hooks gather into."""
    from deepspeed.runtime.zero import partition_parameters as deepspeed_partition

    sizes: list[int] = []
    original = deepspeed_partition._dist_allgather_fn

    def recorded(part: torch.Tensor, whole: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sizes.append(whole.nbytes)
        return original(part, whole, *args, **kwargs)

    deepspeed_partition._dist_allgather_fn = recorded
    try:
        yield sizes
    finally:
        deepspeed_partition._dist_allgather_fn = original


def gather_in_forward(name: str, folder: Path) -> dict[str, Any]:
    recipe, config = ZOO[name], ds_config(BF16)
    model = getattr(hf_zero_stream, f"Streaming{recipe.auto_class}").from_pretrained(folder, ds_config=config)
    report = model.streaming_report
    engine, *_ = deepspeed.initialize(model=model, config=config)
    with gathers() as sizes:
        engine(**recipe.inputs())
    by_device: Counter[str] = Counter()
    for param in model.parameters():
        by_device[param.ds_tensor.device.type] += param.ds_tensor.nbytes
    return {
        "largest": max(sizes),
        "partitions": dict(by_device),
        "announced": report.footprint,
    }


# Bytes of a tied parameter in the largest piece that the module around it has gathered before.
ALREADY_GATHERED = {"bert": 312 * 2}


@pytest.mark.parametrize("name", list(ZOO))
@pytest.mark.sample(3)
def test_partitions_and_largest_gather_are_exact(cluster: None, zoo_checkpoint: Checkpoint, name: str) -> None:
    folder = zoo_checkpoint(name, BF16)
    planned = hf_zero_stream.plan(str(folder), world_size=2, ds_config=ds_config(BF16)).memory
    for found in run_ranks(2, gather_in_forward, name, folder):
        assert found["announced"] == planned
        assert found["partitions"] == planned.partitions
        assert found["largest"] == planned.largest_gather - ALREADY_GATHERED.get(name, 0)


@pytest.fixture(scope="module")
def medium_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """160 MB in four layers."""
    return make_moe_checkpoint(tmp_path_factory.mktemp("medium"), 1.6e8, num_layers=4, num_experts=16)


def give_back_what_is_freed() -> None:
    """Return freed memory to the system at once, and do not keep it for the next allocation (M_MMAP_THRESHOLD)."""
    ctypes.CDLL(None).mallopt(-3, 2**16)
    torch.backends.mkldnn.set_flags(False)  # which keeps memory of its own for each shape of a product in bf16


def start_and_step(folder: Path, tiny: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Load, initialise and take one step; memory is counted from before the load."""
    give_back_what_is_freed()

    def initialise(model: Any) -> Any:
        return deepspeed.initialize(model=model, config=config)[0]

    def step(engine: Any) -> int:
        """Returns how much memory the optimizer's step took at most, over what was there before it."""
        tokens = torch.arange(5, 37).view(1, -1)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        with AnonymousMemory() as stepping:
            engine.step()
        return stepping.growth_peak

    def load(path: Path) -> Any:
        return hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(path, ds_config=config)

    step(initialise(load(tiny)))  # what is imported and compiled at first use is not this model's memory
    with AnonymousMemory() as memory, gathers() as sizes:
        model = load(folder)
        loaded, load_peak = memory.sample(), memory.growth_peak
        with AnonymousMemory() as starting:
            engine = initialise(model)
            start_peak = loaded + starting.growth_peak
        started = memory.sample()
        sizes.clear()
        step(engine)
        stepped, gather = memory.sample(), max(sizes)
        step_peak = stepped + step(engine)
    return {
        "loaded": loaded,
        "load_peak": load_peak,
        "started": started,
        "start_peak": start_peak,
        "stepped": stepped,
        "step_peak": step_peak,
        "gather": gather,
        "partition": sum(param.ds_tensor.nbytes for param in model.parameters()),
        "announced": model.streaming_report.footprint,
    }


@pytest.mark.parametrize(
    ("dtype", "optimizer", "zero"),
    [
        (BF16, TORCH, {}),
        (BF16, {**TORCH, "foreach": True}, {}),
        (BF16, TORCH, {"sub_group_size": 4_000_000}),
        (BF16, {}, {}),
        (BF16, TORCH, {"offload_optimizer": {"device": "cpu"}}),
        (BF16, {}, {"offload_optimizer": {"device": "cpu"}}),
        (BF16, TORCH, {"offload_param": {"device": "cpu"}}),
        (FP32, TORCH, {}),
    ],
    ids=[
        "bf16",
        "foreach",
        "small_sub_groups",
        "fused_adam",
        "offload_optimizer",
        "cpu_adam",
        "offload_param",
        "fp32",
    ],
)
@pytest.mark.sample(0)  # seconds of a model of many megabytes; on paper GPUs the same is seen in small
def test_memory_of_training_is_as_announced(
    cluster: None,
    zoo_checkpoint: Checkpoint,
    medium_checkpoint: Path,
    dtype: torch.dtype,
    optimizer: dict[str, Any],
    zero: dict[str, Any],
) -> None:
    """Anonymous memory of real processes, within 5 % and 32 MiB of what was announced.

    The allocator's habit of keeping what is freed and oneDNN's own memory are switched off: neither is announced.
    """
    # As large as what one backward pass puts into it, since a bucket's memory counts on a host when it is written.
    config = {**ds_config(dtype, reduce_bucket_size=20_000_000, **zero), "zero_force_ds_cpu_optimizer": False}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, **optimizer}}
    ranks = run_ranks(2, start_and_step, medium_checkpoint, zoo_checkpoint("qwen3_moe", dtype), config, timeout=240)
    for found in ranks:
        announced = found["announced"]
        assert announced.partitions == {"cpu": found["partition"]}
        assert found["gather"] == announced.largest_gather
        assert found["load_peak"] <= announced.load_peak["cpu"] + ABSOLUTE
        assert_close(found["loaded"], found["partition"])
        started = Counter(announced.held) - Counter(announced.optimizer_states) - Counter(announced.reduce_bucket)
        assert_close(found["started"], started["cpu"])
        assert_close(found["start_peak"], announced.start_peak["cpu"])
        assert_close(found["stepped"], announced.held["cpu"])
        assert_close(found["step_peak"], announced.step_peak["cpu"])


def assert_close(measured: int, announced: int) -> None:
    assert abs(measured - announced) <= RELATIVE * announced + ABSOLUTE, (
        f"measured {measured / MIB:.0f} MiB, announced {announced / MIB:.0f} MiB"
    )
