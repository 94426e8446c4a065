"""What vLLM's trainer engines know of weights, as its 0.32 and 0.33 say it; and, run as a script, the real 0.32.

The script belongs to vLLM's own environment, where each rank sends a model by vLLM's trainer engine, from two sources.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class ParamMeta:
    """Of 0.33; that of 0.32 has no `owners`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = field(default=None, kw_only=True)


class Source32(ABC):
    @abstractmethod
    def metadata(self) -> list[ParamMeta]: ...

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]: ...


class Source33(ABC):
    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        assert isinstance(vars(cls)["metadata"], cached_property)

    @property
    @abstractmethod
    def metadata(self) -> list[ParamMeta]: ...

    def owned_names(self, rank: int) -> list[str]:
        return [each.name for each in self.metadata if each.owners is None or rank in each.owners]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise NotImplementedError


class _Client:
    """Of a server: what vLLM's trainer engine calls, and the group in which it broadcasts."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.told: list[tuple[str, str, list[int]]] = []
        self.tensors: list[torch.Tensor] = []

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, info: dict[str, Any]) -> None:
        self.told = list(zip(info["names"], info["dtype_names"], info["shapes"], strict=True))

    def finish_weight_update(self) -> None:
        self.calls.append("finish")

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any) -> None:
        self.tensors.append(tensor.clone())


def main(checkpoint: str, packages: str) -> None:
    sys.path.append(packages)  # what this package needs, behind what vLLM has its own version of
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM
    from vllm.distributed.weight_transfer import ModuleSource
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

    import hf_zero_stream

    dist.init_process_group("gloo")
    torch.cuda.current_stream = lambda device=None: None  # type: ignore[assignment, return-value]
    torch.accelerator.synchronize = lambda device=None: None  # type: ignore[assignment]
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    stream = hf_zero_stream.weight_stream(model, "rank0", layout="model")
    clients = []
    for source in (ModuleSource(model), stream.weight_source()):
        clients.append(_Client())
        is_sender = dist.get_rank() == 0
        engine = NCCLTrainerWeightTransferEngine(client=clients[-1], source=source, is_sender=is_sender, packed=False)
        engine.model_update_group = clients[-1]
        for _ in range(2):
            engine.send_weights()
    stock, ours = clients
    assert stock.told == ours.told and stock.calls == ours.calls == ["start", "finish"] * 2 * is_sender
    assert len(stock.tensors) == len(ours.tensors) == 2 * len(stock.told)
    assert all(map(torch.equal, stock.tensors, ours.tensors))
    print(f"rank {dist.get_rank()}: {len(ours.tensors)} equal tensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
