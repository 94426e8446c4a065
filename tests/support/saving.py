"""What ranks run to save a model our way, and what is compared with what stock saves of the whole model."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_state_dict

import hf_zero_stream
from hf_zero_stream import StreamingConfig, streaming
from hf_zero_stream.saving import plan
from tests.support.parity import load_with, three_losses
from tests.support.zoo import ZOO


Prepare = Callable[[nn.Module], None]
SHARD_SIZE = "40KB"
"""Small enough that a model of the zoo has several shards."""


@contextmanager
def saves_with(*, chunk_bytes: int = plan.CHUNK_BYTES, **settings: Any) -> Iterator[None]:
    """Inside, our saves have these settings, and what passes through buffers does so in chunks of this size."""
    with streaming(StreamingConfig(**settings)), patch.object(plan, "CHUNK_BYTES", chunk_bytes):
        yield


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def different(folder: Path, expected: Path) -> list[str]:
    """Names of files that are in one of two folders, or differ between them."""
    mine, theirs = contents(folder), contents(expected)
    return sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))


def save_stock(
    name: str, checkpoint: Path, folder: Path, dtype: torch.dtype, cast: torch.dtype | None = None, **kwargs: Any
) -> None:
    """What transformers saves of a model that was loaded without DeepSpeed, and cast then."""
    plain = load_with("plain", ZOO[name].auto_class, checkpoint, {}, {"dtype": dtype})
    for param in plain.parameters():  # transformers 5.24 keeps some in fp32, where DeepSpeed gives all its own dtype
        if param.is_floating_point():
            param.data = param.data.to(dtype)
    if cast is not None:
        plain.to(cast)
    plain.save_pretrained(folder, max_shard_size=SHARD_SIZE, **kwargs)


def save_loaded(names: list[str], checkpoints: list[Path], folder: Path, config: dict[str, Any], **kwargs: Any) -> Any:
    """Load each model streamed and save it again; the reports."""
    reports = []
    for name, checkpoint in zip(names, checkpoints, strict=True):
        model = load_with("streamed", ZOO[name].auto_class, checkpoint, config, {})
        report = hf_zero_stream.save_pretrained(model, folder / name, max_shard_size=SHARD_SIZE, **kwargs)
        reports.append(report.to_dict())
    return reports


def save_trained(
    checkpoint: Path, folder: Path, config: dict[str, Any], prepare: Prepare | None, dtypes: list[torch.dtype | None]
) -> dict[str, Any]:
    """Train three steps, then save in each of `dtypes`, and have stock save what the engine gives piece by piece."""
    # First, because a streamed model keeps ZeRO-3 on.
    plain = [load_with("plain", "AutoModelForCausalLM", checkpoint, {}, {"dtype": torch.bfloat16}) for _ in dtypes]
    model = load_with("streamed", "AutoModelForCausalLM", checkpoint, config, {})
    if prepare is not None:
        prepare(model)
    engine, *_ = deepspeed.initialize(
        model=model, config=config, model_parameters=[param for param in model.parameters() if param.requires_grad]
    )
    losses = three_losses(engine, ZOO["qwen3_moe"].inputs)
    for dtype, stock in zip(dtypes, plain, strict=True):
        name = str(dtype)
        _take_values(engine.module, stock, masters=dtype == torch.float32)
        if dtype is not None:
            stock.to(dtype)
        if dist.get_rank() == 0:
            stock.save_pretrained(folder / f"stock {name}", max_shard_size=SHARD_SIZE)
        hf_zero_stream.save_pretrained(engine, folder / f"ours {name}", max_shard_size=SHARD_SIZE, dtype=dtype)
    return {"losses": losses}


def _take_values(model: nn.Module, plain: nn.Module, *, masters: bool) -> None:
    """Give `plain` the values of a model in use, by DeepSpeed's public functions."""
    from deepspeed.utils import safe_get_full_fp32_param

    with torch.no_grad():
        for param, mine in zip(model.parameters(), plain.parameters(), strict=True):
            full = safe_get_full_fp32_param(param) if masters and param.requires_grad else None
            with deepspeed.zero.GatheredParameters([param], enabled=hasattr(param, "ds_id")):
                mine.data = (param.data if full is None else full).detach().cpu().clone().view(mine.shape)


@contextmanager
def gathers_counted() -> Iterator[list[str]]:
    """Every time that DeepSpeed or torch gathers the values of a whole model to save it."""
    calls: list[str] = []

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(original.__name__)
            return original(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for owner, name in (
            (deepspeed.DeepSpeedEngine, "_zero3_consolidated_16bit_state_dict"),
            (torch_state_dict, "get_model_state_dict"),
        ):
            stack.enter_context(patch.object(owner, name, counted(getattr(owner, name))))
        yield calls


def save_both_ways(accelerator: Any, model: Any, folder: Path) -> dict[str, int]:
    """As scripts do it, without streaming and with; how often the model was gathered."""
    found = {}
    for name, context in (("stock", nullcontext()), ("ours", hf_zero_stream.streaming())):
        with context, gathers_counted() as gathers:
            accelerator.unwrap_model(model).save_pretrained(
                folder / name / "state dict",
                is_main_process=accelerator.is_main_process,
                save_function=accelerator.save,
                state_dict=accelerator.get_state_dict(model),
                max_shard_size=SHARD_SIZE,
            )
            accelerator.save_model(model, folder / name / "save_model", max_shard_size=SHARD_SIZE)
        accelerator.wait_for_everyone()
        found[name] = len(gathers)
    return found
