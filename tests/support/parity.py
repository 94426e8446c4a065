"""What ranks run to compare a streamed model with plain `from_pretrained`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import transformers
from torch import nn

import hf_zero_stream


def ds_config(dtype: torch.dtype = torch.float32, **zero: Any) -> dict[str, Any]:
    """A ZeRO-3 config that trains on a CPU; `zero` adds to its `zero_optimization`."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "fp16": {"enabled": dtype == torch.float16},
        "zero_optimization": {"stage": 3, **zero},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }


def differences(streamed: nn.Module, plain: nn.Module, dtype: torch.dtype) -> list[str]:
    """Every way in which a partitioned model differs from a plain one, bit for bit; collective over ranks.

    Floating-point parameters of `plain` are cast to `dtype` first: DeepSpeed wants one dtype for all of them.
    """

    def of_tensor(name: str, mine: Any, expected: torch.Tensor) -> list[str]:
        if not isinstance(expected, nn.Parameter):
            return [] if same_bits(mine, expected) else [f"buffer {name}"]
        if expected.is_floating_point():
            expected = expected.detach().to(dtype)
        found = _faults_of_padding(name, mine)
        with deepspeed.zero.GatheredParameters([mine]):
            if not same_bits(mine.data, expected):
                found.append(f"parameter {name}: {tuple(mine.shape)} {mine.dtype}, {tuple(expected.shape)}")
        return found

    return differences_by(of_tensor, streamed, plain)


def differences_by(
    of_tensor: Callable[[str, Any, torch.Tensor], list[str]], model: nn.Module, plain: nn.Module
) -> list[str]:
    """Differences in names, ties, modes and what is trained; and those that `of_tensor` finds in each tensor."""
    found: list[str] = []
    ours, theirs = dict(_named(model)), dict(_named(plain))
    if ours.keys() != theirs.keys():
        found.append(f"names: {sorted(ours.keys() ^ theirs.keys())}")
    for name in sorted(ours.keys() & theirs.keys()):
        mine, expected = ours[name], theirs[name]
        if mine.requires_grad != expected.requires_grad:
            found.append(f"{name}: requires_grad {mine.requires_grad}, expected {expected.requires_grad}")
        found += of_tensor(name, mine, expected)
    if _ties(model) != _ties(plain):
        found.append(f"ties: {_ties(model)}, expected {_ties(plain)}")
    if model.training != plain.training:
        found.append(f"training: {model.training}, expected {plain.training}")
    return found


def unequal(model: nn.Module, plain: nn.Module) -> list[str]:
    """Names of the parameters whose values differ from a plain model's, wherever `model` has them; collective."""
    found = []
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        with deepspeed.zero.GatheredParameters([param], enabled=hasattr(param, "ds_id")):
            if not same_bits(param.data, expected.data):
                found.append(name)
    return found


def _named(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


def same_bits(mine: torch.Tensor, expected: torch.Tensor) -> bool:
    if mine.shape != expected.shape or mine.dtype != expected.dtype:
        return False
    as_bytes = [tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for tensor in (mine, expected)]
    return torch.equal(*as_bytes)


def _faults_of_padding(name: str, param: Any) -> list[str]:
    found = []
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    part = param.ds_tensor.numel()
    if part * world_size < param.ds_numel:
        found.append(f"{name}: partitions of {part} do not cover {param.ds_numel}")
    if param.ds_tensor[max(0, min(part, param.ds_numel - part * rank)) :].any():
        found.append(f"{name}: padding is not zero")
    return found


def _ties(model: nn.Module) -> list[list[str]]:
    groups: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(param), []).append(name)
    return sorted(sorted(names) for names in groups.values() if len(names) > 1)


def load_and_compare(
    auto_class: str, folder: Path, dtype: torch.dtype, ds_dtype: torch.dtype, kwargs: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Load `folder` plain and streamed; what differs, the loading infos and the report.

    Both start from the same random numbers, so that parameters which are not in the checkpoint can be compared too.
    """
    kwargs = {"dtype": dtype, "output_loading_info": True, **(kwargs or {})}
    torch.manual_seed(0)
    plain, plain_info = getattr(transformers, auto_class).from_pretrained(folder, **kwargs)
    torch.manual_seed(0)
    streaming_class = getattr(hf_zero_stream, f"Streaming{auto_class}")
    streamed, info = streaming_class.from_pretrained(folder, ds_config=ds_config(ds_dtype), **kwargs)
    return {
        "differences": differences(streamed, plain, ds_dtype),
        "info": info,
        "plain_info": plain_info,
        "report": streamed.streaming_report.to_dict(),
    }


def three_losses(engine: Any, inputs: Callable[[], dict[str, torch.Tensor]]) -> list[float]:
    """The losses of three training steps of a DeepSpeed engine, each on the same inputs."""
    engine.train()
    found = []
    for _ in range(3):
        torch.manual_seed(0)
        loss = engine(**{name: values.to(engine.device) for name, values in inputs().items()}).loss
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found
