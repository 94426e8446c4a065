"""Saves of partitioned models, and going on from them.

- What we save of a partitioned model is, byte for byte, what transformers saves of the whole one.
- Going on from what was saved: by us at another number of ranks, and by DeepSpeed as ever.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

import hf_zero_stream
from benchmarks.moe_checkpoint import make_moe_checkpoint
from tests import sampling
from tests.support.cluster import run_ranks
from tests.support.parity import ds_config, load_with, three_losses
from tests.support.saving import different, save_loaded, save_stock, save_trained, saves_with
from tests.support.trainers import by_deepspeed
from tests.support.zoo import ZOO, Checkpoint


BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(scope="module")
def stock(zoo_checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What transformers saves of every model of the zoo."""
    folder = tmp_path_factory.mktemp("stock")
    for name in ZOO:
        save_stock(name, zoo_checkpoint(name, BF16), folder / name, BF16)
    return folder


@pytest.mark.plugin("verify")
@pytest.mark.parametrize(
    ("world_size", "write_from"),
    [
        (2, "all"),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in [(1, "all"), (3, "all"), (4, "all"), (3, "rank0")]),
    ],
)
def test_every_architecture(
    cluster: None, zoo_checkpoint: Checkpoint, stock: Path, tmp_path: Path, world_size: int, write_from: str
) -> None:
    checkpoints = [zoo_checkpoint(name, BF16) for name in ZOO]
    found = run_ranks(world_size, save_with, list(ZOO), checkpoints, tmp_path, {}, {"write_from": write_from})
    assert all(found[0] == reports for reports in found)
    for name, report in zip(ZOO, found[0], strict=True):
        assert different(tmp_path / name, stock / name) == [], name
        assert report["materialised"] == {}
        written = [rank["bytes_written"] for rank in report["ranks"]]
        if write_from == "rank0":
            assert written[1:] == [0] * (world_size - 1)
        else:
            assert max(written) <= 1.1 * sum(written) / world_size, "every rank should write its share"


