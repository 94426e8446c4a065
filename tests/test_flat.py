"""Parameters laid out in one flat buffer: DeepSpeed's stages 1 and 2 take it as it is, and train as ever."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from hf_zero_stream.destinations.deepspeed.flat import flatten_hook
from hf_zero_stream.destinations.deepspeed.flat.layout import WAITING, FlatLayout
from hf_zero_stream.destinations.deepspeed.flat.replicas import allocate_flat, separate_reason
from tests.cluster import run_ranks
from tests.parity import ds_config, three_losses
from tests.zoo import ZOO


NAME = "qwen3_moe"
BF16, FP32 = torch.bfloat16, torch.float32


def load(folder: Path, dtype: torch.dtype, frozen: Sequence[str] = ()) -> nn.Module:
    """The model with storages of its own; parameters with a name that contains one of `frozen` are frozen."""
    model = getattr(transformers, f"{ZOO[NAME].auto_class}").from_pretrained(folder, dtype=dtype)
    for name, param in model.named_parameters():
        param.requires_grad_(not any(part in name for part in frozen))
    return model


def move_into_flat(model: nn.Module, config: dict[str, Any]) -> torch.Tensor:
    """What a loader does: ask for storage, fill it, make it the parameters'. The flat buffer."""
    tensors = allocate_flat(model.parameters(), config, dist.get_world_size(), "cpu")
    known = next(found for found in map(WAITING.find, tensors.values()) if found is not None)
    buffer = known.tensor()
    assert buffer is not None
    buffer.fill_(float("nan"))  # what a loader leaves in the padding must not survive
    for param in model.parameters():
        if id(param) in tensors:
            param.data = tensors[id(param)].copy_(param.data)
    return buffer


def start(model: nn.Module, config: dict[str, Any], groups: bool = False) -> Any:
    """An engine, over one group of all parameters, or over two with and without weight decay."""
    import deepspeed

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


