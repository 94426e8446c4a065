"""States where DeepSpeed alone can save, or the plug-in ``pickled`` is not there.

- Engines whose ranks hold parts of a model that only DeepSpeed knows are saved in DeepSpeed's own way.
- What needs the plug-in ``pickled`` where it is not there: an error that names it, before anything is changed.
"""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch import nn

import hf_zero_stream
from hf_zero_stream.errors import HfZeroStreamError, MissingPluginError
from tests.support.checkpoint_files import differing
from tests.support.cli import run
from tests.support.cluster import run_ranks
from tests.support.mpu import Mpu
from tests.support.parity import whole_values
from tests.support.plugins import without_plugin
from tests.support.training_state import all_in_one_group, engine_of, state_config, train
from tests.support.zoo import Checkpoint


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


NAMED = "needs the plug-in 'pickled' of hf_zero_stream"


def as_bin(model: Any, folder: Path) -> None:
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


def as_indexed_bin(model: Any, folder: Path) -> None:
    torch.save(model.state_dict(), folder / "all.pt")
    weight_map = dict.fromkeys(model.state_dict(), "all.pt")
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def as_distributed(model: Any, folder: Path) -> None:
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder, no_dist=True)


@pytest.mark.plugin("tools", "forecast")
@pytest.mark.parametrize("save", [as_bin, as_indexed_bin, as_distributed])
def test_weights(zoo_checkpoint: Checkpoint, tmp_path: Path, save: Callable[[Any, Path], None]) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(zoo_checkpoint("llama"))
    model.config.save_pretrained(tmp_path)
    save(model, tmp_path)
    with without_plugin("pickled"):
        with pytest.raises(MissingPluginError, match=NAMED):
            hf_zero_stream.load_into(model, str(tmp_path))
        with pytest.raises(MissingPluginError, match=NAMED):
            hf_zero_stream.plan(str(tmp_path), world_size=2)
        for command in (("inspect",), ("verify",), ("plan", "--world-size", "2")):
            assert NAMED in run(*command, str(tmp_path), code=1).stderr, command
    if save is not as_distributed:  # which stock cannot load
        assert type(model).from_pretrained(tmp_path).state_dict().keys() == model.state_dict().keys()


def test_convert(zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    with without_plugin("pickled"):
        message = str(run("convert", str(zoo_checkpoint("llama")), str(tmp_path / "new"), code=1).stderr)
    assert "hf-zero-stream convert" in message and NAMED in message and not (tmp_path / "new").exists()


def save_by_deepspeed(folder: Path, target: Path, stage: int) -> None:
    engine = engine_of(folder, state_config(stage), all_in_one_group)
    train(engine, (0,))
    engine.save_checkpoint(str(target))


def resume_without(folder: Path, source: Path, stage: int, by_engine: bool) -> tuple[str, list[str]]:
    """The error, and the names of what is another value after it."""
    engine = engine_of(folder, state_config(stage), all_in_one_group)
    before = whole_values(engine)
    with without_plugin("pickled"), hf_zero_stream.streaming(), pytest.raises(MissingPluginError) as caught:
        if by_engine:
            engine.load_checkpoint(str(source))
        else:
            hf_zero_stream.load_state(engine, source)
    return str(caught.value), differing(whole_values(engine), before)


@pytest.mark.plugin("tools")
@pytest.mark.parametrize("by_engine", [False, True])
def test_resuming_from_deepspeed(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, by_engine: bool) -> None:
    """Of another stage, which DeepSpeed does not load either."""
    run_ranks(2, save_by_deepspeed, zoo_checkpoint("llama"), tmp_path, 3)
    for message, changed in run_ranks(2, resume_without, zoo_checkpoint("llama"), tmp_path, 2, by_engine):
        assert NAMED in message and "global_step1" in message and changed == []
    with without_plugin("pickled"):
        for command in ("inspect", "verify"):
            assert NAMED in run(command, str(tmp_path / "global_step1"), code=1).stderr


def save_state(folder: Path, target: Path) -> list[float]:
    engine = engine_of(folder, state_config(3), all_in_one_group)
    with without_plugin("pickled"), hf_zero_stream.streaming():
        train(engine, (0,))
        engine.save_checkpoint(str(target))
        expected = train(engine, (1,))
        again = engine_of(folder, state_config(3), all_in_one_group)
        again.load_checkpoint(str(target))
        assert train(again, (1,)) == expected
    return expected


def test_states_of_ours_need_none(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    run_ranks(2, save_state, zoo_checkpoint("llama"), tmp_path)
    assert not [*tmp_path.rglob("*.pt"), *tmp_path.rglob("*.py")]
