"""Inside ``GatheredParameters`` the gathered values are saved, rank 0's where ranks differ, by one rank or by all."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist

import hf_zero_stream
from hf_zero_stream.errors import SaveError
from hf_zero_stream.saving import readiness as saving
from tests.saving.test_hooks import INDEX, prepared
from tests.support.checkpoint_files import add_one, tensors_of
from tests.support.cluster import run_ranks
from tests.support.loading import load_with
from tests.support.parity import ds_config, unequal
from tests.support.saving import SHARD_SIZE, different, saves_with
from tests.support.zoo import Checkpoint, make_checkpoint


CHANGED = ("model.embed_tokens.weight", "model.norm.weight")
"""One is large enough to be partitioned between steps, the other one stays in memory all the time."""


@contextmanager
def merged(model: Any, *, everything: bool = True) -> Iterator[None]:
    """Two parameters have other values on rank 0, as after merging an adapter; afterwards all is as before."""
    params = [param for name, param in model.named_parameters() if everything or name in CHANGED]
    with deepspeed.zero.GatheredParameters(params, modifier_rank=0), torch.no_grad():
        before = {}
        if dist.get_rank() == 0:
            for name in CHANGED:
                param = model.get_parameter(name)
                before[name] = param.detach().clone()
                param.add_(1)
        yield
        for name, values in before.items():
            model.get_parameter(name).copy_(values)


def save_in_many_ways(checkpoint: Path, folder: Path) -> dict[str, str]:
    accelerator, engine = prepared(checkpoint, stage3_param_persistence_threshold=1000)
    model, rank = engine.module, dist.get_rank()
    with merged(model):
        if rank == 0:
            model.save_pretrained(folder / "stock", max_shard_size=SHARD_SIZE)
    errors = {}
    with hf_zero_stream.streaming():
        with merged(model):
            if rank == 0:
                model.save_pretrained(folder / "rank 0", max_shard_size=SHARD_SIZE)
        with merged(model):
            model.save_pretrained(folder / "all ranks", max_shard_size=SHARD_SIZE)
        with merged(model):
            model.save_pretrained(folder / "main", max_shard_size=SHARD_SIZE, is_main_process=rank == 0)
        with merged(model, everything=False):
            model.save_pretrained(folder / "some gathered", max_shard_size=SHARD_SIZE)
        with merged(model):
            state_dict = accelerator.get_state_dict(engine)
            if rank == 0:
                model.save_pretrained(folder / "state dict", state_dict=state_dict, max_shard_size=SHARD_SIZE)
        with merged(model, everything=False):
            accelerator.get_state_dict(engine)
            state_dict = accelerator.get_state_dict(engine)
            model.save_pretrained(folder / "lazy state dict", state_dict=state_dict, max_shard_size=SHARD_SIZE)
        with merged(model):
            accelerator.save_model(engine, folder / "save_model", max_shard_size="1GB")
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            model.save_pretrained(folder / "not changed", max_shard_size=SHARD_SIZE)
        saving.OTHERS_COME_S = 0.5
        with merged(model, everything=False):
            if rank == 0:
                with pytest.raises(SaveError) as caught:
                    model.save_pretrained(folder / "nothing", max_shard_size=SHARD_SIZE)
                errors["one rank, some gathered"] = str(caught.value)
        saving.OTHERS_COME_S = 60.0
    with merged(model):
        with saves_with(verify="full"):
            hf_zero_stream.save_pretrained(engine, folder / "explicit", max_shard_size=SHARD_SIZE)
    with merged(model, everything=False):
        with saves_with(write_from="rank0"):
            hf_zero_stream.save_pretrained(engine, folder / "explicit, some gathered", max_shard_size=SHARD_SIZE)
        with pytest.raises(hf_zero_stream.errors.UnsupportedError) as refused:
            hf_zero_stream.save_pretrained(engine, folder / "nothing", dtype=torch.float32)
        errors["fp32"] = str(refused.value)
    hf_zero_stream.save_pretrained(engine, folder / "after", max_shard_size=SHARD_SIZE)
    return errors


def test_gathered_values_are_saved(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    checkpoint = zoo_checkpoint("qwen3_moe", torch.bfloat16)
    errors = run_ranks(2, save_in_many_ways, checkpoint, tmp_path)
    saved = {path.name for path in tmp_path.iterdir()} - {"nothing"}
    as_stock = {"rank 0", "all ranks", "main", "some gathered", "state dict", "lazy state dict", "explicit"}
    as_stock |= {"explicit, some gathered"}
    assert saved == as_stock | {"stock", "save_model", "not changed", "after"}
    # Stock counts padding of gathered parameters as bytes of the checkpoint.
    for name in as_stock:
        assert set(different(tmp_path / name, tmp_path / "stock")) <= {INDEX}, name
    assert set(different(tmp_path / "not changed", tmp_path / "after")) <= {INDEX}
    stock, after, of_accelerate = (tensors_of(tmp_path / name) for name in ("stock", "after", "save_model"))
    assert {name for name in stock if not torch.equal(stock[name], after[name])} == set(CHANGED)
    assert all(torch.equal(stock[name], of_accelerate[name]) for name in CHANGED)
    assert "model.layers.0." in errors[0]["one rank, some gathered"]
    assert all("fp32" in error["fp32"] and "model.embed_tokens.weight" in error["fp32"] for error in errors)


def merge_an_adapter(checkpoint: Path, folder: Path, name: str) -> None:
    """The usual export after LoRA: gather, merge, save on rank 0."""
    from peft import LoraConfig, get_peft_model

    base = load_with("streamed", "AutoModelForCausalLM", checkpoint, ds_config(), {})
    torch.manual_seed(0)
    model = get_peft_model(base, LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    with hf_zero_stream.streaming() if name == "ours" else nullcontext():
        with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
            whole = model.merge_and_unload()
            if dist.get_rank() == 0:
                whole.save_pretrained(folder / name, max_shard_size=SHARD_SIZE)


def test_a_merged_adapter(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    checkpoint = zoo_checkpoint("qwen3_moe")
    for name in ("stock", "ours"):
        run_ranks(2, merge_an_adapter, checkpoint, tmp_path, name)
    assert different(tmp_path / "ours", tmp_path / "stock") == []
    merged, before = tensors_of(tmp_path / "ours"), tensors_of(checkpoint)
    changed = {name for name in before if not torch.equal(before[name], merged[name])}
    assert changed and all("q_proj" in name or "v_proj" in name for name in changed)


def load_while_gathered(first: Path, second: Path, modifier_rank: int | None) -> list[str]:
    """Names of what is not the second checkpoint's, inside the context and after it."""
    plain = load_with("plain", "AutoModelForCausalLM", second, {}, {})
    model = load_with("streamed", "AutoModelForCausalLM", first, ds_config(), {})
    params = list(model.parameters())
    with deepspeed.zero.GatheredParameters(params[:5], modifier_rank=modifier_rank):
        hf_zero_stream.load_into(model, str(second))
        found = [
            f"parameter {number}"
            for number, (mine, expected) in enumerate(zip(params[:5], list(plain.parameters())[:5], strict=True))
            if not torch.equal(mine.data, expected.data)
        ]
    return [*found, *unequal(model, plain)]


@pytest.mark.parametrize("modifier_rank", [None, 0])
def test_loading_while_gathered(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, modifier_rank: int | None
) -> None:
    second = make_checkpoint("qwen3_moe", tmp_path / "second", torch.float32)
    add_one(second)
    assert run_ranks(2, load_while_gathered, zoo_checkpoint("qwen3_moe"), second, modifier_rank) == [[], []]
