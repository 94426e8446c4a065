"""Weights that are to lie elsewhere than in this rank's memory: left to transformers, refused, or streamed anyway.

What must not happen is a model that holds no values, or a save of what one rank holds of it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import deepspeed
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from transformers.distributed import DistributedConfig

import hf_zero_stream
from hf_zero_stream.checkpoint.lazy import LazyTensor
from hf_zero_stream.checkpoint.nodes import HostTensor, View
from hf_zero_stream.destinations.base import lacks_values
from hf_zero_stream.errors import LoadError, UnsupportedError
from tests.support.cluster import run_ranks
from tests.support.odd_models import Odd, OddConfig
from tests.support.parity import ds_config, unequal
from tests.support.zoo import Checkpoint


def error_of(work: Callable[[], Any]) -> str:
    try:
        work()
    except (UnsupportedError, LoadError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def load_with_sizes_of_one(folder: Path, in_zero3: bool) -> dict[str, Any]:
    """A config that asks for nothing shares the reading, streams under ZeRO-3, and is stock's on one rank."""
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
    kwargs: dict[str, Any] = {"ds_config": ds_config()} if in_zero3 else {}
    with hf_zero_stream.streaming():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, distributed_config=DistributedConfig(fsdp_size=1), **kwargs
        )
    return {"different": unequal(model, plain), "streamed": hasattr(model, "streaming_report")}


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
        found["no weights"] = error_of(load)
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
        found["sharded values"] = error_of(lambda: load(None, config=plain.config, state_dict=sharded))
        found["values on meta"] = error_of(lambda: load(None, config=plain.config, state_dict=empty))
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
    assert run_ranks(2, load_elsewhere, zoo_checkpoint("llama"), False) == [{"no weights": "no error"}] * 2


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
