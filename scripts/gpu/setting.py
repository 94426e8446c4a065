"""Where steps find checkpoints, what they leave, and how they time and compare."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist


if TYPE_CHECKING:
    from transformers import Qwen3MoeConfig


@dataclass(frozen=True)
class Setting:
    """The folder of a group's checkpoints, and the size of the large one, in 10^9 bytes."""

    folder: Path
    gigabytes: float

    def small(self) -> Path:
        """A checkpoint to train, of sizes that 2 divides: at most 200 MB (all ranks)."""
        from benchmarks.moe_checkpoint import moe_config

        config = moe_config(min(2e8, self.gigabytes / 20 * 1e9), num_layers=2, num_experts=8)
        config.num_key_value_heads = config.num_attention_heads
        config.vocab_size = 1024
        return self._made("small", config)

    def large(self) -> Path:
        """The checkpoint to time (all ranks)."""
        from benchmarks.moe_checkpoint import moe_config

        return self._made("large", moe_config(self.gigabytes * 1e9, num_layers=8, num_experts=128))

    def _made(self, kind: str, config: Qwen3MoeConfig) -> Path:
        from benchmarks.moe_checkpoint import tensor_shapes, write_checkpoint

        folder = self.folder / f"{kind}-{self.gigabytes:g}"
        if is_first() and not (folder / "model.safetensors.index.json").exists():  # written last
            write_checkpoint(folder, config, list(tensor_shapes(config)))
        barrier()
        return folder

    def new_folder(self, name: str) -> Path:
        """An empty folder to save into (all ranks)."""
        folder = self.folder / name
        if is_first():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        barrier()
        return folder


Step = Callable[[Setting], tuple[dict[str, Any], bool]]
"""Returns figures, by name, and whether all is as it should be (all ranks)."""


@dataclass(frozen=True)
class Group:
    """Processes of a call that run steps one after the other.

    Attributes:
        name: of the group; its folder of checkpoints has it too.
        steps: by name, in order. After one that kills a rank there is none.
        world_size: the number of processes; 0 is one process without a process group.
        alone: whether it times something, so that nothing may run beside it.
        bound: whether the process group is bound to its device, as ``init_process_group(device_id=...)`` does.
        backend: of the process group.
        own_transformers: whether it runs with the machine's transformers, not with that of the wheels.
        deterministic: whether kernels must give the same result twice.
    """

    name: str
    steps: Mapping[str, Step] = field(repr=False)
    world_size: int = 1
    alone: bool = False
    bound: bool = True
    backend: str = "nccl"
    own_transformers: bool = False
    deterministic: bool = True


def is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """What `work` gives, and seconds until the device has done all."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    result = work()
    torch.cuda.synchronize()
    return result, time.perf_counter() - began


def gigabytes_per_second(nbytes: float, seconds: float) -> float:
    return round(nbytes / seconds / 1e9, 2)
