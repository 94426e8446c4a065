"""Loads of one checkpoint, plain and streamed: errors, values, and every difference.

- What ranks run to compare a streamed model with plain `from_pretrained`.
- What ranks run to load one checkpoint plain and streamed with the same arguments, errors included.
- The values of models that are partitioned or sharded, whole.
"""

import copy
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.integrations.deepspeed import HfDeepSpeedConfig

import hf_zero_stream
from hf_zero_stream.holdings.introspection import lies_in_files
from tests.support.checkpoint_files import same_bits


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


def _faults_of_padding(name: str, param: Any) -> list[str]:
    found: list[str] = []
    if lies_in_files(param):
        return found
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


Probe = Callable[[Any], Any]
"""What to look at in a loaded model besides its values."""


def find_class(name: str) -> Any:
    """A class of transformers by its name, or any other by `module:name`."""
    module, _, attribute = name.rpartition(":")
    return getattr(importlib.import_module(module) if module else transformers, attribute)


def load_with(how: str, class_name: str, path: Path | str | None, ds: dict[str, Any], kwargs: dict[str, Any]) -> Any:
    """`from_pretrained` under plain transformers, under stock's ZeRO-3, or streamed; always the same random numbers.

    Auto classes are streamed through their Streaming class, model classes inside `streaming()`.
    """
    kwargs = copy.deepcopy(kwargs)
    torch.manual_seed(0)
    model_class = find_class(class_name)
    if how == "streamed":
        own_class = getattr(hf_zero_stream, f"Streaming{class_name}", None)
        if own_class is not None:
            return own_class.from_pretrained(path, ds_config=ds, **kwargs)
        with hf_zero_stream.streaming():
            return model_class.from_pretrained(path, ds_config=ds, **kwargs)
    keeps_zero3_on = HfDeepSpeedConfig(ds) if how == "stock" else None
    try:
        return model_class.from_pretrained(path, **kwargs)
    finally:
        del keeps_zero3_on


def compare(
    class_name: str,
    path: Path | str | None,
    kwargs: dict[str, Any],
    ds_dtype: torch.dtype = torch.float32,
    probe: Probe | None = None,
) -> dict[str, Any]:
    """Load plain and streamed: what differs, loading infos, what `probe` sees in both, and the report."""
    kwargs = {"output_loading_info": True, **kwargs}
    plain, plain_info = load_with("plain", class_name, path, {}, kwargs)
    streamed, info = load_with("streamed", class_name, path, ds_config(ds_dtype), kwargs)
    return {
        "differences": differences(streamed, plain, ds_dtype),
        "info": info,
        "plain_info": plain_info,
        "probes": None if probe is None else (probe(streamed), probe(plain)),
        "report": streamed.streaming_report.to_dict(),
    }


def assert_same(results: list[dict[str, Any]], bytes_are_read: bool = True) -> None:
    """What `compare` found on every rank is that there is no difference, and that weights were streamed."""
    for result in results:
        assert not result["differences"], result["differences"]
        assert result["info"] == result["plain_info"], (result["info"], result["plain_info"])
        if result["probes"] is not None:
            assert result["probes"][0] == result["probes"][1], result["probes"]
    read = sum(rank["bytes_read"] for rank in results[0]["report"]["ranks"])
    assert bool(read) == bytes_are_read


def errors_of(
    hows: list[str], class_name: str, path: Path | str | None, kwargs: dict[str, Any]
) -> list[tuple[str, str] | None]:
    """For each way of loading, the type and the text of the error that it raises, or None if it loads."""
    # An error may come before ranks talk to each other; one that is done early must not leave while others connect.
    dist.barrier()
    found: list[tuple[str, str] | None] = []
    for how in hows:
        try:
            load_with(how, class_name, path, ds_config(), kwargs)
        except Exception as error:
            found.append((type(error).__name__, str(error)))
        else:
            found.append(None)
    return found


def whole(tensor: Any) -> torch.Tensor:
    """A copy of a parameter's or a buffer's values (all ranks)."""
    if hasattr(tensor, "ds_id"):
        with deepspeed.zero.GatheredParameters([tensor]):
            return tensor.detach().clone()
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def whole_values(model: Any) -> dict[str, torch.Tensor]:
    """All parameters and buffers of a state dict, whole, by the names that they have without wrappers (all ranks)."""
    found = {}
    persistent = model.state_dict().keys()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        clean = name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")
        if isinstance(tensor, nn.Parameter) or name in persistent:
            found[clean] = whole(tensor)
    return found
