"""OpenRLHF's actor gives its weights to vLLM: by a weight stream, where it would gather each parameter of ZeRO-3's.

OpenRLHF's own function does it still, with its calls of the engines, its broadcasts and its resets of caches. What it
takes for parameters are tensors of a stream, which come when it asks for their values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from ...plugin_api import has_partition, named_parameters, override_methods
from .buckets import Bucket
from .merging import has_adapters
from .plan import StreamedTensor
from .trainer_streams import stream_of


def broadcast_to_vllm(original: Callable[..., Any], self: Any) -> Any:
    """``ActorPPOTrainer.broadcast_to_vllm`` (all ranks)."""
    model = self.actor.model.module
    if self.strategy.args.ds.tensor_parallel_size > 1 or not any(map(has_partition, model.parameters())):
        return original(self)
    # The encoder of images is frozen, and OpenRLHF leaves it out. Adapters have other names than what they change.
    leaves_out = getattr(self.actor, "is_vlm", False) and not has_adapters(model)
    only = "trainable" if leaves_out else "all"
    stream = stream_of(self, model, "all" if self.use_cuda_ipc else "rank0", only)
    frozen = {name for name, param in named_parameters(model) if leaves_out and not param.requires_grad}
    buckets = stream.passing()  # at once, and its first bucket: so that all ranks hear of any error from here on
    first = [next(buckets)]
    mine = [each for each in stream.metadata if dist.get_rank() in each.owners and each.name not in frozen]
    tensors = _tensors_of_pass(_resumed(first, buckets), {each.name for each in mine})
    module = SimpleNamespace(
        named_parameters=lambda: [(each.name, _StreamedParameter(each, tensors)) for each in mine]
    )
    try:
        if not mine:
            next(tensors, None)  # who gets nothing takes part in the pass
        with override_methods(self, actor=SimpleNamespace(model=SimpleNamespace(module=module))):
            return original(self)
    except BaseException as error:
        buckets.throw(error)  # so that all ranks hear of it
        raise


class _StreamedParameter:
    """A proxy for a ZeRO-3 parameter: OpenRLHF reads its `data` once, in the order of the stream."""

    requires_grad = True

    def __init__(self, described: StreamedTensor, tensors: Iterator[torch.Tensor]) -> None:
        self.dtype, self.ds_shape = described.dtype, torch.Size(described.shape)
        self._tensors = tensors

    @property
    def data(self) -> torch.Tensor:
        return next(self._tensors)


def _resumed(first: list[Bucket], buckets: Iterator[Bucket]) -> Iterator[Bucket]:
    """The bucket in `first`, of which nothing is kept here, and then `buckets`."""
    yield first.pop()
    yield from buckets


def _tensors_of_pass(buckets: Iterator[Bucket], wanted: Set[str]) -> Iterator[torch.Tensor]:
    """The tensors with these names. The pass is over when the last one comes: afterwards ranks wait for each other."""
    last = None
    for name, tensor in chain.from_iterable(buckets):
        if name in wanted:
            if last is not None:
                yield last
            last = tensor
    if last is not None:
        yield last
