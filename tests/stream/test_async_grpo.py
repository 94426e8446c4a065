"""TRL's AsyncGRPO works under ZeRO-3: the server gets whole tensors. Without streaming(), their shapes are (0,)."""

import queue
import shutil
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoTokenizer

import hf_zero_stream
from examples.vllm_on_cpu import stand_in
from tests.support.checkpoint_files import differing
from tests.support.cluster import run_ranks
from tests.support.engine_servers import VLLMServer
from tests.support.streams import counted_gathers
from tests.support.trainers import ZERO_3, arguments_of, join_as_launched, make_tokenizer
from tests.support.zoo import Checkpoint


STEPS = 2


class Rollouts:
    """A queue that always has another rollout."""

    def __init__(self) -> None:
        self._taken = count()

    def qsize(self) -> int:
        return 1

    def get(self, timeout: float) -> Any:
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        number = next(self._taken)
        return RolloutSample(
            prompt=[{"role": "user", "content": "a"}],
            completion=[{"role": "assistant", "content": "b"}],
            input_ids=np.array([3, 4, 5, 6 + number % 2]),
            completion_mask=np.array([0, 0, 1, 1]),
            old_log_probs=np.array([0.0, 0.0, -1.0, -1.0], dtype=np.float32),
            advantage=1.0 - 2 * (number % 2),
            model_version=1,
            group_id=number // 2,
            metrics={"reward": 1.0},
        )


class Worker:
    """Knows its rollouts beforehand."""

    def __init__(self) -> None:
        self.rollout_buffer = Rollouts()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        self.versions: list[int] = []

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def check_health(self, stale_after_s: float) -> None: ...

    def update_model_version(self, model_version: int) -> None:
        self.versions.append(model_version)


def attention(q: Any, k: Any, v: Any, ends_q: Any, ends_k: Any, *_: Any, softmax_scale: float, **__: Any) -> Any:
    """FlashAttention's for several sequences, in place of a kernel that wants a GPU."""
    found = []
    for (a, b), (c, d) in zip(pairwise(ends_q), pairwise(ends_k), strict=True):
        mask = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - b + a)
        parts = (each.transpose(0, 1) for each in (q[a:b], k[c:d], v[c:d]))
        found.append(scaled_dot_product_attention(*parts, mask, scale=softmax_scale, enable_gqa=True).transpose(0, 1))
    return torch.cat([*found, 0 * q[ends_q[-1] :]])


def train(folder: Path, output: Path, url: str) -> dict[str, Any]:
    """The whole parameters at the end, and the versions that the worker heard of, on rank 0."""
    stand_in(output / f"rank {dist.get_rank()}")
    from datasets import Dataset
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attention)
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: 1.0  # asks CUDA
    join_as_launched()
    args = arguments_of(
        output / "out",
        AsyncGRPOConfig,
        per_device_train_batch_size=2,
        vllm_server_base_url=url,
        max_steps=STEPS,
        num_generations=2,
        gradient_accumulation_steps=1,
        learning_rate=1e-2,
        gradient_checkpointing=False,
        save_strategy="no",
        **ZERO_3,
    )
    with hf_zero_stream.streaming(), counted_gathers() as gathers:
        worker = Worker() if dist.get_rank() == 0 else None
        trainer = AsyncGRPOTrainer(
            model=str(folder),
            args=args,
            train_dataset=Dataset.from_dict({"prompt": ["a small model learns words"] * 16}),
            processing_class=AutoTokenizer.from_pretrained(folder),
            rollout_worker=worker,
        )
        trainer.train()
    assert not gathers
    whole = {}
    for name, param in trainer.accelerator.unwrap_model(trainer.model).named_parameters():
        with deepspeed.zero.GatheredParameters([param]):
            whole[name] = param.data.clone()
    return {"whole": whole, "versions": worker.versions if worker else []}


def test_under_zero_3(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = shutil.copytree(zoo_checkpoint("llama"), tmp_path / "model")
    make_tokenizer(folder)
    server = VLLMServer(str(folder))
    try:
        found, _ = run_ranks(2, train, folder, tmp_path, server.url)
    finally:
        server.close()
    assert found["versions"] == list(range(1, STEPS + 2)) and len(server.updates) == STEPS + 1
    assert differing(server.updates[-1], found["whole"]) == []
    assert len(differing(server.updates[0], found["whole"])) > 5, "the steps change the weights"
