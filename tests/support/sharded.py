"""What ranks run to compare a model that transformers shards while it loads with a plain one, bit for bit."""

import copy
import traceback
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

import hf_zero_stream
from hf_zero_stream.holdings import fsdp
from hf_zero_stream.holdings.fsdp import dtensor_shard_of
from tests.support.checkpoint_files import same_bits
from tests.support.parity import differences_by, find_class


Sizes = dict[str, Any]
"""Arguments of a DistributedConfig."""


def world_of(sizes: Sizes) -> int:
    return prod(size for name, size in sizes.items() if name != "ep_size")


def plan_of(folder: Path, sizes: Sizes, rank: int, **kwargs: Any) -> Any:
    world_size = world_of(sizes)
    return hf_zero_stream.plan(str(folder), world_size=world_size, rank=rank, distributed_config=sizes, **kwargs)


def even_model(name: str) -> Any:
    """A tiny model of sizes that 2 and 4 divide: only such ones compute under tensor and expert parallelism."""
    sizes = dict(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
    )
    torch.manual_seed(5)
    if name == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    experts = dict(moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, experts_implementation="eager")
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **experts))


def even_inputs() -> dict[str, torch.Tensor]:
    tokens = torch.arange(2, 18).reshape(2, 8)
    return {"input_ids": tokens, "labels": tokens}


def sharded_differences(sharded: nn.Module, plain: nn.Module) -> list[str]:
    """Every way in which a sharded model differs from a plain one; each rank looks at what it holds (all ranks)."""
    managed = fsdp.managed_params(sharded)

    def of_tensor(name: str, mine: torch.Tensor, expected: torch.Tensor) -> list[str]:
        kind = "parameter" if isinstance(expected, nn.Parameter) else "buffer"
        if mine.shape != expected.shape:
            return [f"{kind} {name}: shape {tuple(mine.shape)}, expected {tuple(expected.shape)}"]
        if mine.dtype != expected.dtype:
            return [f"{kind} {name}: {mine.dtype}, expected {expected.dtype}"]
        pairs = [_cut(mine, expected, managed.get(name))]
        if isinstance(mine, DTensor) and name not in managed:
            pairs.append((_whole(mine), expected))
        # Of a parameter without elements FSDP2 gives every rank the same empty shard.
        wrong = expected.numel() and not all(same_bits(*pair) for pair in pairs)
        return [f"{kind} {name}: wrong values"] if wrong else []

    return differences_by(of_tensor, sharded, plain)


def _whole(mine: DTensor) -> torch.Tensor:
    """The whole tensor, as torch gathers it (all ranks); by hand where torch 2.11 refuses its ``_StridedShard``."""
    try:
        return mine.full_tensor()
    except ValueError:
        (placement,) = mine.placements
        local = mine.to_local().contiguous()
        everyone = [torch.empty_like(local) for _ in range(mine.device_mesh.size())]
        dist.all_gather(everyone, local, group=mine.device_mesh.get_group())
        split = [each.chunk(placement.split_factor, placement.dim) for each in everyone]
        return torch.cat([part[i] for i in range(placement.split_factor) for part in split], placement.dim)


def _cut(mine: torch.Tensor, expected: torch.Tensor, record: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What this rank holds of a parameter, and the same part of the whole one, cut by torch's own ``chunk``."""
    if not isinstance(mine, DTensor):
        return mine.detach(), expected.detach()
    if record is None:
        box = dtensor_shard_of("", mine, None).box
        for dim, intervals in enumerate(box.intervals):
            expected = torch.cat([expected.narrow(dim, start, stop - start) for start, stop in intervals], dim)
        return mine.to_local().detach(), expected.detach()
    inner = fsdp.inner_spec(record)
    if inner is not None:
        box = dtensor_shard_of("", inner, None).box
        for dim, intervals in enumerate(box.intervals):
            expected = torch.cat([expected.narrow(dim, start, stop - start) for start, stop in intervals], dim)
    dim, parts, part, _ = fsdp.chunk_of(record)
    chunks = expected.detach().chunk(parts, dim)
    chunk = chunks[part] if part < len(chunks) else expected.detach().narrow(dim, 0, 0)
    return mine.to_local().detach(), chunk


def moved(model: nn.Module) -> list[str]:
    """Parameters that FSDP2 would copy into memory of its own when training begins."""
    found = []
    for name, record in fsdp.managed_params(model).items():
        before = record.sharded_param._local_tensor.data_ptr()
        record.reset_sharded_param()
        if record.sharded_param._local_tensor.data_ptr() != before:
            found.append(f"{name}: moved by FSDP2")
    return found


def load_sharded(model_class: Any, folder: Path | None, sizes: Sizes, **kwargs: Any) -> Any:
    """Streamed, with rank 0's random numbers as those of a plain load that starts from seed 0."""
    torch.manual_seed(dist.get_rank())
    sharding = {"distributed_config": DistributedConfig(**sizes)} if sizes else {}
    with hf_zero_stream.streaming():
        return model_class.from_pretrained(folder, **sharding, **kwargs)


def compare_sharded(
    class_name: str, folder: Path | None, of_sizes: list[Sizes], **kwargs: Any
) -> list[dict[str, Any]]:
    """Load plain, and sharded in each of `of_sizes`: what differs, and this rank's report.

    `kwargs` may bring its own arguments that shard, with ``{}`` for the sizes.
    """
    sharding = ("tp_plan", "tp_size", "device_mesh", "distributed_config")
    model_class = find_class(class_name)
    found = []
    for sizes in of_sizes:
        torch.manual_seed(0)
        of_plain = {name: value for name, value in kwargs.items() if name not in sharding}
        plain, plain_info = model_class.from_pretrained(folder, output_loading_info=True, **copy.deepcopy(of_plain))
        model, info = load_sharded(model_class, folder, sizes, output_loading_info=True, **kwargs)
        differing = sharded_differences(model, plain) + moved(model)
        if info != plain_info:
            differing.append(f"info: {info}, expected {plain_info}")
        extra, plain_extra = _extra_states(model), _extra_states(plain)
        if extra != plain_extra:
            differing.append(f"extra state: {extra}, expected {plain_extra}")
        report = model.streaming_report
        found.append(
            {
                "sizes": sizes,
                "differences": differing,
                "sharded": sum(isinstance(param, DTensor) for param in model.parameters()),
                "report": report.ranks[dist.get_rank()],
                "digest": report.digest,
            }
        )
    return found


def _extra_states(model: nn.Module) -> dict[str, Any]:
    return {name: value.tolist() for name, value in model.state_dict().items() if name.endswith("_extra_state")}


Case = tuple[str, Path | None, dict[str, Any]]
"""The class, the folder, and other arguments of ``from_pretrained``."""


def wrong_cases(cases: dict[str, Case], of_sizes: list[Sizes]) -> dict[str, Any]:
    """What is not as in plain loading, by the name of the case: differences, an error, or that nothing is sharded."""
    transformers.utils.logging.set_verbosity_error()
    found: dict[str, Any] = {}
    for name, (class_name, folder, kwargs) in cases.items():
        for sizes in of_sizes:
            dist.barrier()
            try:
                (result,) = compare_sharded(class_name, folder, [sizes], **kwargs)
            except Exception as error:
                found[f"{name} {sizes}"] = f"{type(error).__name__}: {error}\n{traceback.format_exc()[-1500:]}"
                continue
            wrong = result["differences"] + ([] if result["sharded"] else ["nothing is sharded"])
            if wrong:
                found[f"{name} {sizes}"] = wrong
    return found
