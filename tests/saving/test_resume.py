"""Going on from what was saved: by us at another number of ranks, and by DeepSpeed as ever."""

import json
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

import hf_zero_stream
from tests import sampling
from tests.support.cluster import run_ranks
from tests.support.loading import load_with
from tests.support.parity import ds_config, three_losses
from tests.support.trainers import by_deepspeed
from tests.support.zoo import ZOO, Checkpoint


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
