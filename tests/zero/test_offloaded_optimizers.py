"""Ways in which DeepSpeed offloads an optimizer in part: beside stock, or refused by name."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import transformers
from transformers.integrations import HfDeepSpeedConfig

import hf_zero_stream
from hf_zero_stream.errors import UnsupportedError
from tests.support.checkpoint_files import differing, tensors_of
from tests.support.cluster import run_ranks
from tests.support.parity import ds_config
from tests.support.training_state import train
from tests.support.zoo import Checkpoint


ZENFLOW = {"topk_ratio": 0.1, "select_strategy": "step", "select_interval": 4, "update_interval": 2}
ZENFLOW |= {"full_warm_up_rounds": 0, "overlap_step": False}
ZERO: dict[str, dict[str, Any]] = {
    "ratio": {"stage": 3, "sub_group_size": 2000, "offload_optimizer": {"device": "cpu", "ratio": 0.3}},
    "ZenFlow": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "zenflow": ZENFLOW},
    "SuperOffload": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}},
}
"""On a CPU DeepSpeed 0.19.8 does not train ZenFlow at stage 3, nor SuperOffload."""


def engine_of(folder: Path, kind: str) -> Any:
    config = ds_config(torch.bfloat16, **ZERO[kind])
    config["optimizer"]["params"].pop("torch_adam")
    keeps = HfDeepSpeedConfig(config)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))
    engine.keeps = keeps
    return engine


def run(folder: Path, target: Path, kind: str, how: str) -> dict[str, Any]:
    """The losses of a training, its end once more after a resume, and its weights."""
    with hf_zero_stream.streaming() if how == "ours" else nullcontext():
        engine = engine_of(folder, kind)
        losses = train(engine, range(4))
        engine.save_checkpoint(str(target / f"{how} state"))
        if how == "ours":
            hf_zero_stream.save_pretrained(engine, target / how)
        else:
            values = engine._consolidated_16bit_state_dict() if ZERO[kind]["stage"] == 3 else None
            if torch.distributed.get_rank() == 0:
                engine.module.save_pretrained(target / how, state_dict=values)
        torch.distributed.barrier()
        losses += train(engine, (4, 5))
        again = engine_of(folder, kind)
        again.load_checkpoint(str(target / f"{how} state"))
        resumed = train(again, (4, 5))
        refused = {}
        for name, call in {
            "state": lambda: hf_zero_stream.save_state(engine, target / "state"),
            "masters": lambda: hf_zero_stream.save_pretrained(engine, target / "fp32", dtype=torch.float32),
            "load_into": lambda: hf_zero_stream.load_into(engine, str(folder)),
        }.items():
            try:
                call()
            except UnsupportedError as error:
                refused[name] = str(error)
    return {"losses": losses, "resumed": resumed, "refused": refused}


@pytest.mark.parametrize("kind", ["ratio", "ZenFlow"])
def test_beside_stock(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, kind: str) -> None:
    """Loads, weights and resumes are stock's. States of ZenFlow are DeepSpeed's own; on a CPU, all of a ratio's is."""
    folder = zoo_checkpoint("llama", torch.bfloat16)
    stock, ours = (run_ranks(2, run, folder, tmp_path, kind, how) for how in ("stock", "ours"))
    for expected, found in zip(stock, ours, strict=True):
        assert found["losses"] == expected["losses"]
        assert found["resumed"] == expected["resumed"]
        assert found["refused"].keys() == ({"state", "masters", "load_into"} if kind == "ZenFlow" else set())
        assert all("ZenFlow keeps copies" in text for text in found["refused"].values())
    assert differing(tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "stock")) == []


def as_on_a_gpu(folder: Path, target: Path, kind: str) -> dict[str, str]:
    """What a state of an engine says that DeepSpeed has made as it does on a GPU, where some moments lie elsewhere."""
    from deepspeed.runtime.superoffload import superoffload_stage3

    superoffload_stage3._validate_superoffload_accelerator = lambda: None
    with hf_zero_stream.streaming():
        engine = engine_of(folder, kind)
        if kind == "ratio":
            train(engine, range(1))
            engine.optimizer.subgroup_to_device[0] = "cuda"
        hf_zero_stream.save_pretrained(engine, target / "weights")
        with pytest.raises(UnsupportedError) as refused:
            hf_zero_stream.save_state(engine, target / "state")
    assert not (target / "state").exists()
    return {"refused": str(refused.value)}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("ratio", "offload_optimizer.ratio below 1: a second optimizer keeps the moments of 1 sub-group"),
        ("SuperOffload", "offload_optimizer.super_offload: a process of its own keeps the moments"),
    ],
)
def test_moments_that_nothing_reaches(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, kind: str, text: str
) -> None:
    folder = zoo_checkpoint("llama", torch.bfloat16)
    for found in run_ranks(2, as_on_a_gpu, folder, tmp_path, kind):
        assert text in found["refused"]
    assert tensors_of(tmp_path / "weights").keys() == tensors_of(folder).keys()
