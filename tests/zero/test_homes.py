"""Partitions in host memory, with hpZ, frozen, and of mixed dtypes: values are plain loading's, losses stock's, to the
last bit. The table of all homes is docs/support.md.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import peft
import pytest
import torch
from torch import nn

from hf_zero_stream.destinations.deepspeed import zero3
from tests.support.checkpoint_files import rewritten, tensors_of
from tests.support.cluster import run_ranks
from tests.support.homes import CAUSAL, HPZ, OFFLOAD, Prepare, assert_trains_as_stock, train
from tests.support.loading import load_with
from tests.support.parity import differences, ds_config, three_losses
from tests.support.zoo import ZOO, Checkpoint


# ------------------------------------------------------------------------------------------------------- host memory


@pytest.mark.sample(1)
@pytest.mark.parametrize("world_size", [2, 3])
def test_offload_to_pinned_memory(cluster: None, zoo_checkpoint: Checkpoint, world_size: int) -> None:
    folder = zoo_checkpoint("qwen3_moe", torch.bfloat16)
    assert_trains_as_stock(world_size, folder, ds_config(torch.bfloat16, **OFFLOAD))


def pinned_partitions(folder: Path, pin_memory: bool) -> dict[str, Any]:
    """How many partitions lie in memory that was made pinned, as for a GPU."""
    memory: dict[int, torch.Tensor] = {}
    empty = torch.empty

    def made(*sizes: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        tensor = empty(*sizes, **options)
        if pin_memory:
            memory[tensor.data_ptr()] = tensor
        return tensor

    torch.empty = made  # type: ignore[assignment]
    zero3.accelerators = SimpleNamespace(kind=lambda: "cuda")  # type: ignore[assignment]
    config = ds_config(offload_param={"device": "cpu", "pin_memory": pin_memory})
    plain = load_with("plain", CAUSAL, folder, {}, {})
    model = load_with("streamed", CAUSAL, folder, config, {})
    partitions = [param.ds_tensor for param in model.parameters()]
    return {
        "all": len(partitions),
        "pinned": sum(partition.data_ptr() in memory for partition in partitions),
        "differences": differences(model, plain, torch.float32),
    }


@pytest.mark.parametrize("pin_memory", [True, False], ids=["pinned", "pageable"])
def test_pinned_memory_is_filled_in_place(cluster: None, zoo_checkpoint: Checkpoint, pin_memory: bool) -> None:
    for found in run_ranks(2, pinned_partitions, zoo_checkpoint("llama"), pin_memory):
        assert found["differences"] == []
        assert found["pinned"] == (found["all"] if pin_memory else 0)


# --------------------------------------------------------------------------------------------------------------- hpZ


@pytest.mark.sample(1)
@pytest.mark.parametrize(("world_size", "size"), [pytest.param(4, 2, marks=pytest.mark.slow), (3, 3), (2, 8)])
def test_hpz(cluster: None, zoo_checkpoint: Checkpoint, world_size: int, size: int) -> None:
    """Each rank reads 1/N of the checkpoint; DeepSpeed makes the second copies at the first gather."""
    folder = zoo_checkpoint("qwen3_moe", torch.bfloat16)
    config = ds_config(torch.bfloat16, zero_hpz_partition_size=size)
    streamed = assert_trains_as_stock(world_size, folder, config)
    assert [rank["second copies"] for rank in streamed] == [0] * world_size
    stored = sum(value.nbytes for value in tensors_of(folder).values())
    assert sum(rank["bytes needed"] for rank in streamed) == stored


def initialised_under(folder: Path, zero: dict[str, Any]) -> list[str]:
    plain = load_with("plain", CAUSAL, folder, {}, {})
    return differences(load_with("streamed", CAUSAL, folder, ds_config(**zero), {}), plain, torch.float32)


@pytest.mark.parametrize(("world_size", "zero"), [(4, HPZ), (2, OFFLOAD)], ids=["hpz", "offload"])
def test_missing_keys(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, world_size: int, zero: dict[str, Any]
) -> None:
    """Initialisation gathers what it writes, and writes it back to where it lives."""
    lost = ("lm_head.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight")
    rewritten(zoo_checkpoint("llama"), tmp_path, lambda tensors: [tensors.pop(name) for name in lost])
    assert run_ranks(world_size, initialised_under, tmp_path, zero) == [[]] * world_size


# ------------------------------------------------------------------------------------------- frozen and mixed dtypes


def freeze_half(model: nn.Module) -> nn.Module:
    for name, param in model.named_parameters():
        param.requires_grad_("layers.1" in name or "lm_head" in name)
    return model


def add_lora(model: nn.Module) -> nn.Module:
    """Factors in fp32 on a base in bf16: PEFT's default."""
    lora = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(model, lora)
    dtypes = {param.requires_grad: param.dtype for param in model.parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    return model


@pytest.mark.sample(1)
@pytest.mark.parametrize("prepare", [freeze_half, add_lora])
@pytest.mark.parametrize(
    ("world_size", "zero"), [(3, OFFLOAD), pytest.param(4, HPZ, marks=pytest.mark.slow)], ids=["offload", "hpz"]
)
def test_frozen(
    cluster: None, zoo_checkpoint: Checkpoint, world_size: int, zero: dict[str, Any], prepare: Prepare
) -> None:
    folder = zoo_checkpoint("qwen3_moe", torch.bfloat16)
    assert_trains_as_stock(world_size, folder, ds_config(torch.bfloat16, **zero), prepare)


def frozen_partitions(folder: Path) -> list[bool]:
    """For each frozen parameter, whether its partition is the memory that was loaded into, after training too."""
    config = ds_config(**OFFLOAD)
    model = freeze_half(load_with("streamed", CAUSAL, folder, config, {}))
    before = {name: (param.ds_tensor.data_ptr(), param.ds_tensor.clone()) for name, param in model.named_parameters()}
    trained = [param for param in model.parameters() if param.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=trained)
    three_losses(engine, ZOO["llama"].inputs)
    return [
        param.ds_tensor.data_ptr() == before[name][0] and torch.equal(param.ds_tensor, before[name][1])
        for name, param in model.named_parameters()
        if not param.requires_grad
    ]


def test_frozen_partitions_stay(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    for stayed in run_ranks(2, frozen_partitions, zoo_checkpoint("llama")):
        assert len(stayed) > 5 and all(stayed)


@pytest.mark.slow
def test_torch_autocast(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    """Mixed dtypes: partitions in fp32, of which those of linear layers are gathered in bf16."""
    config = {**ds_config(), "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    mixed = assert_trains_as_stock(2, zoo_checkpoint("llama"), config)
    exact = run_ranks(2, train, "streamed", zoo_checkpoint("llama"), ds_config())
    assert mixed[0]["losses"] != exact[0]["losses"]
