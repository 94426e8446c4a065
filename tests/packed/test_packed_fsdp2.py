"""Quantised checkpoints stay quantised under FSDP2: each rank holds a chunk of the packed bytes."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

import hf_zero_stream
from hf_zero_stream.holdings.introspection import packed_weights
from tests import sampling
from tests.packed.test_packed import FORMATS, make_folders
from tests.support.checkpoint_files import tensors_of
from tests.support.cluster import run_ranks, run_ranks_expecting_errors
from tests.support.fsdp2 import announce, count_lazy, force_fsdp_on_cpu, make_accelerator
from tests.support.packed_training import (
    TARGETS,
    check_saved,
    dequantised,
    fill_adapters,
    inputs,
    packed_names,
    with_adapters,
)
from tests.support.quantised_checkpoints import MODELS, Folders, unquantised


DOUBLE_NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_folders(tmp_path_factory, ("fp8", "nf4 dense") if sampling.is_sample else FORMATS)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory)


def load(folder: Path, keep_quantized: bool = True, **kwargs: Any) -> Any:
    if not keep_quantized:
        folder, how = dequantised(folder)
        kwargs |= how
    with hf_zero_stream.streaming(hf_zero_stream.StreamingConfig(progress=False)):
        return transformers.AutoModelForCausalLM.from_pretrained(folder, **kwargs)


def load_native(folder: Path, keep_quantized: bool = True, **kwargs: Any) -> Any:
    """A model that transformers shards itself."""
    sizes = {"fsdp_size": dist.get_world_size(), **kwargs.pop("sizes", {})}
    return load(folder, keep_quantized, **{"dtype": torch.bfloat16, "distributed_config": sizes, **kwargs})


def step(model: Any, optimizer: Any, backward: Callable[[Any], None]) -> float:
    loss = model(**inputs()).loss
    backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def trained(model: Any, accelerator: Any = None) -> tuple[Any, list[float]]:
    """The model after three steps, and their losses; all ranks have the same inputs."""
    trainable = [param for param in model.parameters() if param.requires_grad]
    assert trainable
    optimizer: Any = torch.optim.AdamW(trainable, lr=5e-2)
    backward: Callable[[Any], None] = torch.Tensor.backward
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
        backward = accelerator.backward
    model.train()
    return model, [step(model, optimizer, backward) for _ in range(3)]


def shard_bytes(model: nn.Module) -> int:
    locals_of = (getattr(param, "_local_tensor", param) for param in model.parameters() if not param.requires_grad)
    return sum(local.nbytes for local in locals_of)


def read_of(model: Any) -> int:
    """The bytes that this rank has read of what it needed; holes between small tensors are read through."""
    report = model.streaming_report.ranks[dist.get_rank()]
    assert report.bytes_read <= 1.2 * report.bytes_needed
    needed: int = report.bytes_needed
    return needed


# ------------------------------------------------------------------------------------------- distributed_config


def train_native(folders: dict[str, Path], sizes: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, folder in folders.items():
        base = load_native(folder, sizes=sizes)
        figures = {"held": shard_bytes(base), "read": read_of(base)}
        packed, losses = trained(with_adapters(base))
        _, expected = trained(with_adapters(load_native(folder, False, sizes=sizes)))
        found[name] = {"losses": losses, "dequantised": expected, "names": packed_names(packed), **figures}
    return found


NATIVE: dict[str, dict[str, Any]] = {
    "plain": {},
    "mixed precision": {"fsdp_mixed_precision": True},
    "offload": {"fsdp_cpu_offload": True},
}


@pytest.mark.sample(1)
@pytest.mark.parametrize(("title", "world_size"), [("plain", 3), ("plain", 2), ("mixed precision", 2)])
def test_distributed_config(cluster: None, folders: dict[str, Path], title: str, world_size: int) -> None:
    for of_rank in run_ranks(world_size, train_native, folders, NATIVE[title], timeout=600):
        for name, found in of_rank.items():
            assert found["losses"] == found["dequantised"], name
            assert len(set(found["losses"])) == 3, "three steps must change the loss"
            assert any("experts.down_proj" in each for each in found["names"]) or name.endswith("dense")
            in_file = sum(value.nbytes for value in tensors_of(folders[name]).values())
            assert found["held"] <= 1.02 * in_file / world_size + 100, name  # small tensors are cut unevenly
            assert found["read"] <= 1.02 * in_file / world_size + 100, name


def adapters_of(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def trained_on_own_data(folder: Path, world_size: int, keep_quantized: bool = True) -> dict[str, Any]:
    """Three steps, each of two backward passes, in which each rank has inputs of its own.

    In one process: the same with the mean of all their losses. A second adapter is never used, and has no gradients.
    """
    rank, is_sharded = dist.get_rank(), dist.get_world_size() > 1
    if is_sharded:
        base = load_native(folder, keep_quantized, dtype=torch.float32)
        assert bool(packed_names(base)) == keep_quantized
    else:
        folder, how = dequantised(folder)
        base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how).float()
    torch.manual_seed(rank)
    model = peft.get_peft_model(base, peft.LoraConfig(r=3, lora_alpha=5, target_modules=TARGETS))
    at_first = [param.detach().clone() for param in adapters_of(model)]
    fill_adapters(model)
    trained = adapters_of(model)
    model.add_adapter("unused", peft.LoraConfig(r=3, target_modules=TARGETS))
    unused = [param.requires_grad_() for name, param in model.named_parameters() if ".unused." in name]
    optimizer = torch.optim.SGD(trained, lr=1.0)
    for _ in range(3):
        for seed in (10, 20):
            for each in [rank] if is_sharded else range(world_size):
                loss = model(**inputs(seed=seed + each)).loss
                (loss if is_sharded else loss / world_size).backward()
        assert unused and all(param.grad is None for param in unused)
        optimizer.step()
        optimizer.zero_grad()
    return {"at first": at_first, "trained": [param.detach().clone() for param in trained]}


@pytest.mark.parametrize(("world_size", "keep_quantized"), [(2, True), (3, True), (2, False)])
def test_adapters_on_a_sharded_model(
    cluster: None, folders: dict[str, Path], world_size: int, keep_quantized: bool
) -> None:
    """FSDP2 does not know them; yet all ranks have the same ones, and train them on all data."""
    ranks = run_ranks(world_size, trained_on_own_data, folders["nf4 dense"], world_size, keep_quantized, timeout=300)
    (expected,) = run_ranks(1, trained_on_own_data, folders["nf4 dense"], world_size)
    for found in ranks:
        for name, values in found.items():
            assert all(map(torch.equal, values, ranks[0][name])), name
        for mine, theirs in zip(found["trained"], expected["trained"], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def held_in_training(folders: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """What a rank holds after three steps, in the words of a footprint."""
    found = {}
    for name, folder in folders.items():
        model = with_adapters(load_native(folder))
        optimizer = torch.optim.AdamW(adapters_of(model), lr=1e-2)
        optimizer_step = step(model, optimizer, lambda loss: loss.backward())
        assert math.isfinite(optimizer_step)
        states = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
        found[name] = {
            "partitions": sum(getattr(param, "_local_tensor", param).nbytes for param in model.parameters()),
            "gradients": sum(param.nbytes for param in adapters_of(model)),
            "optimizer_states": sum(state.nbytes for state in states),
        }
    return found


@pytest.mark.plugin("forecast")
@pytest.mark.slow
def test_plan_counts_adapters(cluster: None, folders: dict[str, Path]) -> None:
    lora = {"r": 3, "target_modules": TARGETS}
    for rank, of_rank in enumerate(run_ranks(2, held_in_training, folders, timeout=300)):
        for name, found in of_rank.items():
            where = {"world_size": 2, "rank": rank, "distributed_config": {"fsdp_size": 2}, "device": "cpu"}
            memory = hf_zero_stream.plan(str(folders[name]), lora=lora, dtype=torch.bfloat16, **where).memory
            for part, nbytes in found.items():
                assert getattr(memory, part)["cpu"] == pytest.approx(nbytes, rel=0.05), (name, part)  # FSDP2 pads
            assert memory.held["cpu"] == pytest.approx(sum(found.values()), rel=0.05)


def put_on_replicas(folder: Path) -> None:
    with_adapters(load_native(folder, sizes={"fsdp_size": 2, "dp_replicate_size": 2}))


def test_adapters_on_sharded_replicas(cluster: None, folders: dict[str, Path]) -> None:
    for outcome in run_ranks_expecting_errors(4, put_on_replicas, folders["fp8"]):
        assert outcome.error_type == "UnsupportedError"
        assert "dp_replicate_size" in outcome.error_message


# --------------------------------------------------------------------------------------------------- accelerate


def train_prepared(folders: dict[str, Path], precision: str, dtype: torch.dtype) -> dict[str, Any]:
    found = {}
    for name, folder in folders.items():
        losses = []
        for keep in (True, False):
            announce(cpu_ram_efficient_loading=keep)
            accelerator = make_accelerator(precision)
            base = load(folder, keep, dtype=dtype)
            assert count_lazy(base) == len(list(base.parameters()))
            model = with_adapters(base)
            losses.append(trained(model, accelerator)[1])
            assert bool(packed_names(model)) == keep and not count_lazy(model)
            if keep:
                held = shard_bytes(base)
                read = read_of(base)
        found[name] = {"packed": losses[0], "dequantised": losses[1], "held": held, "read": read}
    return found


PREPARED: dict[str, tuple[str, torch.dtype]] = {
    "bf16": ("no", torch.bfloat16),
    "mixed precision": ("bf16", torch.float32),
    "of bf16": ("bf16", torch.bfloat16),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize(("title", "world_size"), [("bf16", 2), ("mixed precision", 2), ("of bf16", 3)])
def test_accelerate(cluster: None, folders: dict[str, Path], title: str, world_size: int) -> None:
    for of_rank in run_ranks(world_size, train_prepared, folders, *PREPARED[title], timeout=600):
        for name, found in of_rank.items():
            assert found["packed"] == found["dequantised"], name
            assert found["packed"][0] != found["packed"][2], "three steps must change the loss"  # in bf16
            in_file = sum(value.nbytes for value in tensors_of(folders[name]).values())
            rest = 2 if title == "mixed precision" else 1  # what is not quantised is in fp32 then
            assert found["held"] <= rest * 1.02 * in_file / world_size + 100, name
            assert found["read"] <= 1.02 * in_file / world_size + 100, name


def resume_prepared(folder: Path, target: Path, kind: str) -> tuple[list[float], list[float]]:
    """Losses of two steps after accelerate's ``save_state``, and after its ``load_state`` into a new model."""
    announce(state_dict_type=kind)
    losses = []
    for resumes in (False, True):
        accelerator = make_accelerator()
        model = with_adapters(load(folder, dtype=torch.bfloat16))
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(adapters_of(model), lr=5e-2))
        model.train()
        if resumes:
            accelerator.load_state(str(target))
        else:
            [step(model, optimizer, accelerator.backward) for _ in range(3)]
            accelerator.save_state(str(target))
        losses.append([step(model, optimizer, accelerator.backward) for _ in range(2)])
        assert packed_names(model)
    return losses[0], losses[1]


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_accelerate_resumed(cluster: None, folders: dict[str, Path], tmp_path: Path, kind: str) -> None:
    for went_on, resumed_there in run_ranks(2, resume_prepared, folders["nf4 dense"], tmp_path / "state", kind):
        assert went_on == resumed_there and went_on[0] != went_on[1]


