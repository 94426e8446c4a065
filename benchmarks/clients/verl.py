"""verl's FSDP engine, sharded by FSDP2, and what it gives to a rollout after each step."""

import argparse
import os
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
import transformers


os.environ["VERL_PLATFORM"] = "cpu"

from verl.plugin.platform.platform_cuda import PlatformCUDA  # noqa: E402
from verl.plugin.platform.platform_manager import PlatformRegistry  # noqa: E402


@PlatformRegistry.register(platform="cpu")
class CPU(PlatformCUDA):
    """The platform that verl's users may register for other devices: here for none."""

    device_name = "cpu"
    device_module: Any = SimpleNamespace(
        empty_cache=lambda: None,
        synchronize=lambda: None,
        memory_allocated=lambda: 0,
        memory_reserved=lambda: 0,
        mem_get_info=lambda: (0, 0),
    )

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return "cpu"

    def communication_backend_name(self) -> str:
        return "gloo"


from verl.models.transformers import monkey_patch  # noqa: E402
from verl.trainer.config import CheckpointConfig  # noqa: E402
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig  # noqa: E402
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine  # noqa: E402

from benchmarks.clients.common import STEPS, Sent, assert_rows, batch, in_memory, report  # noqa: E402
from tests.support.streams import counted_gathers  # noqa: E402


# It changes a class that TRL 1.16 has no more.
monkey_patch.is_trl_available = lambda: False


def train(settings: argparse.Namespace, **model: Any) -> None:
    """Three steps, and what the engine gives after each, which is the same on all ranks."""
    assert_rows("verl")
    dist.init_process_group("gloo")
    transformers.set_seed(42)
    engine = FSDPEngine(
        HFModelConfig(
            path=str(settings.folder / "model"),
            load_tokenizer=False,
            override_config={"attn_implementation": "sdpa"},
            use_remove_padding=False,
            enable_gradient_checkpointing=False,
            **model,
        ),
        FSDPEngineConfig(
            strategy="fsdp2",
            mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
            use_torch_compile=False,
        ),
        FSDPOptimizerConfig(lr=1e-2, total_training_steps=STEPS),
        CheckpointConfig(),
    )
    engine.initialize()
    losses, sent = [], Sent()
    with counted_gathers() as gathers:
        for step in range(STEPS):
            ids = batch(step)
            loss = engine.module(input_ids=ids, labels=ids).loss
            engine.optimizer_zero_grad()
            loss.backward()
            engine.optimizer_step()
            losses.append(loss.detach())
            gathers.clear()
            tensors, config = engine.get_per_tensor_param(base_sync_done=True)
            assert config is None
            sent.note(tensors)
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, sent.digest())
    assert len(set(digests)) == 1 and sent.count > STEPS
    digest = in_memory(engine.module)
    report(settings.folder, engine.module, losses, streamed=not gathers, memory=digest, files=sent.digest())


def fsdp2(settings: argparse.Namespace) -> None:
    train(settings)


def fsdp2_lora(settings: argparse.Namespace) -> None:
    """Its weights merged, by verl in the model that it trains."""
    train(settings, lora_rank=3, target_modules=["q_proj", "v_proj"], lora={"merge": True})
