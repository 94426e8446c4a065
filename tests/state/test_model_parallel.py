"""Engines whose ranks hold parts of a model that only DeepSpeed knows are saved in DeepSpeed's own way."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

import hf_zero_stream
from hf_zero_stream.errors import HfZeroStreamError
from tests.support.cluster import run_ranks
from tests.support.mpu import Mpu


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, values: torch.Tensor) -> torch.Tensor:
        values = values.clone()
        dist.all_reduce(values)
        return values

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Halves(transformers.PreTrainedModel):
    """Each rank has other columns and rows, of the same shapes."""

    config_class = transformers.PreTrainedConfig

    def __init__(self) -> None:
        super().__init__(transformers.PreTrainedConfig())
        torch.manual_seed(1 + dist.get_rank())
        self.up, self.down = nn.Linear(16, 8, bias=False), nn.Linear(8, 16, bias=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return (Sum.apply(self.down(self.up(values).relu())) - 1).square().mean()


def _config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    }


def _with_mpu(stage: int) -> tuple[Any, Any]:
    model = Halves()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=_config(stage), mpu=Mpu()
    )
    values = torch.randn(1, 16, generator=torch.Generator().manual_seed(1))

    def step() -> float:
        loss = engine(values)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return engine, step


def _pipeline(stage: int) -> tuple[Any, Any]:
    from deepspeed.pipe import LayerSpec, PipelineModule

    torch.manual_seed(1)
    layers = [LayerSpec(nn.Linear, 16, 16) for _ in range(4)]
    model = PipelineModule(layers=layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    config = {**_config(stage), "train_batch_size": 1}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(1, 16, generator=generator), torch.randn(1, 16, generator=generator)) for _ in range(8)]
    return engine, lambda: float(engine.train_batch(iter(data)))


KINDS = {"mpu": _with_mpu, "pipeline": _pipeline}


def _train(folder: Path, kind: str, stage: int, how: str) -> dict[str, Any]:
    with hf_zero_stream.streaming() if how == "ours" else nullcontext():
        engine, step = KINDS[kind](stage)
        step()
        engine.save_checkpoint(str(folder / how))
        found: dict[str, Any] = {"went on": [step(), step()]}
        engine.load_checkpoint(str(folder / how))
        found["resumed"] = [step(), step()]
    if how == "stock":
        return found
    with hf_zero_stream.streaming():
        engine.load_checkpoint(str(folder / "stock"))
        found["resumed from stock's"] = [step(), step()]
    found["refused"] = {}
    for name, call in {
        "save_pretrained": hf_zero_stream.save_pretrained,
        "save_state": hf_zero_stream.save_state,
        "load_into": hf_zero_stream.load_into,
        "weight_stream": lambda trained, _: hf_zero_stream.weight_stream(trained),
    }.items():
        try:
            call(engine, str(folder / name))
        except HfZeroStreamError as error:
            found["refused"][name] = str(error)
    return found


@pytest.mark.plugin("stream")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", [0, 1])
def test_parts_are_saved_by_deepspeed(cluster: None, tmp_path: Path, kind: str, stage: int) -> None:
    stock = run_ranks(2, _train, tmp_path, kind, stage, "stock")
    ours = run_ranks(2, _train, tmp_path, kind, stage, "ours")
    for mine, theirs in zip(ours, stock, strict=True):
        assert theirs["went on"] == theirs["resumed"]
        assert mine["went on"] == mine["resumed"] == mine["resumed from stock's"] == theirs["resumed"]
        refused = mine["refused"]
        assert len(refused) == 4 and "over 2 ranks" in refused["save_state"]
        assert kind == "pipeline" or all("over 2 ranks" in text for text in refused.values()), refused
    written = {path.relative_to(tmp_path / "ours") for path in (tmp_path / "ours").rglob("*")}
    assert written == {path.relative_to(tmp_path / "stock") for path in (tmp_path / "stock").rglob("*")}
    assert not (tmp_path / "save_pretrained").exists() and not (tmp_path / "save_state").exists()