# ------------------------------------------------------------------------------------------------------- saving


def save_native(folders: dict[str, Path], out: Path) -> None:
    for name, folder in folders.items():
        with hf_zero_stream.streaming():
            load_native(folder).save_pretrained(out / name)
        hf_zero_stream.save_pretrained(load_native(out / name), out / f"{name} again")


def save_prepared(folders: dict[str, Path], out: Path) -> None:
    for name, folder in folders.items():
        announce()
        accelerator = make_accelerator()
        model, _ = trained(with_adapters(load(folder, dtype=torch.bfloat16)), accelerator)
        hf_zero_stream.save_pretrained(model.base_model.unload(), out / name)


@pytest.mark.parametrize("save", [save_native, save_prepared])
def test_saved_as_it_was(cluster: None, folders: dict[str, Path], tmp_path: Path, save: Any) -> None:
    run_ranks(2, save, folders, tmp_path, timeout=300)
    for saved in tmp_path.iterdir():
        check_saved(saved, folders[saved.name.removesuffix(" again")])


# ------------------------------------------------------------------------------------------- quantised on the way


def quantise(folder: Path, out: Path, is_native: bool) -> dict[str, Any]:
    how = transformers.BitsAndBytesConfig(**DOUBLE_NF4)
    if is_native:
        model, accelerator = load_native(folder, quantization_config=how), None
    else:
        announce()
        accelerator = make_accelerator()
        model = load(folder, dtype=torch.bfloat16, quantization_config=how)
        assert count_lazy(model)
    base = model
    model, losses = trained(with_adapters(model), accelerator)
    read = base.streaming_report.ranks[dist.get_rank()].bytes_read
    hf_zero_stream.save_pretrained(base, out / "base") if is_native else None
    return {"losses": losses, "names": packed_names(model), "read": read, "held": shard_bytes(base)}


