"""OpenRLHF's trainer of an actor, and engines: actors of Ray, which run OpenRLHF's own code for vLLM's workers."""

import argparse
import os
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import deepspeed
import ray
import torch
import torch.distributed as dist
from torch.multiprocessing import reductions

from benchmarks.clients.common import ADAMW, STEPS, Sent, assert_rows, batch, in_memory, rank, report
from benchmarks.clients.openrlhf import Actor, begin, config_of, stand_in


stand_in("aiohttp")
stand_in("vllm", "SamplingParams")
stand_in("vllm.inputs", "TokensPrompt")
stand_in("vllm.utils", "random_uuid")

from openrlhf.trainer.ray import ppo_actor, utils  # noqa: E402
from openrlhf.trainer.ray.vllm_worker_wrap import WorkerWrap  # noqa: E402
from openrlhf.utils import distributed_util  # noqa: E402

from tests.support.streams import counted_gathers  # noqa: E402


ENGINES = 2


class Group:
    """In place of a group of NCCL's, whose ends are rank 0 and the engines."""

    def __init__(self, address: str, port: int, rank: int, world_size: int, device: Any) -> None:
        store = dist.TCPStore(address, port, world_size, rank == 0, timedelta(minutes=2), wait_for_workers=False)
        self._group = dist.ProcessGroupGloo(store, rank, world_size, timedelta(minutes=2))

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self._group.broadcast([tensor], options).wait()


def without_cuda(number: int) -> None:
    """What OpenRLHF asks of CUDA, for both ends; `number`: of the GPU that this end would be on."""
    torch.cuda.synchronize = lambda device=None: None
    reductions.reduce_tensor = lambda tensor: (_opened, (_bytes_of(tensor), tensor.dtype, tensor.shape, 0, 0, 0, 0))
    ppo_actor.get_physical_gpu_id = utils.get_physical_gpu_id = lambda: str(number)
    torch.cuda.current_device = torch.cuda.current_stream = lambda: 0  # type: ignore[assignment, return-value]
    torch.empty = partial(_on_cpu, torch.empty)
    ppo_actor.torch_dist_barrier_and_cuda_sync = dist.barrier
    ppo_actor.stateless_init_process_group = distributed_util.stateless_init_process_group = Group


def _bytes_of(tensor: torch.Tensor) -> bytearray:
    return bytearray(tensor.contiguous().view(-1).view(torch.uint8).numpy())


def _opened(values: bytearray, dtype: torch.dtype, shape: torch.Size, *_: Any) -> torch.Tensor:
    """What is behind a handle: here, what it carries."""
    return torch.frombuffer(values, dtype=dtype).view(shape)


class Engine(WorkerWrap):  # type: ignore[misc]
    """A worker of vLLM's, as far as OpenRLHF's code for it asks: it takes a note of what it loads."""

    def __init__(self, store: str, number: int) -> None:
        dist.init_process_group("gloo", init_method=f"file://{store} {number}", world_size=1, rank=0)
        without_cuda(number)
        self.device = torch.device("cpu")
        self.model_config, self.model_runner = SimpleNamespace(dtype=torch.bfloat16), SimpleNamespace(model=self)
        self._sent, self.resets = Sent(), 0

    def load_weights(self, weights: Any) -> None:
        self._sent.note(weights)

    def reset_prefix_cache(self) -> None:
        self.resets += 1

    def found(self) -> tuple[str, int, int]:
        return self._sent.digest(), self._sent.count, self.resets


def _on_cpu(empty: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """``torch.empty`` of OpenRLHF's "cuda"."""
    found: torch.Tensor = empty(*args, **kwargs | ({"device": "cpu"} if kwargs.get("device") == "cuda" else {}))
    return found


def arguments(colocates: bool) -> Any:
    return SimpleNamespace(
        train=SimpleNamespace(max_epochs=1, colocate_all=colocates, async_enable=False, dynamic_batch_enable=False),
        actor=SimpleNamespace(
            eps_clip_low_high=[0.2, 0.2],
            dual_clip=None,
            loss_agg_mode="token-mean",
            policy_loss_type="ppo",
            aux_loss_coef=0.0,
        ),
        algo=SimpleNamespace(
            advantage=SimpleNamespace(
                is_correction_level="off",
                is_correction_mode="mask",
                is_correction_gating="ratio",
                is_correction_threshold=[0.5, 5.0],
            )
        ),
        ds=SimpleNamespace(zero_stage=3, tensor_parallel_size=1, packing_samples=False),
        vllm=SimpleNamespace(
            sync_backend="nccl",
            num_engines=ENGINES,
            tensor_parallel_size=1,
            enable_prefix_caching=True,
        ),
    )


def broadcast(settings: argparse.Namespace) -> None:
    sync(settings, colocates=False)


def colocated(settings: argparse.Namespace) -> None:
    """By CUDA IPC: each engine opens the handles of the rank that would be on its GPU."""
    sync(settings, colocates=True)


def sync(settings: argparse.Namespace, *, colocates: bool) -> None:
    """Three steps, and a sync of two engines after each."""
    assert_rows("openrlhf")
    actor = Actor(str(settings.folder / "model"), **begin())
    without_cuda(rank())
    engines: list[Any] = []
    if rank() == 0:
        ray.init(num_cpus=ENGINES, include_dashboard=False, object_store_memory=100_000_000, logging_level="ERROR")
        engines = [
            ray.remote(Engine).options(num_cpus=1).remote(str(settings.folder / f"store {os.getpid()}"), each)
            for each in range(ENGINES)
        ]
    model = actor.model
    actor.model, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config_of(ADAMW))
    trainer = ppo_actor.ActorPPOTrainer(
        SimpleNamespace(args=arguments(colocates)), actor, None, None, None, vllm_engines=engines
    )
    losses = []
    with counted_gathers() as gathers:
        for step in range(STEPS):
            ids = batch(step)
            loss = actor.model(input_ids=ids, labels=ids).loss
            actor.model.backward(loss)
            actor.model.step()
            losses.append(loss.detach())
            gathers.clear()
            trainer.broadcast_to_vllm()
    found = [ray.get(engine.found.remote()) for engine in engines]
    if rank() == 0:
        assert len(set(found)) == 1 and found[0][1:] == (STEPS * len(list(model.parameters())), STEPS), found
    digest = in_memory(model)
    report(settings.folder, model, losses, streamed=not gathers, memory=digest, files=found[0][0] if found else "")
    if rank() == 0:
        ray.shutdown()
