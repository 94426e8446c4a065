"""AutoTP's states in other homes, and theirs under AutoTP; saves in the background; accelerate; adapters."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import peft
import pytest
import torch
import transformers
from transformers.integrations import HfDeepSpeedConfig

import hf_zero_stream
from tests.autotp.test_autotp import _layer, checkpoint_of, config_of
from tests.support.cluster import run_ranks
from tests.support.parity import ds_config
from tests.support.trainers import by_deepspeed, own_optimizer
from tests.support.training_state import (
    accelerated_steps,
    all_in_one_group,
    different_states,
    engine_of,
    resume_and_save,
    resume_plain,
    state_config,
    train,
    train_and_save,
    two_groups,
)


FP32 = torch.float32


def tp_config(stage: int, dtype: torch.dtype = FP32) -> dict[str, Any]:
    return {**state_config(stage, dtype), "tensor_parallel": {"autotp_size": 2}}


def ranks_of(stage: int) -> int:
    """So many that ZeRO-3 partitions what two ranks of tensor parallelism have."""
    return 4 if stage == 3 else 2


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("home", ["ZeRO-3", "stage 1", "FSDP2", "one process"])
def test_other_homes(cluster: None, tmp_path: Path, home: str, stage: int) -> None:
    """What another home loads of AutoTP's state is that state, and so is what AutoTP loads of its."""
    folder = checkpoint_of("uneven", tmp_path / "checkpoint")
    run_ranks(ranks_of(stage), train_and_save, folder, tmp_path, [tp_config(stage)], [two_groups], False)
    source, there, back = tmp_path / "ours 0", tmp_path / "there", tmp_path / "back"
    if home in ("ZeRO-3", "stage 1"):
        ranks, other = (2, 3) if home == "ZeRO-3" else (1, 1)
        run_ranks(ranks, resume_and_save, folder, source, state_config(other, FP32), two_groups, there)
        expected = []
    else:
        ranks, sizes = (2, {"fsdp_size": 2}) if home == "FSDP2" else (1, None)
        run_ranks(ranks, resume_plain, folder, source, sizes, there, False)
        expected = ["groups"]  # its optimizer has other options
    assert [name for name in different_states(source, there) if name not in expected] == []
    for ranks, other in ((2, 0), (4, 2), (4, 3)):
        to = back / f"{other}"
        run_ranks(ranks, resume_and_save, folder, there, tp_config(other), two_groups, to, "groups" not in expected)
        assert [name for name in different_states(source, to) if name not in expected] == []


def save_in_background(folder: Path, target: Path, config: dict[str, Any]) -> dict[str, Any]:
    engine = engine_of(folder, config, all_in_one_group)
    train(engine, range(3))
    hf_zero_stream.save_state(engine, target / "at once")
    hf_zero_stream.save_state(engine, target / "background", asynchronous=True)
    background = hf_zero_stream.StreamingConfig(asynchronous_save=True)
    with hf_zero_stream.streaming(background):
        engine.save_checkpoint(str(target / "engine"))
        continued = train(engine, (3, 4))
        engine.load_checkpoint(str(target / "engine"))
    return {"continued": continued, "resumed": train(engine, (3, 4))}


@pytest.mark.parametrize("stage", [1, 0, 3])
def test_background(cluster: None, tmp_path: Path, stage: int) -> None:
    """The values are those of the call, whatever is trained meanwhile."""
    folder = checkpoint_of("tied", tmp_path / "checkpoint")
    for found in run_ranks(ranks_of(stage), save_in_background, folder, tmp_path, tp_config(stage)):
        assert found["resumed"] == found["continued"]
    for name in ("background", "engine"):
        assert different_states(tmp_path / "at once", tmp_path / name) == []


def by_accelerate(folder: Path, target: Path, how: str, stage: int) -> dict[str, Any]:
    """Two steps, a save, two steps; and the last two again by a new accelerator."""
    config = own_optimizer(ds_config(FP32, stage=stage)) | {"tensor_parallel": {"autotp_size": 2}}

    def trained() -> tuple[Any, Any, Any]:
        accelerator = by_deepspeed(config)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return accelerator, *accelerator.prepare(model, optimizer)

    with hf_zero_stream.streaming() if how == "ours" else nullcontext():
        first = trained()
        losses = accelerated_steps(*first, range(2))
        first[0].save_state(str(target / how))
        losses += accelerated_steps(*first, range(2, 4))
        second = trained()
        second[0].load_state(str(target / how))
        again = accelerated_steps(*second, range(2, 4))
    return {"losses": losses, "again": again}


@pytest.mark.parametrize("stage", [1, 2])
def test_accelerate(cluster: None, tmp_path: Path, stage: int) -> None:
    folder = checkpoint_of("plan", tmp_path / "checkpoint")
    stock, ours = (run_ranks(2, by_accelerate, folder, tmp_path, how, stage) for how in ("stock", "ours"))
    for expected, found in zip(stock, ours, strict=True):
        assert found["losses"] == expected["losses"]
        assert found["again"] == found["losses"][2:]
    assert list((tmp_path / "ours").glob("pytorch_model/*/training_state.json"))


MLP_ALONE = [_layer("row", "down_proj"), _layer("column", "gate_proj|up_proj")]


def with_adapters(folder: Path, target: Path, how: str) -> dict[str, Any]:
    """Three steps of adapters on layers that are whole, a save, two more steps, and these again after a resume."""
    config = config_of("custom", 1, 2)
    config["tensor_parallel"]["partition_config"]["layer_specs"] = MLP_ALONE
    keeps = HfDeepSpeedConfig(config)
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)

    def made() -> Any:
        torch.manual_seed(0)
        model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(folder), adapters)
        trained = [param for param in model.parameters() if param.requires_grad]
        return deepspeed.initialize(model=model, config=config, model_parameters=trained)[0]

    with hf_zero_stream.streaming() if how == "ours" else nullcontext():
        engine = made()
        losses = train(engine, range(3))
        engine.save_checkpoint(str(target / how))
        losses += train(engine, (3, 4))
        again = made()
        again.load_checkpoint(str(target / how))
        resumed = train(again, (3, 4))
    del keeps
    return {"losses": losses, "resumed": resumed}


def test_adapters(cluster: None, tmp_path: Path) -> None:
    """On layers that AutoTP leaves whole; on others stock itself cannot train them (0.19.8)."""
    folder = checkpoint_of("custom", tmp_path / "checkpoint")
    stock, ours = (run_ranks(2, with_adapters, folder, tmp_path, how) for how in ("stock", "ours"))
    for expected, found in zip(stock, ours, strict=True):
        assert found["losses"] == expected["losses"]
        assert found["resumed"] == found["losses"][3:]
    assert (tmp_path / "ours" / "global_step3" / "training_state.json").exists()
