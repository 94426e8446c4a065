"""verl's rollouts get what they would get without streaming(), in the same order, and nothing is gathered for it."""

from pathlib import Path
from typing import Any

import pytest
import torch

import hf_zero_stream
from tests.support.checkpoint_files import differing
from tests.support.cluster import run_ranks
from tests.support.live_sharded import evaluated, fully_sharded
from tests.support.rl_trainers import verl
from tests.support.streams import (
    Adapt,
    build_for,
    change,
    counted_gathers,
    dora,
    lora,
    lora_of_experts,
    randomised,
    under_fsdp2,
)
from tests.support.zoo import Checkpoint


def both(folder: Path) -> dict[str, Any]:
    """What verl gives after each of two steps, without and with us."""
    model = fully_sharded(folder)
    engine = verl()(model)
    found: dict[str, Any] = {"order": [], "differing": [], "gathers": 0, "changed": []}
    last: dict[str, torch.Tensor] = {}
    for step in range(2):
        change(model, step)
        stock = list(engine.get_per_tensor_param()[0])
        with hf_zero_stream.streaming(), counted_gathers() as gathers:
            tensors, config = engine.get_per_tensor_param(base_sync_done=True)
            assert config is None
            ours = list(tensors)
        found["order"].append([name for name, _ in ours] == [name for name, _ in stock])
        found["differing"] += differing(dict(ours), dict(stock))
        found["gathers"] += len(gathers)
        found["changed"] = differing(dict(ours), last)
        last = {name: tensor.clone() for name, tensor in ours}
    found["names"] = sorted(last)
    return found


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3", "deepseek_v3"])
def test_as_stock(cluster: None, zoo_checkpoint: Checkpoint, name: str) -> None:
    for found in run_ranks(2, both, zoo_checkpoint(name)):
        assert found["differing"] == [] and found["gathers"] == 0 and found["changed"]
        assert found["order"] == [name != "qwen3"] * 2, "tied weights come one after the other"
        assert "embeddings.weight" in found["names"] and "lm_head.weight" in found["names"]


def after_eval(folder: Path) -> list[str]:
    """Its root's parameters are gathered then, until somebody wants a state dict."""
    engine = verl()(evaluated(fully_sharded(folder)))
    with hf_zero_stream.streaming():
        ours = dict(engine.get_per_tensor_param()[0])
    return differing(ours, dict(engine.get_per_tensor_param()[0]))


def test_after_an_eval_step(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    assert run_ranks(2, after_eval, zoo_checkpoint("llama")) == [[], []]


def merged(folder: Path, adapt: Adapt) -> list[str]:
    """What differs from what PEFT merges in a copy."""
    plain = randomised(adapt(build_for(folder, torch.float32))).merge_and_unload()
    engine = verl()(under_fsdp2(folder, adapt, torch.float32), merges=True)
    before = {name: param.to_local().clone() for name, param in engine.module.named_parameters()}
    with hf_zero_stream.streaming():
        tensors, config = engine.get_per_tensor_param(base_sync_done=True)
        ours = dict(tensors)
    assert config is None
    assert all(torch.equal(param.to_local(), before[name]) for name, param in engine.module.named_parameters())
    names = {name: name.replace("model.embed_tokens", "embeddings") for name, _ in plain.named_parameters()}
    return differing(ours, {names[name]: param.bfloat16() for name, param in plain.named_parameters()})


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "adapt"), [("llama", dora), ("qwen3_moe", lora_of_experts)])
def test_adapters_are_merged(cluster: None, zoo_checkpoint: Checkpoint, name: str, adapt: Adapt) -> None:
    """And the model that is trained keeps its weights, where verl would merge into it and copy them back."""
    assert run_ranks(2, merged, zoo_checkpoint(name), adapt) == [[], []]


def left(folder: Path, adapt: Adapt | None, options: dict[str, Any], lacks: str) -> int:
    """How many streams were made; of a verl that `lacks` a function."""
    from hf_zero_stream.plugins.stream import verl as ours

    model = fully_sharded(folder) if adapt is None else under_fsdp2(folder, adapt, torch.float32)
    engine = verl(lacks)(model, **options)
    with hf_zero_stream.streaming():
        tensors, config = engine.get_per_tensor_param()
        assert len(list(tensors)) == 0 if adapt else config is None
    return len(ours._streams)


@pytest.mark.parametrize(
    ("adapt", "options", "lacks", "streams"),
    [
        (None, {"quantises": True}, "", 0),
        (None, {}, "convert_weight_keys", 0),
        (lora, {}, "", 0),
        (lora, {"merges": True}, "", 1),
    ],
    ids=["quantised", "another version", "adapters", "modules to save"],
)
def test_left_to_verl(
    cluster: None, zoo_checkpoint: Checkpoint, adapt: Adapt | None, options: dict[str, Any], lacks: str, streams: int
) -> None:
    """What it quantises, a version that we do not know, adapters alone, and modules trained in full beside them."""
    assert run_ranks(2, left, zoo_checkpoint("llama"), adapt, options, lacks) == [streams] * 2
