"""TRL's online trainers give their weights to vLLM: by a weight stream, where TRL would gather each parameter.

TRL's own function does it still, with its waking, its calls of the server and its resets of caches. What it walks
through are the tensors of a stream, under the names and with the shapes that it would send; known beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ..bindings import patching
from ..destinations.deepspeed.marks import has_partition
from ..destinations.shards import is_sharded
from ..packed.modules import is_packed
from ..ranks.presence import is_alone
from ..seams.wrappers import unwrapped
from .merging import has_adapters
from .weights import Bucket, WeightStream, weight_stream


_streams: WeakKeyDictionary[Any, WeightStream] = WeakKeyDictionary()
"""By what of TRL's syncs the weights of a trainer."""


def sync_weights(original: Callable[..., Any], self: Any) -> Any:
    """``VLLMGeneration.sync_weights`` (all ranks)."""
    model = unwrapped(self.model)
    shares = any(map(has_partition, model.parameters())) or is_sharded(model)
    if not shares and (is_alone() or not has_adapters(model)):
        return original(self)
    serves = self.mode == "server"
    stream = _streams.get(self)
    if stream is None:
        layout: Any = "hub" if is_packed(model) else "model"
        stream = _streams[self] = weight_stream(self.model, "rank0" if serves else "all", layout=layout)
    stand_ins = {
        "_iter_named_params": lambda: chain.from_iterable(stream),
        "_weight_metadata": [(each.name, _name_of(each.dtype), list(each.shape)) for each in stream.metadata],
    }
    if serves and self.accelerator.is_main_process:
        stand_ins["vllm_client"] = _ByBuckets(self.vllm_client, stream)
    with patching.standing_in(self, **stand_ins):
        return original(self)


class _ByBuckets:
    """A client of TRL's that sends a bucket at a time: the packer behind it copies all that it is given at once."""

    def __init__(self, client: Any, stream: WeightStream) -> None:
        self._client, self._stream = client, stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def update_named_params(self, metadata: Any, named_params: Iterator[Any]) -> None:
        """In place of what is given, send the stream, in one update of the server's."""
        with closing(iter(self._stream)) as buckets:  # at once: the other ranks wait for what becomes of it
            # The first one is there before the server begins: what ranks find wrong until then leaves it as it is.
            all_buckets = chain([next(buckets)], buckets)
            with self._client.weight_update():
                for bucket in all_buckets:
                    self._client.update_named_params(_metadata_of(bucket), iter(bucket))


def _metadata_of(bucket: Bucket) -> list[tuple[str, str, list[int]]]:
    return [(name, _name_of(tensor.dtype), list(tensor.shape)) for name, tensor in bucket]


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