def stock_and_recognised(folder: Path, dtype: torch.dtype, zero: dict[str, Any]) -> dict[str, Any]:
    config = ds_config(dtype, **zero)
    stock = start(load(folder, dtype), config)
    stock_state = [tensor.detach().clone() for tensor in flat_state(stock)]
    stock_losses = three_losses(stock, ZOO[NAME].inputs)

    model = load(folder, dtype)
    buffer = move_into_flat(model, config)
    known = WAITING.find(buffer)
    assert known is not None
    layout = known.layout
    engine = start(model, config)
    taken = engine.optimizer.bit16_groups_flat
    places = sorted(
        ((param.data_ptr() - buffer.data_ptr()) // buffer.element_size(), param.numel())
        for param in model.parameters()
    )
    return {
        "how": engine.optimizer.hf_zero_stream_flatten,
        "same_buffer": len(taken) == 1 and taken[0].data_ptr() == buffer.data_ptr(),
        "same_numel": taken[0].numel() == layout.numel,
        "padding": layout.numel - sum(param.numel() for param in model.parameters()),
        "places": places == list(layout.places),
        "same_state": same_bits(flat_state(engine), stock_state),
        "losses": three_losses(engine, ZOO[NAME].inputs),
        "stock_losses": stock_losses,
        "still_same_buffer": all(
            param.untyped_storage().data_ptr() == buffer.data_ptr() for param in model.parameters()
        ),
        "waiting": len(WAITING.alive()),
    }


def check_recognised(found: list[dict[str, Any]]) -> None:
    for rank in found:
        for fact in ("same_buffer", "same_numel", "places", "same_state", "still_same_buffer"):
            assert rank[fact], fact
        assert rank["how"] == "recognised"
        assert rank["losses"] == rank["stock_losses"]
        assert rank["waiting"] == 0
    assert len(set(found[0]["losses"])) == 3, "three steps must change the loss"


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("world_size", [2, 3])
def test_recognised(
    cluster: None, zoo_checkpoint: Callable[..., Path], stage: int, dtype: torch.dtype, world_size: int
) -> None:
    folder = zoo_checkpoint(NAME, dtype)
    check_recognised(run_ranks(world_size, stock_and_recognised, folder, dtype, {"stage": stage}))


@pytest.mark.parametrize(
    "zero",
    [
        {"stage": 1, "round_robin_gradients": True},
        {"stage": 2, "round_robin_gradients": True},
        {"stage": 2, "parameter_alignment": True},
        {"stage": 2, "parameter_alignment": True, "round_robin_gradients": True},
        {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    ],
    ids=["round_robin_1", "round_robin_2", "alignment", "alignment_round_robin", "offload"],
)
@pytest.mark.sample(3)
def test_recognised_with(cluster: None, zoo_checkpoint: Callable[..., Path], zero: dict[str, Any]) -> None:
    found = run_ranks(3, stock_and_recognised, zoo_checkpoint(NAME, BF16), BF16, zero)
    check_recognised(found)
    assert found[0]["padding"] > (3 * 2 if "parameter_alignment" in zero else 0)


def test_some_models_need_padding_at_the_end(cluster: None, zoo_checkpoint: Callable[..., Path]) -> None:
    """Otherwise the tests above would say nothing about it."""
    found = [run_ranks(world, padding_of, zoo_checkpoint(NAME, BF16))[0] for world in (2, 3)]
    assert any(found)


def padding_of(folder: Path) -> int:
    model = load(folder, BF16)
    numels = [param.numel() for param in model.parameters()]
    return FlatLayout.of_group(numels, 2, dist.get_world_size(), parameter_alignment=False).numel - sum(numels)


def stock_and_moved(
    folder: Path,
    zero: dict[str, Any],
    free: Sequence[float],
    groups: bool,
    frozen: Sequence[str],
    frozen_later: Sequence[str],
) -> dict[str, Any]:
    """An optimizer that wants another layout; `free` is each rank's free memory in sizes of the flat buffer."""
    config = ds_config(BF16, **zero)
    stock = start(load(folder, BF16, [*frozen, *frozen_later]), config, groups)
    stock_state = [tensor.detach().clone() for tensor in flat_state(stock)]
    stock_losses = three_losses(stock, ZOO[NAME].inputs)

    model = load(folder, BF16, frozen)
    buffer = move_into_flat(model, config)
    for name, param in model.named_parameters():
        param.requires_grad_(not any(part in name for part in (*frozen, *frozen_later)))
    nbytes, alive = buffer.nbytes, StorageWeakRef(buffer.untyped_storage())
    del buffer
    flatten_hook.free_device_bytes = lambda: int(free[dist.get_rank()] * nbytes)  # type: ignore[assignment]
    engine = start(model, config, groups)
    pointers = {flat.untyped_storage().data_ptr() for flat in engine.optimizer.bit16_groups_flat}
    return {
        "how": engine.optimizer.hf_zero_stream_flatten,
        "freed": _expires(alive),
        "views": all(
            (param.untyped_storage().data_ptr() in pointers) == param.requires_grad for param in model.parameters()
        ),
        "same_state": same_bits(flat_state(engine), stock_state),
        "losses": three_losses(engine, ZOO[NAME].inputs),
        "stock_losses": stock_losses,
        "waiting": len(WAITING.alive()),
    }


def _expires(storage: StorageWeakRef) -> bool:
    """Whether nothing holds it; gloo's thread may hold what it sent last for a moment longer."""
    deadline = time.monotonic() + 20
    while not storage.expired() and time.monotonic() < deadline:
        time.sleep(0.01)
    return storage.expired()


def check_moved(found: list[dict[str, Any]], how: Sequence[str]) -> None:
    assert [rank["how"] for rank in found] == list(how)
    for rank in found:
        assert rank["views"] and rank["same_state"]
        assert rank["losses"] == rank["stock_losses"]
        assert rank["waiting"] == 0


@pytest.mark.parametrize(
    ("free", "how"),
    [
        ((2.0, 2.0), ("device", "device")),
        ((0.7, 0.7), ("distributed", "distributed")),
        ((2.0, 0.7), ("distributed", "distributed")),
        ((0.0, 0.0), ("host", "host")),
        ((2.0, 0.0), ("device", "host")),
    ],
    ids=["room", "room_for_a_part", "ranks_differ", "no_room", "one_rank_has_no_room"],
)
@pytest.mark.sample(3)
def test_other_groups_are_moved(
    cluster: None, zoo_checkpoint: Callable[..., Path], free: Sequence[float], how: Sequence[str]
) -> None:
    found = run_ranks(2, stock_and_moved, zoo_checkpoint(NAME, BF16), {"stage": 2}, free, True, (), ())
    check_moved(found, how)
    assert all(rank["freed"] for rank in found)


def test_other_groups_distributed_over_three_ranks(cluster: None, zoo_checkpoint: Callable[..., Path]) -> None:
    zero = {"stage": 1, "round_robin_gradients": True}
    found = run_ranks(3, stock_and_moved, zoo_checkpoint(NAME, BF16), zero, (0.5,) * 3, True, (), ())
    check_moved(found, ["distributed"] * 3)
    assert all(rank["freed"] for rank in found)


@pytest.mark.parametrize(("free", "how"), [(2.0, "device"), (0.8, "distributed"), (0.0, "host")])
def test_frozen_after_loading(cluster: None, zoo_checkpoint: Callable[..., Path], free: float, how: str) -> None:
    """A few parameters that were frozen later do not keep the buffer alive that the others have left."""
    found = run_ranks(
        2, stock_and_moved, zoo_checkpoint(NAME, BF16), {"stage": 2}, (free,) * 2, False, (), ("q_proj",)
    )
    check_moved(found, [how] * 2)
    assert all(rank["freed"] for rank in found)


def test_nearly_all_frozen_after_loading(cluster: None, zoo_checkpoint: Callable[..., Path]) -> None:
    """Only the norms are trained: they leave the buffer, and the rest is not copied for their sake."""
    frozen = ("proj", "embed", "lm_head", "gate", "experts")
    found = run_ranks(2, stock_and_moved, zoo_checkpoint(NAME, BF16), {"stage": 2}, (0.5,) * 2, False, (), frozen)
    check_moved(found, ["device"] * 2)
    assert not any(rank["freed"] for rank in found)


def test_frozen_before_loading_is_not_in_the_buffer(cluster: None, zoo_checkpoint: Callable[..., Path]) -> None:
    folder = zoo_checkpoint(NAME, BF16)
    found = run_ranks(2, stock_and_moved, folder, {"stage": 2}, (0.0,) * 2, False, ("embed",), ())
    check_moved(found, ["recognised"] * 2)


def others_beside(folder: Path) -> dict[str, Any]:
    """A model of somebody else is started while one of ours waits; then ours twice."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    original = vars(DeepSpeedZeroOptimizer)["__init__"]
    config = ds_config(BF16, stage=2)
    alone = three_losses(start(load(folder, BF16), config), ZOO[NAME].inputs)
    ours = load(folder, BF16)
    buffer = move_into_flat(ours, config)
    installed = vars(DeepSpeedZeroOptimizer)["__init__"] is not original
    beside = start(load(folder, BF16), config)
    first = start(ours, config)
    removed = vars(DeepSpeedZeroOptimizer)["__init__"] is original
    second = start(ours, config)
    return {
        "installed": installed,
        "removed": removed,
        "untouched": not hasattr(beside.optimizer, "hf_zero_stream_flatten"),
        "losses": three_losses(beside, ZOO[NAME].inputs) == alone,
        "first": first.optimizer.bit16_groups_flat[0].data_ptr() == buffer.data_ptr(),
        "second": second.optimizer.bit16_groups_flat[0].data_ptr() != buffer.data_ptr(),
    }


def test_others_are_left_alone(cluster: None, zoo_checkpoint: Callable[..., Path]) -> None:
    for rank in run_ranks(2, others_beside, zoo_checkpoint(NAME, BF16)):
        assert all(rank.values()), rank


def save_both(folder: Path, target: Path) -> None:
    plain, ours = load(folder, BF16), load(folder, BF16)
    plain.save_pretrained(target / "plain")
    move_into_flat(ours, ds_config(BF16, stage=2))
    ours.save_pretrained(target / "ours")


def test_saves_as_ever_before_the_engine(cluster: None, zoo_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    run_ranks(1, save_both, zoo_checkpoint(NAME, BF16), tmp_path)
    plain, ours = (load_file(tmp_path / arm / "model.safetensors") for arm in ("plain", "ours"))
    assert plain.keys() == ours.keys()
    assert all(torch.equal(plain[name], ours[name]) for name in plain)


@pytest.mark.parametrize(
    ("config", "dtypes", "part"),
    [
        ({"zero_optimization": {"stage": 3}}, [BF16], "stage 3"),
        ({}, [BF16], "stage 0"),
        ({"zero_optimization": {"stage": 2}}, [], "no trainable"),
        ({"zero_optimization": {"stage": 2}}, [BF16, FP32], "several dtypes"),
        ({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}, [FP32], "casts"),
        ({"zero_optimization": {"stage": 2}, "tensor_parallel": {"autotp_size": 2}}, [FP32], "AutoTP"),
        ({"zero_optimization": {"stage": 2}, "expert_parallel": {"enabled": True}}, [FP32], "AutoEP"),
        ({"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}}, [FP32], "ZenFlow"),
        (
            {
                "zero_optimization": {"stage": 1},
                "bf16": {"enabled": True},
                "data_types": {"grad_accum_dtype": "fp32"},
            },
            [BF16],
            "BF16_Optimizer",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_separate_storages(config: dict[str, Any], dtypes: list[torch.dtype], part: str) -> None:
    assert part in separate_reason(config, dtypes)
    described = [parameter((3, 5), dtype) for dtype in dtypes]
    assert allocate_flat([*described, parameter((2,), FP32, trained=False)], config, 2, "cpu") == {}


def parameter(shape: tuple[int, ...], dtype: torch.dtype, *, trained: bool = True) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=trained)


def test_layout() -> None:
    assert FlatLayout.of_group([3, 4], 2, 3, parameter_alignment=False) == FlatLayout(((0, 3), (3, 4)), 12)
    # 16 bytes are 8 elements of 2 bytes; nothing is added for alignment behind the last one.
    assert FlatLayout.of_group([3, 8, 4], 2, 2, parameter_alignment=True) == FlatLayout(((0, 3), (8, 8), (16, 4)), 20)
    assert FlatLayout.of_group([4], 4, 1, parameter_alignment=True) == FlatLayout(((0, 4),), 4)


def test_buffers_are_remembered_without_being_kept() -> None:
    described = parameter((3, 5), FP32)
    others = [parameter((0, 4), FP32), parameter((2,), FP32, trained=False)]  # empty, frozen
    tensors = allocate_flat([described, *others], {"zero_optimization": {"stage": 1}}, 4, "cpu")
    assert list(tensors) == [id(described)]
    param = nn.Parameter(tensors[id(described)])
    assert param.shape == described.shape
    known = WAITING.find(param)
    assert known is not None and known.layout == FlatLayout(((0, 15),), 16)
    before = len(WAITING.alive())
    del tensors, param
    assert len(WAITING.alive()) == before - 1