@pytest.mark.slow
@pytest.mark.parametrize("is_native", [True, False], ids=["distributed_config", "accelerate"])
def test_quantised_while_loading(cluster: None, tmp_path: Path, is_native: bool) -> None:
    unquantised(tmp_path / "bf16")
    nf4 = transformers.BitsAndBytesConfig(**DOUBLE_NF4)
    stock = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "bf16", quantization_config=nf4, dtype=torch.bfloat16
    )
    stock.save_pretrained(tmp_path / "stock")
    found = run_ranks(2, quantise, tmp_path / "bf16", tmp_path, is_native, timeout=300)
    expected = run_ranks(2, losses_of_stock, tmp_path / "stock", is_native, timeout=300)
    in_bf16 = sum(value.nbytes for value in tensors_of(tmp_path / "bf16").values())
    in_nf4 = sum(value.nbytes for value in tensors_of(tmp_path / "stock").values())
    for of_rank, losses in zip(found, expected, strict=True):
        assert of_rank["names"] and of_rank["losses"] == losses
        assert of_rank["read"] <= 1.05 * in_bf16 / 2
        assert of_rank["held"] <= 1.02 * in_nf4 / 2


def losses_of_stock(folder: Path, is_native: bool) -> list[float]:
    """Of a checkpoint that stock has quantised and saved."""
    if is_native:
        return trained(with_adapters(load_native(folder)))[1]
    announce()
    accelerator = make_accelerator()
    return trained(with_adapters(load(folder, dtype=torch.bfloat16)), accelerator)[1]


