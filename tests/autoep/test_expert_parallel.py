"""Expert parallelism (DeepSpeed's AutoEP): every rank reads its own experts only, and trains as without it."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from transformers.distributed import DistributedConfig

import hf_zero_stream
from benchmarks.moe_checkpoint import make_moe_checkpoint
from hf_zero_stream.sources import local
from hf_zero_stream.sources.base import Hints
from hf_zero_stream.sources.local import LocalFiles
from tests.support.allocations import AllocationWatch
from tests.support.autoep import let_autoep_run
from tests.support.checkpoint_files import rewritten
from tests.support.cluster import ROOT, run_ranks, run_ranks_expecting_errors
from tests.support.commands import losses as printed_losses
from tests.support.commands import run_command
from tests.support.parity import ds_config, three_losses
from tests.support.saving import SHARD_SIZE, different, saves_with
from tests.support.zoo import TEXT, ZOO, Checkpoint


EXPERTS = 6


def expert_parallel(dtype: torch.dtype = torch.float32, size: int = 2, **zero: Any) -> dict[str, Any]:
    """A config that trains on a CPU, where DeepSpeed's grouped matrix products do not run."""
    section = {"enabled": True, "autoep_size": size, "use_grouped_mm": False}
    own = {"staging_bytes": "1MiB"}
    return {**ds_config(dtype, **zero), "expert_parallel": section, "hf_zero_stream": own}


@pytest.fixture(scope="module")
def checkpoint(
    tmp_path_factory: pytest.TempPathFactory, zoo_checkpoint: Checkpoint
) -> Callable[[str, torch.dtype], Path]:
    """`checkpoint(name, dtype)`: a zoo model, with an even number of experts where the zoo's number is odd."""

    def make(name: str, dtype: torch.dtype) -> Path:
        if name == "deepseek_v3":
            return zoo_checkpoint(name, dtype)
        folder = tmp_path_factory.mktemp(name)
        torch.manual_seed(0)
        if name == "mixtral":
            config = transformers.MixtralConfig(**TEXT, intermediate_size=29, num_local_experts=EXPERTS)
        else:
            config = transformers.Qwen3MoeConfig(
                **TEXT, intermediate_size=55, moe_intermediate_size=17, num_experts=EXPERTS, num_experts_per_tok=2
            )
        transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(
            folder, max_shard_size="100KB"
        )
        # As in the zoo: grouped matrix products want rows of a multiple of 16 bytes.
        saved = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**saved, "experts_implementation": "eager"}))
        return folder

    return make


# ---------------------------------------------------------------------------------------------------- what ranks run


def load(folder: Path, config: dict[str, Any], loader: str, **kwargs: Any) -> nn.Module:
    """Under ZeRO-3: "streaming", "stock" without expert parallelism, or "autoep", DeepSpeed's own conversion."""
    if loader == "streaming":
        return hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(folder, ds_config=config, **kwargs)
    keeps_zero3_on = transformers.integrations.HfDeepSpeedConfig(config)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **kwargs)
    del keeps_zero3_on
    return model


def initialise(model: nn.Module, config: dict[str, Any], loader: str) -> Any:
    if loader == "stock":
        config = {key: value for key, value in config.items() if key != "expert_parallel"}
    if loader == "autoep":
        let_autoep_run()
    engine, *_ = deepspeed.initialize(model=model, config=config)
    return engine


def losses(folder: Path, config: dict[str, Any], loader: str, kwargs: dict[str, Any]) -> list[float]:
    engine = initialise(load(folder, config, loader, **kwargs), config, loader)
    return three_losses(engine, ZOO["qwen3_moe"].inputs)


