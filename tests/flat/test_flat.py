"""Stages 1 and 2 of DeepSpeed start without a second copy of what they train, and train as ever."""

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import transformers
from torch import nn

from hf_zero_stream.plugins.flat import flatten
from tests.support.cluster import run_ranks
from tests.support.messages import warnings_of
from tests.support.parity import ds_config, three_losses
from tests.support.zoo import ZOO, Checkpoint


NAME = "qwen3_moe"
BF16, FP32 = torch.bfloat16, torch.float32


def load(folder: Path, dtype: torch.dtype, frozen: Sequence[str] = ()) -> nn.Module:
    """The model by stock; parameters with a name that contains one of `frozen` are frozen."""
    model = getattr(transformers, f"{ZOO[NAME].auto_class}").from_pretrained(folder, dtype=dtype)
    for name, param in model.named_parameters():
        param.requires_grad_(not any(part in name for part in frozen))
    return model


def start(model: nn.Module, config: dict[str, Any], groups: bool = False) -> Any:
    """An engine, over one group of all parameters, or over two with and without weight decay."""
    if not groups:
        return deepspeed.initialize(model=model, config=config)[0]
    decayed = [param for param in model.parameters() if param.ndim > 1]
    others = [param for param in model.parameters() if param.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-3
    )
    config = {key: value for key, value in config.items() if key != "optimizer"}
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def flat_state(engine: Any) -> list[torch.Tensor]:
    """DeepSpeed's flat buffers and the masters that it made of them."""
    optimizer = engine.optimizer
    return [*(flat.clone() for flat in optimizer.bit16_groups_flat), *optimizer.single_partition_of_fp32_groups]


def same_bits(mine: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> bool:
    """Whether two lists of tensors are equal."""
    return len(mine) == len(theirs) and all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def stock_and_together(
    folder: Path, dtype: torch.dtype, zero: dict[str, Any], groups: bool, frozen: Sequence[str], free: Sequence[int]
) -> dict[str, Any]:
    """`free` is each rank's free memory in bytes."""
    config = ds_config(dtype, **zero)
    stock = start(load(folder, dtype, frozen), config, groups)
    stock_state = [tensor.detach().clone() for tensor in flat_state(stock)]
    stock_losses = three_losses(stock, ZOO[NAME].inputs)

    model = load(folder, dtype, frozen)
    flatten.flatten_sharded(model)
    if free:
        flatten.free_device_bytes = lambda: free[torch.distributed.get_rank()]  # type: ignore[assignment]
    held: list[float] = []
    all_gather, total = flatten.all_gather, sum(param.nbytes for param in model.parameters() if param.requires_grad)

    def noted(buffer: torch.Tensor, part: torch.Tensor, **kwargs: Any) -> Any:
        storages = [param.untyped_storage() for param in model.parameters() if param.requires_grad]
        old = {storage.data_ptr(): storage.nbytes() for storage in storages}
        held.append((sum(old.values()) + part.nbytes + buffer.nbytes) / total)
        return all_gather(buffer, part, **kwargs)

    flatten.all_gather = noted
    with warnings_of("hf_zero_stream") as said:
        engine = start(model, config, groups)
    pointers = {flat.untyped_storage().data_ptr() for flat in engine.optimizer.bit16_groups_flat}
    return {
        "held": held,
        "said": said,
        "views": all((p.untyped_storage().data_ptr() in pointers) == p.requires_grad for p in model.parameters()),
        "same_state": same_bits(flat_state(engine), stock_state),
        "losses": three_losses(engine, ZOO[NAME].inputs),
        "stock_losses": stock_losses,
    }


def check(found: list[dict[str, Any]], most: float, groups: int = 1) -> None:
    """`most`: memory of parameters at any time, in sizes of them."""
    for rank in found:
        assert len(rank["held"]) == groups and max(rank["held"], default=0) <= most
        assert rank["views"] and rank["same_state"]
        assert rank["losses"] == rank["stock_losses"]
    assert len(set(found[0]["losses"])) == 3, "three steps must change the loss"


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("world_size", [2, 3])
def test_equals_stock(
    cluster: None, zoo_checkpoint: Checkpoint, stage: int, dtype: torch.dtype, world_size: int
) -> None:
    folder = zoo_checkpoint(NAME, dtype)
    found = run_ranks(world_size, stock_and_together, folder, dtype, {"stage": stage}, False, (), ())
    check(found, 1.05 + 1 / world_size)


@pytest.mark.parametrize(
    ("zero", "groups", "frozen"),
    [
        ({"stage": 1, "round_robin_gradients": True}, False, ()),
        ({"stage": 2, "round_robin_gradients": True}, True, ()),
        ({"stage": 2, "parameter_alignment": True}, False, ()),
        ({"stage": 2, "parameter_alignment": True, "round_robin_gradients": True}, True, ()),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, False, ()),
        ({"stage": 2}, True, ("q_proj",)),
    ],
    ids=["round_robin_1", "round_robin_2", "alignment", "alignment_round_robin", "offload", "frozen"],
)
@pytest.mark.sample(2)
def test_equals_stock_with(
    cluster: None, zoo_checkpoint: Checkpoint, zero: dict[str, Any], groups: bool, frozen: Sequence[str]
) -> None:
    found = run_ranks(3, stock_and_together, zoo_checkpoint(NAME, BF16), BF16, zero, groups, frozen, ())
    check(found, 1.05 + 1 / 3, 1 + groups)


