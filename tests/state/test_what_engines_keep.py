"""What an engine trains or keeps and a state has no place for is named, and nothing is written."""

import re
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

import hf_zero_stream
from tests.support.cluster import run_ranks_expecting_errors
from tests.support.parity import ds_config


def engine_of(stage: int, dtype: torch.dtype, *more: nn.Parameter) -> Any:
    from deepspeed.accelerator import get_accelerator

    type(get_accelerator()).is_fp16_supported = lambda self: True  # type: ignore[method-assign]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    config = ds_config(dtype)
    config["zero_optimization"] = {"stage": stage}
    config["fp16"] = {"enabled": dtype == torch.float16}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=[*model.parameters(), *more], config=config)
    return engine


def save_moved(folder: Path) -> None:
    """Code has given a parameter other memory than the engine's."""
    engine = engine_of(1, torch.bfloat16)
    engine.module[1].weight.data = engine.module[1].weight.data.clone()
    hf_zero_stream.save_state(engine, folder)


def save_unregistered(folder: Path, stage: int) -> None:
    """The engine trains a parameter that the model does not know."""
    hf_zero_stream.save_state(engine_of(stage, torch.bfloat16, nn.Parameter(torch.ones(3))), folder)


def save_scaler(folder: Path) -> None:
    """Code has put a tensor into the loss scaler."""
    engine = engine_of(1, torch.float16)
    engine.optimizer.loss_scaler.cur_scale = torch.tensor(2.0)
    hf_zero_stream.save_state(engine, folder)


@pytest.mark.parametrize(
    ("save", "arguments", "message"),
    [
        (save_moved, (), r"1\.weight: expected parameters that lie in the engine's flat buffers"),
        (save_unregistered, (0,), r"a parameter of shape \(3,\) that is none of the model's"),
        (save_scaler, (), r"cur_scale: expected a number in a loss scaler; found a Tensor"),
    ],
)
def test_refused(cluster: None, tmp_path: Path, save: Any, arguments: Any, message: str) -> None:
    outcomes = run_ranks_expecting_errors(2, save, tmp_path, *arguments)
    assert [outcome.error_type for outcome in outcomes] == ["UnsupportedError"] * 2
    for outcome in outcomes:
        assert re.search(message, str(outcome.error_message)), outcome.error_message
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