def expert_values(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """What this rank holds of the experts, what a plain model holds, and which bytes were read."""
    local.Hints = partial(Hints, seek_bytes=0)  # type: ignore[misc,assignment]
    spans: list[tuple[str, int, int]] = []
    read_into = LocalFiles.read_into

    def recorded(self: Any, shard: int, start: int, buffers: Any) -> None:
        spans.append((self._files[shard].path, start, start + sum(map(len, buffers))))
        read_into(self, shard, start, buffers)

    LocalFiles.read_into = recorded  # type: ignore[method-assign]
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder).model.layers
    model = load(folder, config, "streaming")
    different = []
    for number, layer in enumerate(model.model.layers):
        fused = plain[number].mlp.experts
        gate, up = fused.gate_up_proj.chunk(2, dim=1)
        experts = layer.mlp.experts
        own = slice(dist.get_rank() % 2 * EXPERTS // 2, (dist.get_rank() % 2 + 1) * EXPERTS // 2)
        expected = {"w1": gate[own], "w2": fused.down_proj[own], "w3": up[own]}
        for name, param in experts.named_parameters():
            ranks = dist.get_process_group_ranks(param.ds_process_group)
            assert ranks == list(range(dist.get_rank() % 2, dist.get_world_size(), 2))
            with deepspeed.zero.GatheredParameters([param]):
                if not torch.equal(param, expected[name]):
                    different.append(f"{number}.{name}")
        if layer.mlp.tokens_per_expert.any() or layer.mlp.tokens_per_expert.is_meta:
            different.append(f"{number}: counts of tokens do not begin at nothing")
    return {"different": different, "spans": spans, "report": model.streaming_report.to_dict()}


def largest_allocation(folder: Path, config: dict[str, Any], loader: str) -> int:
    with AllocationWatch() as watch:
        initialise(load(folder, config, loader), config, loader)
    return watch.largest


def train_and_save(folder: Path, config: dict[str, Any], target: Path) -> list[float]:
    engine = initialise(load(folder, config, "streaming"), config, "streaming")
    three_losses(engine, ZOO["qwen3_moe"].inputs)
    engine.save_checkpoint(str(target))
    return three_losses(engine, ZOO["qwen3_moe"].inputs)


def restore_and_train(folder: Path, config: dict[str, Any], target: Path) -> list[float]:
    engine = initialise(load(folder, config, "streaming"), config, "streaming")
    path, _ = engine.load_checkpoint(str(target))
    assert path is not None
    return three_losses(engine, ZOO["qwen3_moe"].inputs)


def save_twice(folder: Path, config: dict[str, Any], target: Path) -> list[str]:
    """Save what was loaded, and after three steps; names of parameters that come back with other values."""
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    if dist.get_rank() == 0:
        plain.save_pretrained(target / "stock", max_shard_size=SHARD_SIZE)
    model = load(folder, config, "streaming")
    hf_zero_stream.save_pretrained(model, target / "loaded", max_shard_size=SHARD_SIZE)
    engine = initialise(model, config, "streaming")
    three_losses(engine, ZOO["qwen3_moe"].inputs)
    with saves_with(verify="full"):
        hf_zero_stream.save_pretrained(engine, target / "trained", max_shard_size=SHARD_SIZE)
    hf_zero_stream.load_into(engine, target / "loaded")
    hf_zero_stream.load_into(engine, target / "trained")
    again = load(target / "trained", config, "streaming")
    different = []
    for (name, trained), param in zip(engine.module.named_parameters(), again.parameters(), strict=True):
        with deepspeed.zero.GatheredParameters([trained, param]):
            if not torch.equal(trained, param):
                different.append(name)
    return different


def initialise_with(folder: Path, config: dict[str, Any], other: dict[str, Any]) -> None:
    initialise(load(folder, config, "streaming"), other, "streaming")


# ------------------------------------------------------------------------------------------------------------- tests


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_losses_equal_those_without_expert_parallelism(
    cluster: None, checkpoint: Callable[..., Path], name: str, world_size: int
) -> None:
    """To fp32's rounding: a processor may multiply half of the experts in another order than all of them."""
    folder = checkpoint(name, torch.float32)
    config = expert_parallel()
    streamed = run_ranks(world_size, losses, folder, config, "streaming", {})
    stock = run_ranks(world_size, losses, folder, config, "stock", {})
    for ours, theirs in zip(streamed, stock, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
        assert len(set(ours)) == 3, "three steps must change the loss"


def losses_with_transformers_own(folder: Path, loader: str, enabled: bool) -> list[float]:
    kwargs = {"distributed_config": DistributedConfig(enable_expert_parallel=True)} if enabled else {}
    config = ds_config()
    return three_losses(initialise(load(folder, config, loader, **kwargs), config, loader), ZOO["qwen3_moe"].inputs)


@pytest.mark.slow
def test_transformers_own_means_nothing_under_zero3(cluster: None, checkpoint: Callable[..., Path]) -> None:
    """It wants a device mesh, and ZeRO-3 has none: stock loads and trains as if it were not asked for; so do we."""
    folder = checkpoint("qwen3_moe", torch.float32)
    without = run_ranks(2, losses_with_transformers_own, folder, "stock", False)
    assert run_ranks(2, losses_with_transformers_own, folder, "stock", True) == without
    assert run_ranks(2, losses_with_transformers_own, folder, "streaming", True) == without


@pytest.mark.plugin("nvme")
@pytest.mark.slow
@pytest.mark.usefixtures("async_io")
@pytest.mark.parametrize("home", ["cpu", "nvme"])
def test_with_offload(cluster: None, checkpoint: Callable[..., Path], tmp_path: Path, home: str) -> None:
    folder = checkpoint("qwen3_moe", torch.float32)
    zero: dict[str, Any] = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    if home == "nvme":
        zero = {"offload_param": {"device": "nvme", "nvme_path": str(tmp_path), "buffer_size": 2**20}}
    config = expert_parallel(**zero)
    streamed = run_ranks(4, losses, folder, config, "streaming", {})
    stock = run_ranks(4, losses, folder, config, "stock", {})
    for ours, theirs in zip(streamed, stock, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.sample(1)
def test_losses_equal_deepspeeds_own_conversion(
    cluster: None, checkpoint: Callable[..., Path], dtype: torch.dtype, world_size: int
) -> None:
    """To the last bit, because the layers are the same; with the routers' losses, which come through recorders."""
    folder = checkpoint("qwen3_moe", dtype)
    runs = [
        run_ranks(world_size, losses, folder, expert_parallel(dtype), loader, {"output_router_logits": True})
        for loader in ("streaming", "autoep")
    ]
    assert runs[0] == runs[1]


@pytest.mark.plugin("forecast")
@pytest.mark.parametrize("world_size", [2, 4])
def test_each_rank_reads_its_own_experts_only(cluster: None, checkpoint: Callable[..., Path], world_size: int) -> None:
    folder = checkpoint("qwen3_moe", torch.float32)
    tensors = [
        (str(path), name, entry) for path in folder.glob("*.safetensors") for name, entry in _entries(path).items()
    ]
    found = run_ranks(world_size, expert_values, folder, expert_parallel())
    touched: dict[int, set[int]] = {0: set(), 1: set()}
    for rank, result in enumerate(found):
        assert not result["different"]
        touched[rank % 2] |= {
            int(name.split(".experts.")[1].split(".")[0])
            for path, name, (start, stop) in tensors
            if ".experts." in name
            for where, first, last in result["spans"]
            if where == path and first < stop and start < last
        }
        report = result["report"]["ranks"][rank]
        assert not report["materialised"]
        assert report["bytes_read"] == report["bytes_needed"]
        planned = hf_zero_stream.plan(str(folder), world_size=world_size, rank=rank, ds_config=expert_parallel()).load
        assert planned.cost.bytes_needed == report["bytes_needed"]
    assert touched == {0: set(range(EXPERTS // 2)), 1: set(range(EXPERTS // 2, EXPERTS))}
    # The experts, and all else, are read once in all.
    assert sum(stop - start for *_, (start, stop) in tensors) == sum(
        report["bytes_read"] for report in found[0]["report"]["ranks"]
    )


def _entries(path: Path) -> dict[str, tuple[int, int]]:
    """The byte range in the file of every tensor of a shard."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return {
        name: (8 + length + entry["data_offsets"][0], 8 + length + entry["data_offsets"][1])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def test_no_fused_expert_tensor_is_allocated(cluster: None, tmp_path: Path) -> None:
    """From `from_pretrained` to the end of `deepspeed.initialize`, where DeepSpeed's own conversion makes them."""
    folder = make_moe_checkpoint(tmp_path, 2e7, num_layers=1, num_experts=16)
    shape = transformers.AutoConfig.from_pretrained(folder)
    fused = 2 * shape.num_experts * 2 * shape.moe_intermediate_size * shape.hidden_size
    config = expert_parallel(torch.bfloat16, sub_group_size=1, reduce_bucket_size=10**5)
    for largest in run_ranks(4, largest_allocation, folder, config, "autoep"):
        assert largest >= fused
    for largest in run_ranks(4, largest_allocation, folder, config, "streaming"):
        assert largest < fused


@pytest.mark.slow
def test_checkpoints_of_the_engine_are_saved_and_loaded(
    cluster: None, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = checkpoint("qwen3_moe", torch.float32)
    config = expert_parallel()
    continued = run_ranks(4, train_and_save, folder, config, tmp_path / "saved")
    restored = run_ranks(4, restore_and_train, folder, config, tmp_path / "saved")
    assert restored == continued


@pytest.mark.sample(1)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_saved_as_the_model_that_it_was(
    cluster: None, checkpoint: Callable[..., Path], tmp_path: Path, name: str, world_size: int
) -> None:
    folder = checkpoint(name, torch.bfloat16)
    found = run_ranks(world_size, save_twice, folder, expert_parallel(torch.bfloat16), tmp_path)
    assert found == [[]] * world_size
    assert different(tmp_path / "loaded", tmp_path / "stock") == []
    changed = different(tmp_path / "trained", tmp_path / "stock")
    assert changed and all(name.endswith(".safetensors") for name in changed)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (3, "autoep_size is 3, which does not divide the 2 ranks of this run; use one of [1, 2]"),
        (2, "num_experts=5 in layer 'model.layers.0.mlp' is not divisible by autoep_size=2"),
    ],
    ids=["ranks", "experts"],
)
def test_a_size_that_does_not_divide_is_an_error_before_reading(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, size: int, expected: str
) -> None:
    folder = zoo_checkpoint("qwen3_moe")
    for outcome in run_ranks_expecting_errors(2, load, folder, expert_parallel(size=size), "streaming"):
        assert outcome.error_type == "ConfigError"
        assert expected in outcome.error_message


def test_another_size_when_initialising_is_an_error(cluster: None, checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("qwen3_moe", torch.float32)
    for outcome in run_ranks_expecting_errors(2, initialise_with, folder, expert_parallel(), expert_parallel(size=1)):
        assert outcome.error_type == "ConfigError"
        assert "autoep_size is 1 now, and was 2 when the model was loaded" in outcome.error_message


def test_experts_that_are_not_in_the_checkpoint_are_an_error(
    cluster: None, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = checkpoint("qwen3_moe", torch.float32)
    rewritten(folder, tmp_path, lambda tensors: tensors.pop("model.layers.0.mlp.gate.weight"))
    for outcome in run_ranks_expecting_errors(2, load, tmp_path, expert_parallel(), "streaming"):
        assert outcome.error_type == "LoadError"
        assert "no usable values for model.layers.0.mlp.gate.weight (1 in all)" in outcome.error_message


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel.autotp_size 2"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}, "zero_hpz_partition_size 2"),
    ],
    ids=["tensor_parallel", "hpz"],
)
def test_what_cannot_be_combined_is_refused(
    cluster: None, checkpoint: Callable[..., Path], changes: dict[str, Any], expected: str
) -> None:
    folder = checkpoint("qwen3_moe", torch.float32)
    for outcome in run_ranks_expecting_errors(2, load, folder, {**expert_parallel(), **changes}, "streaming"):
        assert outcome.error_type == "UnsupportedError"
        assert expected in outcome.error_message


@pytest.mark.usefixtures("compiler")
@pytest.mark.slow
def test_the_trainer_needs_nothing_but_the_config(tmp_path: Path) -> None:
    """The example config, with the products that run on a CPU, gives the losses of stock's loading without it."""
    config = json.loads((ROOT / "examples" / "deepspeed" / "zero3_expert_parallel.json").read_text())
    config["expert_parallel"]["use_grouped_mm"] = False
    (tmp_path / "expert_parallel.json").write_text(json.dumps(config))
    make_moe_checkpoint(tmp_path / "tiny-moe", 1e7, num_layers=2, num_experts=8)
    train = "torchrun --nproc_per_node 2 examples/finetune_trainer.py --model tiny-moe --steps 3"
    output = run_command(train, tmp_path, extra=["--deepspeed", str(tmp_path / "expert_parallel.json")])
    assert output.count("STREAMING LOAD REPORT (2 ranks") == 1
    found = printed_losses(output)
    assert len(found) == 3
    stock = printed_losses(run_command(train, tmp_path, extra=["--loader", "stock"]))
    # Products of other shapes, which some CPUs round in another way.
    assert [*map(float, found)] == pytest.approx([*map(float, stock)], rel=1e-6)


def test_the_example_config_is_one_that_deepspeed_accepts() -> None:
    from deepspeed.module_inject.auto_ep_config import parse_autoep_config, validate_autoep_config

    config = json.loads((ROOT / "examples" / "deepspeed" / "zero3_expert_parallel.json").read_text())
    section = parse_autoep_config(config["expert_parallel"])
    validate_autoep_config(section, world_size=8, pp_size=1, tp_size=1, sp_size=1)
    assert section.enabled and section.autoep_size == 2