@pytest.mark.plugin("verify")
@pytest.mark.slow
def test_in_another_dtype(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Tied weights stay tied when they are cast."""
    checkpoints = [zoo_checkpoint(name, BF16) for name in ZOO]
    for name, checkpoint in zip(ZOO, checkpoints, strict=True):
        save_stock(name, checkpoint, tmp_path / "stock" / name, BF16, cast=FP32)
    run_ranks(2, save_with, list(ZOO), checkpoints, tmp_path / "ours", {"dtype": FP32})
    for name in ZOO:
        assert different(tmp_path / "ours" / name, tmp_path / "stock" / name) == [], name


def save_with(
    names: list[str],
    checkpoints: list[Path],
    folder: Path,
    kwargs: dict[str, Any],
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    # Chunks of a few elements, so that there are many of them.
    with saves_with(chunk_bytes=4096, verify="full", **settings):
        return save_loaded(names, checkpoints, folder, ds_config(BF16), **kwargs)


def without_zero(names: list[str], checkpoints: list[Path], folder: Path) -> Any:
    """Without DeepSpeed every rank has everything, and writes its share."""
    reports = []
    for name, checkpoint in zip(names, checkpoints, strict=True):
        model = getattr(transformers, ZOO[name].auto_class).from_pretrained(checkpoint, dtype=BF16)
        with saves_with(chunk_bytes=4096):
            report = hf_zero_stream.save_pretrained(model, folder / name, max_shard_size="40KB")
        reports.append([rank.bytes_written for rank in report.ranks])
    return reports


@pytest.mark.parametrize("world_size", [1, 3])
def test_replicas(cluster: None, zoo_checkpoint: Checkpoint, stock: Path, tmp_path: Path, world_size: int) -> None:
    names = ["qwen3_moe", "qwen3_vl_moe", "t5"]
    checkpoints = [zoo_checkpoint(name, BF16) for name in names]
    for written in run_ranks(world_size, without_zero, names, checkpoints, tmp_path)[0]:
        assert max(written) <= 1.2 * sum(written) / world_size
    for name in names:
        assert different(tmp_path / name, stock / name) == [], name


def freeze_half(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_("layers.1" in name or "lm_head" in name)


OFFLOAD = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "zero", "prepare"),
    [
        (2, {}, None),
        (3, OFFLOAD, freeze_half),
        (4, {"zero_hpz_partition_size": 2}, None),
        (3, {"stage": 2}, None),
        # With round_robin_gradients DeepSpeed's own function gives the values of other parameters: see
        # tests/loading/test_live_optimizers.py.
        (2, {"stage": 1}, freeze_half),
        (2, {"stage": 0}, None),
    ],
    ids=["zero3", "offload_frozen", "hpz", "stage2", "stage1_frozen", "stage0"],
)
def test_after_training(
    cluster: None,
    zoo_checkpoint: Checkpoint,
    tmp_path: Path,
    world_size: int,
    zero: dict[str, Any],
    prepare: Callable[[nn.Module], None] | None,
) -> None:
    dtypes = [None, FP32] if zero.get("stage", 3) else [None]
    checkpoint = zoo_checkpoint("qwen3_moe", BF16)
    found = run_ranks(world_size, save_trained, checkpoint, tmp_path, ds_config(BF16, **zero), prepare, dtypes)
    assert len(set(found[0]["losses"])) == 3, "three steps must change the loss"
    for dtype in dtypes:
        assert different(tmp_path / f"ours {dtype}", tmp_path / f"stock {dtype}") == []


@pytest.mark.plugin("nvme")
@pytest.mark.slow
@pytest.mark.usefixtures("async_io")
def test_from_swap_files(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    checkpoint = make_moe_checkpoint(tmp_path / "moe", 4e7, num_layers=4, num_experts=32)
    offload = {"offload_param": {"device": "nvme", "nvme_path": str(tmp_path / "swap"), "buffer_size": 2**23}}
    found = run_ranks(2, save_swapped, checkpoint, tmp_path, ds_config(BF16, **offload))
    assert found[0] >= 8, "the fused experts should be in swap files"
    assert different(tmp_path / "ours", tmp_path / "stock") == []


def save_swapped(checkpoint: Path, folder: Path, config: dict[str, Any]) -> int:
    if dist.get_rank() == 0:
        plain = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=BF16)
        plain.save_pretrained(folder / "stock", max_shard_size="20MB")
    model = hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(checkpoint, ds_config=config)
    hf_zero_stream.save_pretrained(model, folder / "ours", max_shard_size="20MB")
    return sum(param.ds_tensor.final_location == "nvme" for param in model.parameters())


def save_trained_from_swap_files(checkpoint: Path, folder: Path, config: dict[str, Any]) -> list[str]:
    """Names of parameters that are not saved as DeepSpeed itself gives them, in 16 bit and in fp32."""
    from deepspeed.utils import safe_get_full_fp32_param

    model = hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(checkpoint, ds_config=config)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    three_losses(engine, inputs)
    with saves_with(verify="full"):
        hf_zero_stream.save_pretrained(engine, folder / "bf16", save_original_format=False)
    hf_zero_stream.save_pretrained(engine, folder / "fp32", save_original_format=False, dtype=FP32)
    saved = {dtype: load_file(folder / dtype / "model.safetensors") for dtype in ("bf16", "fp32")}
    found = []
    for name, param in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([param]):
            if not torch.equal(param.data, saved["bf16"][name]):
                found.append(f"{name} in 16 bit")
        if not torch.equal(safe_get_full_fp32_param(param), saved["fp32"][name]):
            found.append(f"{name} in fp32")
    return found


def inputs() -> dict[str, torch.Tensor]:
    ids = torch.arange(32).view(2, 16) * 37 % 1000
    return {"input_ids": ids, "labels": ids}


@pytest.mark.plugin("nvme")
@pytest.mark.slow
@pytest.mark.usefixtures("async_io")
def test_from_swap_files_after_training(cluster: None, tmp_path: Path) -> None:
    checkpoint = make_moe_checkpoint(tmp_path / "moe", 4e7, num_layers=4, num_experts=32)
    nvme = {"device": "nvme", "nvme_path": str(tmp_path / "swap"), "buffer_size": 2**23}
    zero = {"offload_param": nvme, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path / "swap")}}
    found = run_ranks(2, save_trained_from_swap_files, checkpoint, tmp_path, ds_config(BF16, **zero))
    assert found == [[], []]


NAME = "qwen3_moe"
CAUSAL = "AutoModelForCausalLM"


def engine_of(how: str, checkpoint: Path, config: dict[str, Any]) -> Any:
    engine, *_ = deepspeed.initialize(model=load_with(how, CAUSAL, checkpoint, config, {}), config=config)
    return engine


def train_and_save(checkpoint: Path, folder: Path, config: dict[str, Any], dtype: torch.dtype | None) -> list[float]:
    engine = engine_of("streamed", checkpoint, config)
    losses = three_losses(engine, ZOO[NAME].inputs)
    hf_zero_stream.save_pretrained(engine, folder, dtype=dtype)
    return losses


def go_on(how: str, checkpoint: Path, saved: Path, config: dict[str, Any]) -> list[float]:
    if how == "load_into":
        engine = engine_of("streamed", checkpoint, config)
        hf_zero_stream.load_into(engine, saved)
    else:
        engine = engine_of(how, saved, config)
    return three_losses(engine, ZOO[NAME].inputs)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [None, torch.float32], ids=["16_bit", "fp32_masters"])
def test_at_another_world_size(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, dtype: torch.dtype | None
) -> None:
    config = ds_config(torch.bfloat16)
    checkpoint = zoo_checkpoint(NAME, torch.bfloat16)
    first = run_ranks(2, train_and_save, checkpoint, tmp_path / "saved", config, dtype)[0]
    # As in the zoo: grouped matrix products want rows of a multiple of 16 bytes.
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    (tmp_path / "saved" / "config.json").write_text(json.dumps({**saved, "experts_implementation": "eager"}))
    stock = run_ranks(3, go_on, "stock", checkpoint, tmp_path / "saved", config)[0]
    assert run_ranks(3, go_on, "streamed", checkpoint, tmp_path / "saved", config)[0] == stock
    if dtype is None and not sampling.is_sample:
        assert run_ranks(3, go_on, "load_into", checkpoint, tmp_path / "saved", config)[0] == stock
    assert stock[0] < first[0], "it should go on, and not begin again"


def masters_survive(checkpoint: Path, folder: Path, config: dict[str, Any]) -> list[str]:
    """Saved in fp32 and loaded into a new engine, masters are what they were, to the last bit."""
    from deepspeed.utils import safe_get_full_fp32_param

    engine = engine_of("streamed", checkpoint, config)
    three_losses(engine, ZOO[NAME].inputs)
    trained = {name: safe_get_full_fp32_param(param).clone() for name, param in engine.module.named_parameters()}
    hf_zero_stream.save_pretrained(engine, folder, dtype=torch.float32)
    again = engine_of("streamed", checkpoint, config)
    hf_zero_stream.load_into(again, folder)
    return [
        name
        for name, param in again.module.named_parameters()
        if not torch.equal(safe_get_full_fp32_param(param), trained[name])
    ]


def test_masters(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    checkpoint = zoo_checkpoint(NAME, torch.bfloat16)
    assert run_ranks(2, masters_survive, checkpoint, tmp_path / "saved", ds_config(torch.bfloat16)) == [[], []]


def deepspeeds_own(checkpoint: Path, folder: Path, config: dict[str, Any]) -> dict[str, list[float]]:
    """DeepSpeed's checkpoint of a streamed model, through accelerate, into another one."""
    accelerator = by_deepspeed(config)
    engine = accelerator.prepare(load_with("streamed", CAUSAL, checkpoint, config, {}))
    three_losses(engine, ZOO[NAME].inputs)
    accelerator.save_state(str(folder))
    uninterrupted = three_losses(engine, ZOO[NAME].inputs)
    accelerator.load_state(str(folder))
    return {"uninterrupted": uninterrupted, "resumed": three_losses(engine, ZOO[NAME].inputs)}


def test_deepspeeds_own_checkpoints(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    config = {**ds_config(torch.bfloat16), "gradient_accumulation_steps": 1}
    for found in run_ranks(2, deepspeeds_own, zoo_checkpoint(NAME, torch.bfloat16), tmp_path / "state", config):
        assert found["resumed"] == found["uninterrupted"]
        assert len(set(found["resumed"])) == 3
