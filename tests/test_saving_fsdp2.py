"""accelerate's and the Trainer's ways to save FSDP2 models, inside ``streaming()``: stock's files, and no gather."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.checkpoint import state_dict as torch_state_dict

from tests.accelerate_fsdp2 import fsdp2_accelerator
from tests.cluster import run_ranks
from tests.live_sharded import evaluated, gathered, plain_model
from tests.saving import SHARD_SIZE, different
from tests.zoo import ZOO


Checkpoint = Callable[..., Path]


@contextmanager
def gathers_counted() -> Iterator[list[str]]:
    """Every time that torch gathers the state dict of a whole model."""
    calls: list[str] = []
    original = torch_state_dict.get_model_state_dict

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append("gathered")
        return original(*args, **kwargs)

    torch_state_dict.get_model_state_dict = counted
    try:
        yield calls
    finally:
        torch_state_dict.get_model_state_dict = original


def prepared(accelerator: Any, model: Any) -> Any:
    """The model after ``prepare``, a training step and an eval."""
    trainable = [param for param in model.parameters() if param.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(trainable, lr=1e-2))
    model.train()
    accelerator.backward(model(**ZOO["llama"].inputs()).loss)
    optimizer.step()
    return evaluated(model)


def save_both_ways(accelerator: Any, model: Any, folder: Path) -> dict[str, int]:
    """As scripts do it, without streaming and with; how often the model was gathered."""
    import hf_zero_stream

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
            if accelerator.is_main_process or name == "ours" or accelerator.is_fsdp2:
                accelerator.save_model(model, folder / name / "save_model", max_shard_size=SHARD_SIZE)
        accelerator.wait_for_everyone()
        found[name] = len(gathers)
    return found


def with_accelerate(checkpoint: Path, folder: Path) -> dict[str, dict[str, int]]:
    found = {}
    for name, arguments in {
        "plain": {},
        "checkpointed": {"activation_checkpointing": True},
        "efficient": {"cpu_ram_efficient_loading": True},
        "mixed": {"mixed_precision": "bf16"},
    }.items():
        accelerator = fsdp2_accelerator(**arguments)
        model = prepared(accelerator, plain_model(checkpoint))
        found[name] = save_both_ways(accelerator, model, folder / name)
        whole = gathered(model, checkpoint)
        if dist.get_rank() == 0:
            whole.save_pretrained(folder / name / "whole" / "state dict", max_shard_size=SHARD_SIZE)
            with pytest.MonkeyPatch.context() as patches:
                patches.setattr(accelerator, "get_state_dict", lambda model: model.state_dict())
                accelerator.save_model(whole, folder / name / "whole" / "save_model", max_shard_size=SHARD_SIZE)
    return found


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3"])
def test_accelerate(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, name: str) -> None:
    for found in run_ranks(2, with_accelerate, zoo_checkpoint(name), tmp_path):
        for of_model, gathers in found.items():
            assert gathers == {"stock": 2, "ours": 0}, of_model
            for how in ("state dict", "save_model"):
                ours, stock, whole = (tmp_path / of_model / who / how for who in ("ours", "stock", "whole"))
                assert different(ours, whole) == [], (of_model, how)
                expected = tensors(stock)
                if name == "qwen3":  # a tied head, which stock gathers once more, and may save twice
                    assert expected.pop("lm_head.weight", None) in (None, expected["model.embed_tokens.weight"])
                assert tensors(ours) == expected, (of_model, how)


def tensors(folder: Path) -> dict[str, Any]:
    """Names and bytes of tensors. Stock gathers them in another order, so that its shards may be others."""
    values = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
    return {name: (value.dtype, value.shape, value.numpy().tobytes()) for name, value in values.items()}
