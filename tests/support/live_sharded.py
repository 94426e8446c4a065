"""What ranks run to save models that FSDP2 or tensor parallelism shards, in every state that training leaves."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hf_zero_stream
from tests.support.saving import SHARD_SIZE, saves_with
from tests.support.sharded import load_sharded
from tests.support.zoo import ZOO


Way = Callable[[Path], Any]
"""Gives the model of a checkpoint, sharded and in use."""


def plain_model(checkpoint: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint)


def fully_sharded(checkpoint: Path, mesh: DeviceMesh | None = None, **options: Any) -> Any:
    """As a user does it: each layer, then the rest with the model."""
    model = plain_model(checkpoint)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def evaluated(model: Any) -> Any:
    """After an eval forward, which leaves the root's parameters gathered."""
    model.eval()
    with torch.no_grad():
        model(**ZOO["llama"].inputs())
    return model


def trained(model: Any) -> Any:
    """After one training step, each rank on its own samples."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs = {name: tensor.roll(dist.get_rank(), 1) for name, tensor in ZOO["llama"].inputs().items()}
    model.train()
    model(**inputs).loss.backward()
    optimizer.step()
    return model


def after_an_eval(checkpoint: Path) -> Any:
    model = evaluated(fully_sharded(checkpoint))
    assert not isinstance(model.lm_head.weight, DTensor)
    return model


def after_a_step(checkpoint: Path) -> Any:
    return trained(fully_sharded(checkpoint))


def after_a_step_and_an_eval(checkpoint: Path) -> Any:
    return evaluated(after_a_step(checkpoint))


def one_group(checkpoint: Path) -> Any:
    """No parameter is a DTensor now."""
    model = evaluated(fully_shard(plain_model(checkpoint)))
    assert not any(isinstance(param, DTensor) for param in model.parameters())
    return model


def offloaded(checkpoint: Path) -> Any:
    return evaluated(fully_sharded(checkpoint, offload_policy=CPUOffloadPolicy(pin_memory=False)))


def mixed_precision(checkpoint: Path) -> Any:
    """Gathered parameters are in bf16, and what is trained is not."""
    model = evaluated(fully_sharded(checkpoint, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)))
    assert model.lm_head.weight.dtype == torch.bfloat16
    return model


def other_dimension(checkpoint: Path) -> Any:
    """Columns of every matrix that is even."""
    model = plain_model(checkpoint)
    fully_shard(model, shard_placement_fn=lambda param: Shard(param.dim() - 1) if param.shape[-1] % 2 == 0 else None)
    return evaluated(model)


def checkpointed(checkpoint: Path) -> Any:
    """As accelerate's ``activation_checkpointing``: parameters have other names than entries of the state dict."""
    model = plain_model(checkpoint)
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = fully_shard(checkpoint_wrapper(layer))
    return trained(fully_shard(model))


def compiled(checkpoint: Path) -> Any:
    return torch.compile(after_an_eval(checkpoint), backend="eager")


def partly_sharded(checkpoint: Path) -> Any:
    """Each rank has the rest in full."""
    model = plain_model(checkpoint)
    fully_shard(model.model.layers[1])
    return evaluated(model)


class _Several(nn.ModuleList):
    def forward(self) -> list[Any]:
        return [evaluated(model) for model in self]


def inside_another(checkpoint: Path) -> Any:
    """As a policy beside its value model: FSDP2's root, which has gathered some of its parameters, is around both."""
    both = _Several([plain_model(checkpoint), plain_model(checkpoint)])
    for model in both:
        for layer in model.model.layers:
            fully_shard(layer)
    fully_shard(both)()
    policy: Any = both[0]
    assert not isinstance(policy.lm_head.weight, DTensor)
    vars(policy)["held by"] = both
    return policy


def hsdp(checkpoint: Path) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return evaluated(trained(fully_sharded(checkpoint, mesh)))


def on_four_ranks(checkpoint: Path) -> Any:
    """Five experts on four ranks: the last one holds none."""
    model = evaluated(fully_sharded(checkpoint))
    model.state_dict()
    sizes = [param.to_local().numel() for param in model.parameters()]
    assert dist.get_rank() < 3 or 0 in sizes
    return model


def fsdp_of_tp(checkpoint: Path) -> Any:
    """As torchtitan does it: torch's tensor parallelism first, then FSDP2 on the other dimension of the mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = plain_model(checkpoint)
    plan: dict[str, Any] = {
        "self_attn.q_proj": ColwiseParallel(output_layouts=Replicate()),
        "self_attn.o_proj": RowwiseParallel(input_layouts=Replicate()),
    }
    for layer in model.model.layers:
        fully_shard(parallelize_module(layer, mesh["tp"], plan), mesh=mesh["dp"])
    return evaluated(trained(fully_shard(model, mesh=mesh["dp"])))


def tp(checkpoint: Path) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = plain_model(checkpoint)
    plan: dict[str, Any] = {"mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    return model


def by_transformers(checkpoint: Path) -> Any:
    """Streamed, and trained."""
    model = load_sharded(transformers.AutoModelForCausalLM, checkpoint, {"fsdp_size": dist.get_world_size()})
    assert isinstance(model, FSDPModule)
    return evaluated(trained(model))


def by_transformers_in_two_ways(checkpoint: Path) -> Any:
    """What FSDP2 has gathered are DTensors still."""
    model = load_sharded(transformers.AutoModelForCausalLM, checkpoint, {"fsdp_size": 2, "tp_size": 2})
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
    assert {param.device_mesh.ndim for param in model.parameters() if isinstance(param, DTensor)} == {1}
    return model


def gathered(model: nn.Module, checkpoint: Path) -> Any:
    """A plain model with the values that torch gathers (all ranks)."""
    plain = plain_model(checkpoint)
    entries = getattr(model, "_orig_mod", model).state_dict()
    with torch.no_grad():
        for name, tensor in plain.state_dict(keep_vars=True).items():
            value = entries[name]
            tensor.copy_(value.full_tensor() if isinstance(value, DTensor) else value)
    return plain


def save_live(
    checkpoint: Path,
    folder: Path,
    ways: list[Way],
    arguments: dict[str, Any],
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Save each model our way, then as a whole; the reports."""
    options = {name: value for name, value in arguments.items() if name in ("variant",)}
    reports = {}
    for way in ways:
        model, name = way(checkpoint), way.__name__
        with saves_with(**settings):
            reports[name] = hf_zero_stream.save_pretrained(
                model, folder / name / "ours", max_shard_size=SHARD_SIZE, **arguments
            )
        whole = gathered(model, checkpoint).to(arguments.get("dtype"))
        if dist.get_rank() == 0:
            whole.save_pretrained(folder / name / "whole", max_shard_size=SHARD_SIZE, **options)
    return reports
