"""One training that goes from engine to engine, with other ranks each time: what arrives is what was saved first."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.distributed import DistributedConfig

import hf_zero_stream
from tests.support.cluster import run_ranks
from tests.support.training_state import different_states, engine_of, state_config, train, train_plain
from tests.support.zoo import Checkpoint


def decayed_or_not(model: Any, freezes: bool) -> list[dict[str, Any]]:
    """Two groups, without frozen embeddings."""
    if freezes:
        model.get_input_embeddings().weight.requires_grad_(False)
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    return [
        {"params": [param for name, param in trained if "norm" not in name], "weight_decay": 0.1},
        {"params": [param for name, param in trained if "norm" in name], "weight_decay": 0.0},
    ]


def frozen(model: Any) -> list[dict[str, Any]]:
    return decayed_or_not(model, freezes=True)


def trained_whole(model: Any) -> list[dict[str, Any]]:
    return decayed_or_not(model, freezes=False)


Prepare = Callable[[Any], list[dict[str, Any]]]


def by_zero(folder: Path, stage: int, prepare: Prepare, source: Path | None, target: Path) -> list[float]:
    """Train, or go on from `source`; save; the losses of two more steps."""
    engine = engine_of(folder, state_config(stage, torch.float32), prepare)
    if source is None:
        train(engine, range(3))
    else:
        hf_zero_stream.load_state(engine, source, with_scheduler=False)
    hf_zero_stream.save_state(engine, target)
    return train(engine, (3, 4))


def by_fsdp2(folder: Path, prepare: Prepare, source: Path, target: Path, size: int) -> list[float]:
    with hf_zero_stream.streaming():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, distributed_config=DistributedConfig(fsdp_size=size)
        )
    optimizer = torch.optim.AdamW(prepare(model), lr=1e-3)
    hf_zero_stream.load_state(model, source, optimizer=optimizer)
    hf_zero_stream.save_state(model, target, optimizer=optimizer)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    return train_plain(model, optimizer, scheduler, (3, 4))


@pytest.mark.slow  # of the matrix of resumes, a sample goes through engines too
@pytest.mark.parametrize(("name", "prepare"), [("qwen3", trained_whole), ("llama", frozen)], ids=["tied", "frozen"])
def test_from_engine_to_engine(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, name: str, prepare: Prepare
) -> None:
    """ZeRO-3, FSDP2, ZeRO-1, FSDP2, ZeRO-2: weights, moments, steps and the options of both groups."""
    folder = zoo_checkpoint(name)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is (name == "qwen3")
    first = tmp_path / "first"
    run_ranks(2, by_zero, folder, 3, prepare, None, first)
    run_ranks(3, by_fsdp2, folder, prepare, first, tmp_path / "second", 3)
    run_ranks(2, by_zero, folder, 1, prepare, tmp_path / "second", tmp_path / "third")
    run_ranks(2, by_fsdp2, folder, prepare, tmp_path / "third", tmp_path / "fourth", 2)
    run_ranks(1, by_zero, folder, 2, prepare, tmp_path / "fourth", tmp_path / "fifth")
    for each in ("third", "fifth"):
        assert different_states(first, tmp_path / each) == [], each
    for each in ("second", "fourth"):  # which have no masters
        assert different_states(first, tmp_path / each) == ["model.fp32.safetensors"], each
