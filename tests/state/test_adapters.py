"""Training states of PEFT's models: the adapter, its masters and moments; the base is what it was."""

from pathlib import Path
from typing import Any

import deepspeed
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard

import hf_zero_stream
from hf_zero_stream.errors import UnsupportedError
from tests.state.test_changed import train_here
from tests.support.cluster import run_ranks
from tests.support.fsdp2 import announce, load, make_accelerator
from tests.support.training_state import different_states, state_config, train
from tests.support.zoo import Checkpoint


def with_adapter(model: Any) -> Any:
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules=["q_proj", "v_proj"]))


def adapted_engine(folder: Path, stage: int) -> Any:
    config = state_config(stage)
    with hf_zero_stream.streaming():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, ds_config=config)
    model = with_adapter(model)
    trained = [param for param in model.parameters() if param.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=trained)
    return engine


def train_and_save(folder: Path, target: Path) -> tuple[list[float], list[float]]:
    """Three steps; save by ours, and by the engine inside ``streaming()``; two more steps, and two after a resume."""
    engine = adapted_engine(folder, 3)
    train(engine, range(3))
    hf_zero_stream.save_state(engine, target / "ours", data={"position": 7})
    with hf_zero_stream.streaming():
        engine.save_checkpoint(str(target / "engine"), exclude_frozen_parameters=True)
    continued = train(engine, (3, 4))
    engine = adapted_engine(folder, 3)
    with hf_zero_stream.streaming():
        engine.load_checkpoint(str(target / "engine"), load_module_strict=False)
    return continued, train(engine, (3, 4))


def resume_and_save(folder: Path, source: Path, stage: int, again: Path) -> None:
    engine = adapted_engine(folder, stage)
    hf_zero_stream.load_state(engine, source)
    train(engine, [3])
    hf_zero_stream.load_state(engine, source)
    hf_zero_stream.save_state(engine, again, data={"position": 7})


def resume_under_fsdp2(folder: Path, source: Path, again: Path) -> None:
    announce(cpu_ram_efficient_loading=True)
    accelerator = make_accelerator()
    model = with_adapter(load("llama", folder, dtype=torch.float32))
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    hf_zero_stream.load_state(model, source, optimizer=optimizer)
    hf_zero_stream.save_state(model, again, optimizer=optimizer, data={"position": 7})


ADAPTER = "adapter_model.safetensors"


def assert_same_adapter(first: Path, second: Path, what: str) -> None:
    """ZeRO-3 keeps adapters in the dtype that PEFT gives them, fp32, and other stages in 16 bit."""
    tensors = [
        {name: value.bfloat16() for name, value in load_file(folder / ADAPTER).items()} for folder in (first, second)
    ]
    assert tensors[0].keys() == tensors[1].keys() and tensors[0], what
    assert [name for name, value in tensors[0].items() if not torch.equal(value, tensors[1][name])] == [], what


@pytest.mark.slow
def test_adapters(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = zoo_checkpoint("llama", torch.bfloat16)
    for continued, resumed in run_ranks(2, train_and_save, folder, tmp_path):
        assert resumed == continued
    source = tmp_path / "ours"
    names = {path.name for path in source.iterdir()}
    assert names - {"zero_to_fp32.py"} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "latest",
        "global_step3",
    }
    for world_size, stage in ((3, 3), (1, 2)):
        again = tmp_path / f"by {world_size}"
        run_ranks(world_size, resume_and_save, folder, source, stage, again)
        assert set(different_states(source, again)) <= {ADAPTER}
        assert_same_adapter(source, again, f"{world_size} ranks, stage {stage}")
    run_ranks(3, resume_under_fsdp2, folder, source, tmp_path / "fsdp2")
    assert set(different_states(source, tmp_path / "fsdp2")) <= {ADAPTER, "groups"}
    assert_same_adapter(source, tmp_path / "fsdp2", "FSDP2")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    loaded = peft.PeftModel.from_pretrained(base, str(source))
    assert any(param.any() for name, param in loaded.named_parameters() if "lora_B" in name)


