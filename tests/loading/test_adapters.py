"""PEFT adapters on streamed models: loaded ones have the file's values on every rank, new ones train as on stock's."""

import os
import shutil
from pathlib import Path
from typing import Any

import deepspeed
import peft
import pytest
import torch
from torch import nn
from transformers.integrations.deepspeed import HfDeepSpeedConfig

import hf_zero_stream
from tests.support.cluster import run_ranks
from tests.support.loading import load_with
from tests.support.parity import differences_by, ds_config, same_bits, three_losses
from tests.support.whole import whole
from tests.support.zoo import ZOO, Checkpoint, build_model


CAUSAL = "AutoModelForCausalLM"


def lora(**kwargs: Any) -> Any:
    return peft.LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "v_proj"], **kwargs)


def make_adapter(name: str, base: Path, folder: Path) -> Path:
    """A LoRA adapter with random values in both of its factors, and one module saved whole."""
    model = peft.get_peft_model(build_model(name), lora(modules_to_save=["lm_head"]))
    torch.manual_seed(7)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.normal_()
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(zoo_checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter("llama", zoo_checkpoint("llama"), tmp_path_factory.mktemp("adapter"))


def different(streamed: nn.Module, plain: nn.Module) -> list[str]:
    """As `tests.support.parity.differences`, for models of which only the base is partitioned; collective."""

    def of_tensor(name: str, mine: Any, expected: torch.Tensor) -> list[str]:
        return [] if same_bits(whole(mine), expected) else [f"{name}: values"]

    return differences_by(of_tensor, streamed, plain)


def adapter_as_path(adapter: Path, class_name: str, kwargs: dict[str, Any]) -> list[str]:
    plain = load_with("plain", class_name, adapter, {}, kwargs)
    streamed = load_with("streamed", class_name, adapter, ds_config(), kwargs)
    assert any("lora_A" in name for name, _ in streamed.named_parameters())
    assert sum(hasattr(param, "ds_tensor") for param in streamed.parameters()) > 10, "the base is partitioned"
    return different(streamed, plain)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("class_name", [CAUSAL, "LlamaForCausalLM"])
def test_adapter_folder_as_model_path(cluster: None, adapter: Path, class_name: str, world_size: int) -> None:
    """The base model streams; stock under ZeRO-3 gives the adapter's values to rank 0 alone."""
    assert run_ranks(world_size, adapter_as_path, adapter, class_name, {}) == [[]] * world_size


def test_adapter_name(cluster: None, adapter: Path) -> None:
    assert run_ranks(2, adapter_as_path, adapter, CAUSAL, {"adapter_name": "mine"}) == [[], []]


def test_adapter_beside_the_model(cluster: None, zoo_checkpoint: Checkpoint, adapter: Path, tmp_path: Path) -> None:
    """One folder with both."""
    folder = shutil.copytree(zoo_checkpoint("llama"), tmp_path / "both")
    for file in adapter.glob("adapter_*"):
        shutil.copy(file, folder)
    assert run_ranks(2, adapter_as_path, folder, CAUSAL, {}) == [[], []]


def test_adapter_kwargs(cluster: None, zoo_checkpoint: Checkpoint, adapter: Path, tmp_path: Path) -> None:
    """They say where the adapter lies: here in a subfolder of the model's folder."""
    folder = shutil.copytree(zoo_checkpoint("llama"), tmp_path / "model")
    shutil.copytree(adapter, folder / "adapter")
    kwargs = {"adapter_kwargs": {"subfolder": "adapter"}}
    assert run_ranks(2, adapter_as_path, folder, CAUSAL, kwargs) == [[], []]


def load_adapter(base: Path, adapter: Path, inside: bool, kwargs: dict[str, Any]) -> list[str]:
    """`model.load_adapter` after the load, inside `streaming()` or not."""
    plain = load_with("plain", CAUSAL, base, {}, {})
    plain.load_adapter(str(adapter), **kwargs)
    streamed = load_with("streamed", CAUSAL, base, ds_config(), {})
    torch.manual_seed(int(os.environ["RANK"]))
    if inside:
        with hf_zero_stream.streaming():
            streamed.load_adapter(str(adapter), **kwargs)
    else:
        streamed.load_adapter(str(adapter), **kwargs)
    return different(streamed, plain)


@pytest.mark.parametrize(
    "kwargs", [{}, {"adapter_name": "second", "is_trainable": True}], ids=["default", "trainable"]
)
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_load_adapter(
    cluster: None, zoo_checkpoint: Checkpoint, adapter: Path, inside: bool, kwargs: dict[str, Any]
) -> None:
    assert run_ranks(2, load_adapter, zoo_checkpoint("llama"), adapter, inside, kwargs) == [[], []]


def losses(name: str, folder: Path, dtype: torch.dtype, how: str, adapter: Path | None) -> list[float]:
    """Three steps on a new adapter, or on one from a file, after `deepspeed.initialize`."""
    config = ds_config(dtype)
    keeps_zero3_on = HfDeepSpeedConfig(config)
    model = load_with(how, ZOO[name].auto_class, folder, config, {"dtype": dtype})
    torch.manual_seed(1)
    if adapter is None:
        model = peft.get_peft_model(model, lora())
    else:
        model = peft.PeftModel.from_pretrained(model, str(adapter), is_trainable=True)
    del keeps_zero3_on
    trainable = [param for param in model.parameters() if param.requires_grad]
    assert trainable and len(trainable) < len(list(model.parameters()))
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=trainable)
    return three_losses(engine, ZOO[name].inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
@pytest.mark.sample(1)
def test_training_a_new_adapter(cluster: None, zoo_checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> None:
    folder = zoo_checkpoint(name, dtype)
    streamed = run_ranks(2, losses, name, folder, dtype, "streamed", None)
    assert streamed == run_ranks(2, losses, name, folder, dtype, "stock", None)
    assert len(set(streamed[0])) == 3, "three steps must change the loss"


def test_training_a_saved_adapter(cluster: None, zoo_checkpoint: Checkpoint, adapter: Path) -> None:
    """PEFT's own `PeftModel.from_pretrained` around a streamed model."""
    folder = zoo_checkpoint("llama")
    streamed = run_ranks(2, losses, "llama", folder, torch.float32, "streamed", adapter)
    assert streamed == run_ranks(2, losses, "llama", folder, torch.float32, "stock", adapter)
    assert len(set(streamed[0])) == 3


def initialised_loss(adapter: Path) -> list[float]:
    """The loss of an engine made of what `from_pretrained` gives for an adapter's folder, and plain loading's."""
    with torch.no_grad():
        plain = load_with("plain", CAUSAL, adapter, {}, {})
        expected = plain(**ZOO["llama"].inputs()).loss.item()
    model = load_with("streamed", CAUSAL, adapter, ds_config(), {})
    for name, param in model.named_parameters():
        param.requires_grad = "lora_" in name
    engine, *_ = deepspeed.initialize(
        model=model, config=ds_config(), model_parameters=[p for p in model.parameters() if p.requires_grad]
    )
    engine.eval()
    return [engine(**ZOO["llama"].inputs()).loss.item(), expected]


def test_adapter_path_through_initialize(cluster: None, adapter: Path) -> None:
    for loss, expected in run_ranks(2, initialised_loss, adapter):
        assert loss == pytest.approx(expected, rel=1e-6)