# ------------------------------------------------------------------------------------------------ used otherwise


def use_unprepared(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a model that is used before it is prepared: each rank has all of the packed bytes."""
    announce()
    make_accelerator()
    packed, whole = (load(folder, keep, dtype=torch.bfloat16) for keep in (True, False))
    found = packed(**inputs()).logits.detach(), whole(**inputs()).logits.detach()
    assert packed_names(packed) and not packed_names(whole)
    return found


def test_used_unprepared(cluster: None, folders: dict[str, Path]) -> None:
    for packed, whole in run_ranks(2, use_unprepared, folders["fp8"]):
        assert torch.equal(packed, whole)


def gathered_after(folder: Path, is_native: bool) -> dict[str, Any]:
    """How many bytes of gathered packed weights are there after a forward pass, and after the backward pass."""
    if is_native:
        model: Any = with_adapters(load_native(folder))
    else:
        announce(reshard_after_forward=True)
        accelerator = make_accelerator()
        model = with_adapters(load(folder, dtype=torch.bfloat16))
        model, _ = accelerator.prepare(model, torch.optim.SGD(adapters_of(model), lr=1e-3))
    whole: list[Any] = []
    for module in model.modules():
        for key in packed_weights(module):
            module.register_forward_pre_hook(
                lambda module, _, key=key: whole.append(getattr(module, key).untyped_storage())
            )
    model.train()
    loss = model(**inputs()).loss
    found = {"storages": len(whole), "after forward": max(storage.nbytes() for storage in whole)}
    loss.backward()
    return {**found, "after backward": max(storage.nbytes() for storage in whole)}


@pytest.mark.sample(2)
@pytest.mark.parametrize("is_native", [True, False], ids=["distributed_config", "accelerate"])
@pytest.mark.parametrize("name", MODELS)
def test_nothing_gathered_stays_alive(cluster: None, models: Folders, name: str, is_native: bool) -> None:
    for found in run_ranks(2, gathered_after, models(name), is_native):
        assert found["storages"] >= 2
        assert found["after forward"] == found["after backward"] == 0


# ------------------------------------------------------------------------------------- replicas of a sharded model


def logits_of_replicas(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    sizes = {"fsdp_size": 2, "dp_replicate_size": 2}
    packed, whole = (load_native(folder, keep, sizes=sizes) for keep in (True, False))
    assert packed_names(packed) and not packed_names(whole)
    return packed(**inputs()).logits.detach(), whole(**inputs()).logits.detach()


def train_replicas(folder: Path, offloads: bool) -> list[list[float]]:
    losses = []
    for keep in (True, False):
        announce()
        force_fsdp_on_cpu()
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            # Without an accelerator, memory cannot be pinned.
            cpu_offload=CPUOffloadPolicy(pin_memory=False) if offloads else OffloadPolicy(),
        )
        sizes = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
        accelerator = Accelerator(mixed_precision="no", fsdp_plugin=plugin, parallelism_config=sizes)
        model, of_model = trained(with_adapters(load(folder, keep, dtype=torch.bfloat16)), accelerator)
        assert bool(packed_names(model)) == keep
        losses.append(of_model)
    return losses


@pytest.mark.slow
def test_replicas(cluster: None, folders: dict[str, Path]) -> None:
    for packed, whole in run_ranks(4, logits_of_replicas, folders["fp8"], timeout=300):
        assert torch.equal(packed, whole)


@pytest.mark.slow
@pytest.mark.parametrize("offloads", [False, True])
def test_accelerate_replicas(cluster: None, folders: dict[str, Path], offloads: bool) -> None:
    for packed, whole in run_ranks(4, train_replicas, folders["fp8"], offloads, timeout=300):
        assert packed == whole and packed[0] != packed[2]
