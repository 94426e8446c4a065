"""Adapters of PEFT, and weights that are to lie elsewhere.

- PEFT adapters on streamed models: loaded ones have the file's values on every rank, new ones train as on stock's.
- Weights that are to lie elsewhere than in this rank's memory: left to transformers, refused, or streamed anyway. What
  must not happen is a model that holds no values, or a save of what one rank holds of it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import accelerate
import deepspeed
import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from transformers.distributed import DistributedConfig
from transformers.integrations.deepspeed import HfDeepSpeedConfig

import hf_zero_stream
from hf_zero_stream.checkpoint.lazy import LazyTensor
from hf_zero_stream.checkpoint.nodes import HostTensor, View
from hf_zero_stream.destinations.base import lacks_values
from hf_zero_stream.holdings.introspection import is_streamed
from tests.support.checkpoint_files import same_bits
from tests.support.cluster import run_ranks
from tests.support.messages import message_of
from tests.support.odd_models import Odd, OddConfig
from tests.support.parity import differences_by, ds_config, load_with, three_losses, unequal, whole
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


def load_with_sizes_of_one(folder: Path, in_zero3: bool) -> dict[str, Any]:
    """A config that asks for nothing shares the reading, streams under ZeRO-3, and is stock's on one rank."""
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
    kwargs: dict[str, Any] = {"ds_config": ds_config()} if in_zero3 else {}
    with hf_zero_stream.streaming():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, distributed_config=DistributedConfig(fsdp_size=1), **kwargs
        )
    return {"different": unequal(model, plain), "streamed": is_streamed(model)}


@pytest.mark.parametrize("world_size", [1, 2])
def test_sizes_of_one(cluster: None, zoo_checkpoint: Checkpoint, world_size: int) -> None:
    for in_zero3 in (False, True):
        for found in run_ranks(world_size, load_with_sizes_of_one, zoo_checkpoint("llama"), in_zero3):
            assert found == {"different": [], "streamed": in_zero3 or world_size > 1}


def load_elsewhere(folder: Path, in_zero3: bool) -> dict[str, Any]:
    kwargs: dict[str, Any] = {"ds_config": ds_config()} if in_zero3 else {}
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)

    def load(path: Path | None = folder, **more: Any) -> Any:
        torch.manual_seed(0)
        with hf_zero_stream.streaming():
            return transformers.LlamaForCausalLM.from_pretrained(path, **more, **kwargs)

    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as variables:
        expected = load(num_hidden_layers=3)
        variables.setenv("ACCELERATE_USE_FSDP", "true")
        variables.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
        if in_zero3:  # elsewhere rank 0 alone has weights, which FSDP sends to the others
            found["variables of FSDP"] = unequal(load(num_hidden_layers=3), gathered(expected))
    with accelerate.init_empty_weights():
        found["no weights"] = message_of(load)
    if in_zero3:
        torch.set_default_device("meta")  # stands for any but the host
        try:
            model = load()
        finally:
            torch.set_default_device(None)
        found["default device"] = unequal(model, plain)
        mesh = dist.init_device_mesh("cpu", (2,))
        values = plain.state_dict()
        sharded = {**values, "lm_head.weight": DTensor.from_local(values["lm_head.weight"], mesh, [Shard(0)])}
        empty = {**values, "lm_head.weight": values["lm_head.weight"].to("meta")}
        found["sharded values"] = message_of(lambda: load(None, config=plain.config, state_dict=sharded))
        found["values on meta"] = message_of(lambda: load(None, config=plain.config, state_dict=empty))
    return found


def gathered(model: nn.Module) -> nn.Module:
    """A plain model with the values of a partitioned one."""
    plain = transformers.LlamaForCausalLM(model.config)
    for param, own in zip(model.parameters(), plain.parameters(), strict=True):
        with deepspeed.zero.GatheredParameters([param]):
            own.data.copy_(param.data)
    return plain


def test_other_arguments_and_variables(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    """Under ZeRO-3 the variables of FSDP mean nothing; without it, empty weights are what was asked for."""
    for found in run_ranks(2, load_elsewhere, zoo_checkpoint("llama"), True):
        assert found.pop("variables of FSDP") == found.pop("default device") == []
        assert "init_empty_weights" in found.pop("no weights")
        assert "lm_head.weight is a DTensor" in found.pop("sharded values")
        assert "lm_head.weight" in found["values on meta"] and "meta device" in found["values on meta"]
    assert run_ranks(2, load_elsewhere, zoo_checkpoint("llama"), False) == [{"no weights": "nothing"}] * 2


# --------------------------------------------------------------------------------------- modules that keep a list


class Recurrent(Odd):
    """torch's recurrent layers keep their weights in a list besides."""

    def build(self) -> None:
        self.recurrent = nn.LSTM(7, 5)


def load_recurrent(folder: Path, in_zero3: bool) -> dict[str, Any]:
    plain = Recurrent.from_pretrained(folder)
    with hf_zero_stream.streaming():
        model = Recurrent.from_pretrained(folder, **({"ds_config": ds_config()} if in_zero3 else {}))
    layer = model.recurrent
    listed = [getattr(layer, name) for name in layer._flat_weights_names]
    found = {"its own": all(a is b for a, b in zip(layer._flat_weights, listed, strict=True))}
    if not in_zero3:
        inputs = torch.ones(3, 1, 7)
        output, expected = layer(inputs)[0], plain.recurrent(inputs)[0]
        output.sum().backward()
        found["same"] = torch.equal(output, expected) and all(param.grad is not None for param in layer.parameters())
    return found


def test_recurrent_layers_compute_with_their_parameters(cluster: None, tmp_path: Path) -> None:
    """And not with lazy tensors that read the checkpoint at every step."""
    Recurrent(OddConfig()).save_pretrained(tmp_path)
    assert run_ranks(2, load_recurrent, tmp_path, False) == [{"its own": True, "same": True}] * 2
    assert run_ranks(2, load_recurrent, tmp_path, True) == [{"its own": True}] * 2


# ------------------------------------------------------------------------------------------------- without values


class Scaled(torch.Tensor):
    """A wrapper as torchao's: values and scales, which torch's functions never see."""

    values: torch.Tensor
    scales: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor, scales: torch.Tensor) -> Scaled:
        self = torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32, device="cpu")
        self.values, self.scales = values, scales
        return self

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values", "scales"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def lazy() -> torch.Tensor:
    def nothing(view: View) -> torch.Tensor:
        raise AssertionError("nothing is read")

    return LazyTensor.whole(HostTensor.of(torch.ones(4)), nothing)


def check_wrappers() -> None:
    mesh = dist.init_device_mesh("cpu", (2,))
    assert lacks_values(DTensor.from_local(lazy(), mesh, [Shard(0)], run_check=False))
    assert not lacks_values(DTensor.from_local(torch.ones(4), mesh, [Shard(0)]))


def test_values_are_looked_for_inside_of_wrappers(cluster: None) -> None:
    run_ranks(2, check_wrappers)
    full = torch.ones(4)
    for wrapper, expected in (
        (full, False),
        (nn.Parameter(full), False),
        (lazy(), True),
        (full.to("meta"), True),
        (nn.parameter.UninitializedParameter(), True),
        (nn.parameter.UninitializedBuffer(), True),
        (Scaled(full, full), False),
        (Scaled(full, lazy()), True),
        (Scaled(full, Scaled(full.to("meta"), full)), True),
    ):
        assert lacks_values(wrapper) is expected, type(wrapper)