def test_no_room_on_one_rank(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    """Then all leave it to DeepSpeed, and rank 0 says so."""
    folder = zoo_checkpoint(NAME, BF16)
    found = run_ranks(2, stock_and_together, folder, BF16, {"stage": 2}, False, (), (2**40, 0))
    check(found, 0, groups=0)
    (said,) = found[0]["said"]
    assert "because the device has no room" in said and found[1]["said"] == []


def mixed_dtypes(folder: Path) -> dict[str, Any]:
    config, losses = ds_config(FP32, stage=1), {}
    for how in ("stock", "ours"):
        model = load(folder, FP32)
        model.get_output_embeddings().to(BF16)
        if how == "ours":
            flatten.flatten_sharded(model)
        with warnings_of("hf_zero_stream") as said:
            engine = start(model, config)
        losses[how] = three_losses(engine, ZOO[NAME].inputs)
    return {"losses": losses, "said": said}


def test_mixed_dtypes(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    first, second = run_ranks(2, mixed_dtypes, zoo_checkpoint(NAME))
    assert first["losses"]["ours"] == first["losses"]["stock"]
    (said,) = first["said"]
    assert "group 0 has parameters of torch.bfloat16 and torch.float32" in said and second["said"] == []


def others_beside(folder: Path) -> dict[str, bool]:
    """A model of somebody else is started while one of ours waits; then ours twice."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    original, config, calls = vars(DeepSpeedZeroOptimizer)["__init__"], ds_config(BF16, stage=2), 0
    all_gather = flatten.all_gather

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return all_gather(*args, **kwargs)

    flatten.all_gather = counted
    ours = load(folder, BF16)
    flatten.flatten_sharded(ours)
    found = {"installed": vars(DeepSpeedZeroOptimizer)["__init__"] is not original}
    del ours
    gc.collect()
    found["removed"] = vars(DeepSpeedZeroOptimizer)["__init__"] is original
    ours = load(folder, BF16)
    flatten.flatten_sharded(ours)
    start(load(folder, BF16), config)
    found["others"] = calls == 0
    losses = three_losses(start(ours, config), ZOO[NAME].inputs)
    found["ours"] = calls == 1 and len(set(losses)) == 3
    start(ours, config)
    found["again"] = calls == 2
    return found


def test_others_are_left_alone(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    for rank in run_ranks(2, others_beside, zoo_checkpoint(NAME, BF16)):
        assert all(rank.values()), rank
