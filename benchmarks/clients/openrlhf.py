"""OpenRLHF's actor, critic and reward model, and its ``DeepspeedStrategy.save_model``."""

import argparse
import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import transformers
import transformers.trainer  # looks for flash_attn, before there is one


def stand_in(name: str, *functions: str) -> None:
    """A module that is imported by name only: flash_attn has no build for CPUs."""
    module: Any = types.ModuleType(name)
    module.__spec__, module.__path__ = importlib.machinery.ModuleSpec(name, None), []
    vars(module).update(dict.fromkeys(functions))
    sys.modules[name] = module


stand_in("flash_attn")
stand_in("flash_attn.bert_padding", "index_first_axis", "pad_input", "rearrange", "unpad_input")
stand_in("flash_attn.utils")
stand_in("flash_attn.utils.distributed", "all_gather")

from openrlhf.models import Actor, get_llm_for_sequence_regression  # noqa: E402
from openrlhf.models import actor as of_actor  # noqa: E402
from openrlhf.utils.deepspeed import deepspeed as of_openrlhf  # noqa: E402
from openrlhf.utils.deepspeed.deepspeed_utils import get_train_ds_config  # noqa: E402

from benchmarks.clients.common import (  # noqa: E402
    ADAMW,
    STEPS,
    TRAINED,
    batch,
    in_memory,
    of_files,
    rank,
    report,
    world_size,
)


# It changes a function of transformers 5.15, which OpenRLHF asks for, and which returns something else since.
of_actor._patch_zero3_weight_mapping = lambda: None


def config_of(optimizer: dict[str, Any] | None = None) -> dict[str, Any]:
    made = get_train_ds_config(offload=False, adam_offload=False, stage=3, zpg=1, optim_config=optimizer)
    return made | {"train_micro_batch_size_per_gpu": 2, "train_batch_size": 2 * world_size()}


class Strategy(of_openrlhf.DeepspeedStrategy):
    """Its ``save_model`` without its launch, which asks for CUDA."""

    def __init__(self) -> None:
        self.args = types.SimpleNamespace(ds=types.SimpleNamespace(zero_stage=3, tensor_parallel_size=1))
        self.stage, self.ds_tensor_parallel_size = 3, 1

    def _unwrap_model(self, model: Any) -> Any:
        return model.module


class NoTokenizer:
    def save_pretrained(self, folder: str) -> None:
        pass


def run(settings: argparse.Namespace, model: Any, loss_of: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config_of(ADAMW))
    losses = []
    for step in range(STEPS):
        loss = loss_of(engine, batch(step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    of_openrlhf.torch_dist_barrier_and_cuda_sync = dist.barrier
    saved = settings.folder / TRAINED / "final"
    Strategy().save_model(engine, NoTokenizer(), str(saved))
    dist.barrier()
    report(settings.folder, model, losses, memory=in_memory(model), files=of_files(saved) if rank() == 0 else "")


def begin() -> dict[str, Any]:
    deepspeed.init_distributed("gloo")
    transformers.set_seed(42)
    return {"attn_implementation": "sdpa", "ds_config": config_of()}


def actor(settings: argparse.Namespace) -> None:
    made = Actor(str(settings.folder / "model"), **begin())
    run(settings, made.model, lambda engine, ids: engine(input_ids=ids, labels=ids).loss)


def critic(settings: argparse.Namespace) -> None:
    def loss_of(engine: Any, ids: torch.Tensor) -> torch.Tensor:
        mask = torch.ones_like(ids)
        return (engine(ids, action_mask=mask[:, :8], attention_mask=mask) - 1).pow(2).mean()

    run(settings, get_llm_for_sequence_regression(str(settings.folder / "model"), "critic", **begin()), loss_of)


def reward(settings: argparse.Namespace) -> None:
    def loss_of(engine: Any, ids: torch.Tensor) -> torch.Tensor:
        chosen, rejected = engine(ids, attention_mask=torch.ones_like(ids))
        return -torch.nn.functional.logsigmoid(chosen - rejected).mean()

    path = str(settings.folder / "model")
    run(settings, get_llm_for_sequence_regression(path, "reward", init_value_head=True, **begin()), loss_of)
