"""A PEFT model's own ``save_pretrained`` where ranks hold its adapters in parts: PEFT alone writes empty tensors."""

from pathlib import Path
from typing import Any

import deepspeed
import peft
import pytest
import torch
import torch.distributed as dist
from torch import nn

import hf_zero_stream
from hf_zero_stream.errors import ConfigError
from tests.saving.test_fsdp2 import plain_model, prepared
from tests.support import fsdp2
from tests.support.checkpoint_files import tensors_of
from tests.support.cluster import run_ranks, run_ranks_expecting_errors
from tests.support.parity import ds_config, load_with
from tests.support.saving import different


CALLS: dict[str, dict[str, Any]] = {
    "all": {},
    "one of two": {"selected_adapters": ["second"]},
    "without embeddings": {"save_embedding_layers": False},
}


def adapted(base: Any) -> Any:
    """Two adapters, one of them of the embeddings too, on a model with new tokens: these PEFT saves by itself."""
    torch.manual_seed(0)
    base.resize_token_embeddings(base.config.vocab_size + 8, mean_resizing=False)
    settings = {"init_lora_weights": False, "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"], **settings))
    model.add_adapter("second", peft.LoraConfig(r=3, target_modules=["v_proj", "embed_tokens"], **settings))
    model.base_model.set_adapter(["default", "second"])
    return model


def engine_of(checkpoint: Path) -> Any:
    config = ds_config(stage3_param_persistence_threshold=0)
    model = adapted(load_with("streamed", "AutoModelForCausalLM", checkpoint, config, {}))
    trained = [param for param in model.parameters() if param.requires_grad]
    return deepspeed.initialize(model=model, config=config, model_parameters=trained)[0]


def save(checkpoint: Path, folder: Path) -> None:
    engine = engine_of(checkpoint)
    model = engine.module
    for title, call in CALLS.items():
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            if dist.get_rank() == 0:
                model.save_pretrained(folder / "stock" / title, **call)
        with hf_zero_stream.streaming():
            model.save_pretrained(folder / "inside" / title, is_main_process=dist.get_rank() == 0, **call)
        hf_zero_stream.save_pretrained(engine, folder / "ours" / title, **call)
    with hf_zero_stream.streaming(), deepspeed.zero.GatheredParameters(list(model.parameters())):
        if dist.get_rank() == 0:  # gathered: PEFT alone, on one rank, as before
            model.save_pretrained(folder / "gathered")


def test_zero3(cluster: None, zoo_checkpoint: Any, tmp_path: Path) -> None:
    """The files of PEFT's save of the same model, gathered, to the last byte."""
    run_ranks(2, save, zoo_checkpoint("llama"), tmp_path, timeout=200)
    for title in CALLS:
        assert different(tmp_path / "inside" / title, tmp_path / "stock" / title) == [], title
        assert different(tmp_path / "ours" / title, tmp_path / "stock" / title) == [], title
    assert different(tmp_path / "gathered", tmp_path / "stock" / "all") == []
    assert any("embed_tokens" in name for name in tensors_of(tmp_path / "inside" / "all" / "second"))


def save_fsdp2(checkpoint: Path, folder: Path) -> None:
    fsdp2.announce(cpu_ram_efficient_loading=False)
    accelerator = fsdp2.make_accelerator()
    model: nn.Module = prepared(accelerator, adapted(plain_model(checkpoint)))
    accelerator.unwrap_model(model).save_pretrained(
        folder / "stock", is_main_process=accelerator.is_main_process, state_dict=accelerator.get_state_dict(model)
    )
    with hf_zero_stream.streaming():
        accelerator.unwrap_model(model).save_pretrained(folder / "inside")


def test_fsdp2(cluster: None, zoo_checkpoint: Any, tmp_path: Path) -> None:
    run_ranks(2, save_fsdp2, zoo_checkpoint("llama"), tmp_path, timeout=200)
    assert different(tmp_path / "inside", tmp_path / "stock") == []


def refused(checkpoint: Path, folder: Path) -> None:
    model = engine_of(checkpoint).module
    for call in ({"selected_adapters": ["third"]}, {"path_initial_model_for_weight_conversion": "x"}):
        with hf_zero_stream.streaming(), pytest.raises(ConfigError, match="third|path_initial"):
            model.save_pretrained(folder, **call)
    assert not list(folder.rglob("*.safetensors"))


def test_refused(cluster: None, zoo_checkpoint: Any, tmp_path: Path) -> None:
    """Arguments that have no meaning here."""
    run_ranks(2, refused, zoo_checkpoint("llama"), tmp_path / "saved")


def save_on_rank_0(checkpoint: Path, folder: Path) -> None:
    model = engine_of(checkpoint).module
    if dist.get_rank() == 0:
        with hf_zero_stream.streaming():
            model.save_pretrained(folder)


@pytest.mark.plugin("watch")
def test_rank_0_alone(cluster: None, zoo_checkpoint: Any, tmp_path: Path) -> None:
    """It does not wait for ever, and writes nothing."""
    folder = tmp_path / "saved"
    outcomes = run_ranks_expecting_errors(2, save_on_rank_0, zoo_checkpoint("llama"), folder)
    assert outcomes[0].error_type in ("SaveError", "PeerError"), outcomes[0]
    assert not list(folder.rglob("*.safetensors"))
