"""Values of which ranks have several: gathered ones, and replicas.

- Inside ``GatheredParameters`` the gathered values are saved, rank 0's where ranks differ, by one rank or by all.
- Where every rank has all of a tensor, and values differ, rank 0's are saved, if nothing has made them equal.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

import hf_zero_stream
from hf_zero_stream.errors import SaveError, UnsupportedError
from hf_zero_stream.saving import arguments as saving
from hf_zero_stream.saving.lazy_parameters import digest
from tests.saving.test_hooks import INDEX, prepared
from tests.support.checkpoint_files import add_one, tensors_of
from tests.support.cluster import run_ranks
from tests.support.messages import listen
from tests.support.parity import ds_config, load_with, unequal
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


def save_replicas(checkpoint: Path, folder: Path) -> dict[str, Any]:
    """Without ZeRO: one parameter and one buffer are of each rank's own, and a transposed one (in stock's layout)."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    messages = listen()
    report = hf_zero_stream.save_pretrained(model, folder / "same", max_shard_size=SHARD_SIZE)
    assert messages == []
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.add_(torch.randn(param.shape))
    model.register_buffer("running_mean", torch.randn(300))
    if dist.get_rank() == 0:
        model.save_pretrained(folder / "stock", max_shard_size=SHARD_SIZE)
    dist.barrier()
    for write_from in ("all", "rank0"):
        with saves_with(chunk_bytes=512, write_from=write_from, verify="full"):
            hf_zero_stream.save_pretrained(model, folder / write_from, max_shard_size=SHARD_SIZE)
    return {"messages": messages, "written": [rank.bytes_written for rank in report.ranks]}


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_rank_0s_values(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, name: str) -> None:
    found = run_ranks(2, save_replicas, zoo_checkpoint(name), tmp_path)
    for folder in ("all", "rank0"):
        assert different(tmp_path / folder, tmp_path / "stock") == []
    assert all(min(of_rank["written"]) > 0.4 * max(of_rank["written"]) for of_rank in found)
    assert "model.embed_tokens.weight" in found[0]["messages"][0] and "rank 0" in found[0]["messages"][0]
    assert found[1]["messages"] == []


def save_with_a_head(checkpoint: Path, folder: Path) -> None:
    """A head that was added after a streamed load, with another seed on every rank."""
    model = load_with("streamed", "AutoModelForCausalLM", checkpoint, ds_config(), {})
    torch.manual_seed(dist.get_rank())
    model.score = nn.Linear(16, 300)
    model.running = nn.BatchNorm1d(40)
    model.running.running_mean.fill_(dist.get_rank() + 5.0)
    hf_zero_stream.save_pretrained(model, folder)
    if dist.get_rank() == 0:
        torch.save({"weight": model.score.weight, "bias": model.score.bias}, folder / "head.pt")


def test_a_head_with_other_seeds(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    run_ranks(3, save_with_a_head, zoo_checkpoint("qwen3_moe"), tmp_path)
    saved, head = load_file(tmp_path / "model.safetensors"), torch.load(tmp_path / "head.pt")
    assert torch.equal(saved["score.weight"], head["weight"]) and torch.equal(saved["score.bias"], head["bias"])
    assert set(saved["running.running_mean"].tolist()) == {5.0}


def save_moments_that_differ(folder: Path) -> str:
    """A training in which one moment of one parameter is another on the last rank."""
    torch.manual_seed(0)
    model = nn.Linear(64, 48)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 64)).square().sum().backward()
    optimizer.step()
    hf_zero_stream.save_state(model, folder / "same", optimizer=optimizer)
    optimizer.state[model.weight]["exp_avg_sq"].add_(dist.get_rank())
    with pytest.raises(UnsupportedError) as refused:
        hf_zero_stream.save_state(model, folder / "different", optimizer=optimizer)
    return str(refused.value)


def test_moments_that_differ(cluster: None, tmp_path: Path) -> None:
    messages = run_ranks(2, save_moments_that_differ, tmp_path)
    assert all("weight (rank 1)" in message and "bias" not in message for message in messages), messages
    assert not (tmp_path / "different" / "latest").exists()


def save_at_other_steps(folder: Path) -> str:
    """One rank has made a step more."""
    torch.manual_seed(0)
    model = nn.Linear(64, 48)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(1 + dist.get_rank()):
        model(torch.ones(2, 64)).square().sum().backward()
        optimizer.step()
    with pytest.raises(UnsupportedError) as refused:
        hf_zero_stream.save_state(model, folder, optimizer=optimizer)
    return str(refused.value)


def test_other_steps(cluster: None, tmp_path: Path) -> None:
    messages = run_ranks(2, save_at_other_steps, tmp_path)
    assert all("not made the same number of steps" in message and "AdamW" not in message for message in messages)


def save_engine_that_differs(checkpoint: Path, folder: Path) -> str:
    """After deepspeed.initialize, which makes ranks equal, code of some rank changes a parameter."""
    config = ds_config(torch.float32, stage=1)
    model = load_with("streamed", "AutoModelForCausalLM", checkpoint, config, {})
    model.score = nn.Linear(16, 300)
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))
    hf_zero_stream.save_pretrained(engine, folder / "same")
    with torch.no_grad():
        model.score.bias.add_(dist.get_rank() == 1)
    messages = []
    for write_from in ("rank0", "all"):
        with saves_with(write_from=write_from), pytest.raises(UnsupportedError) as refused:
            hf_zero_stream.save_pretrained(engine.module, folder / "different")
        messages.append(str(refused.value))
    assert messages[0] == messages[1]
    return messages[0]


def test_an_engine_that_differs(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    messages = run_ranks(3, save_engine_that_differs, zoo_checkpoint("qwen3_moe"), tmp_path)
    assert all("DeepSpeedEngine" in message and "score.bias (rank 1)" in message for message in messages), messages
    assert list((tmp_path / "different").rglob("*.safetensors")) == []


def test_digests_differ_with_a_single_bit() -> None:
    values = torch.randn(300_001)
    seen = {digest(values)}
    for position in (0, 1, 128, 1023, 150_000, 262_143, 262_144, 300_000):
        values.view(torch.int32)[position] ^= 1
        seen.add(digest(values))
    assert len(seen) == 9
    assert digest(values) == digest(values.clone())
    swapped = values.clone().view(-1)[:300_000].view(300, 1000).flip(0).reshape(-1)
    assert digest(swapped) != digest(values[:300_000])
    assert digest(torch.full((4096,), 1.0)) != digest(torch.full((4096,), 2.0))
    assert digest(torch.zeros(16)) != digest(torch.zeros(17))
    for dtype in (torch.bfloat16, torch.int8, torch.bool):
        assert digest(torch.ones(5, dtype=dtype)) != digest(torch.zeros(5, dtype=dtype))
    assert digest(torch.empty(0)) == digest(torch.empty(0))


def test_digests_differ_where_values_are_of_a_pattern() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        identity = torch.eye(512, dtype=dtype)
        assert digest(identity) != digest(identity[[4, 1, 2, 3, 0, *range(5, 512)]])
        values = torch.randn(512, 512, generator=torch.Generator().manual_seed(0)).to(dtype)
        assert digest(values) != digest(-values)
        flipped = values.clone()
        flipped[3::64, 5::64] *= -1
        assert digest(values) != digest(flipped)