def train_and_save_by_deepspeed(folder: Path, target: Path, stage: int) -> tuple[list[float], list[float]]:
    """Three steps; save by ours and by DeepSpeed; two more steps, and two after a resume from DeepSpeed's folder."""
    engine = adapted_engine(folder, stage)
    train(engine, range(3))
    hf_zero_stream.save_state(engine, target / "ours", data={"position": 7})
    for name, excludes in (("stock", True), ("all", False)):
        engine.save_checkpoint(str(target / name), client_state={"epoch": 2}, exclude_frozen_parameters=excludes)
    continued = train(engine, (3, 4))
    engine = adapted_engine(folder, stage)
    resumed = hf_zero_stream.load_state(engine, target / "stock")
    assert resumed.data == {"client_state": {"epoch": 2}} and engine.global_steps == 3
    return continued, train(engine, (3, 4))


def resume_from_deepspeeds(folder: Path, target: Path, stages: list[int]) -> dict[Any, list[float]]:
    """Saves what stages load, and the losses after a resume by the engine at the first one, from ours and theirs."""
    for stage in stages:
        resume_and_save(folder, target / "stock", stage, target / f"by {stage}")
    losses = {}
    for name in ("ours", "stock", "all"):
        engine = adapted_engine(folder, stages[0])
        with hf_zero_stream.streaming():
            engine.load_checkpoint(str(target / name), load_module_strict=False)
        losses[name] = train(engine, (3, 4))
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_from_deepspeeds_own_folders(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, stage: int) -> None:
    """Goes on as if nothing had happened; at another size and stage, and under FSDP2, as from a state of ours."""
    folder = zoo_checkpoint("llama", torch.bfloat16)
    for continued, resumed in run_ranks(2, train_and_save_by_deepspeed, folder, tmp_path, stage):
        assert resumed == continued
    stages = [3, 2] if stage == 3 else [stage, 3]
    losses = run_ranks(3, resume_from_deepspeeds, folder, tmp_path, stages)[0]
    assert losses["ours"] == losses["stock"] == losses["all"]
    for other in stages:
        assert set(different_states(tmp_path / "ours", tmp_path / f"by {other}")) <= {ADAPTER}
        assert_same_adapter(tmp_path / "ours", tmp_path / f"by {other}", f"stage {other}")
    run_ranks(2, resume_under_fsdp2, folder, tmp_path / "stock", tmp_path / "fsdp2")
    assert set(different_states(tmp_path / "ours", tmp_path / "fsdp2")) <= {ADAPTER, "groups"}


def test_buffers_that_layers_share(zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """VeRA's projections are buffers, each of which all its layers have."""

    def made() -> tuple[Any, torch.optim.Optimizer]:
        base = transformers.AutoModelForCausalLM.from_pretrained(zoo_checkpoint("llama"), dtype=torch.float32)
        torch.manual_seed(0)
        model = peft.get_peft_model(base, peft.VeraConfig(r=3, target_modules=["q_proj", "v_proj"]))
        return model, torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)

    model, optimizer = made()
    train_here(model, optimizer, range(2))
    hf_zero_stream.save_state(model, tmp_path, optimizer=optimizer)
    continued = train_here(model, optimizer, (2, 3))
    model, optimizer = made()
    hf_zero_stream.load_state(model, tmp_path, optimizer=optimizer)
    assert train_here(model, optimizer, (2, 3)) == continued


PROMPTS = {
    "prompts": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prefix": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "projected": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, prefix_projection=True),
}


def save_sharded_prompts(folder: Path, target: Path, kind: str) -> str:
    """Save under FSDP2; what PEFT's file has must be what the ranks hold. Returns our error, if there is one."""
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(folder), PROMPTS[kind])
    fully_shard(model)
    trained = [param for param in model.parameters() if param.requires_grad]
    try:
        hf_zero_stream.save_state(model, target, optimizer=torch.optim.AdamW(trained))
    except UnsupportedError as error:
        return str(error)
    held = model.prompt_encoder["default"].embedding.weight.full_tensor()
    assert torch.equal(load_file(target / ADAPTER)["prompt_embeddings"], held)
    assert not model.peft_config["default"].inference_mode
    return ""


@pytest.mark.parametrize("kind", PROMPTS)
def test_prompts_that_ranks_share(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, kind: str) -> None:
    """PEFT takes a prompt from its module, which cannot run where a rank has a part of it."""
    target = tmp_path / "saved"
    errors = run_ranks(2, save_sharded_prompts, zoo_checkpoint("llama"), target, kind)
    if kind == "projected":
        assert all("PrefixEncoder of several parameters" in error for error in errors), errors
        assert not list(target.rglob("*")), list(target.rglob("*"))
    else:
        assert errors == ["", ""]
