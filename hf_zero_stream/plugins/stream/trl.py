"""TRL's online trainers give their weights to vLLM: by a weight stream, where TRL would gather each parameter.

TRL's own functions do it still, with their waking, pausing and resets of caches. What they walk through are the
tensors of a stream, under the names and with the shapes that TRL would send; known beforehand.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch

from ...errors import PACKAGE, VersionError, installed_version
from ...plugin_api import (
    collective_device,
    expected_at,
    has_partition,
    is_alone,
    is_sharded,
    override_methods,
    unwrapped,
)
from .arguments import STREAM
from .buckets import Bucket
from .merging import has_adapters, merges_values
from .server_client import ServerClient
from .servers import EngineServer, described, tensors_of
from .trainer_streams import stream_of
from .weights import BUCKET_BYTES, WeightStream


_CLIENT = "trl.generation.vllm_client"


def sync_weights(original: Callable[..., Any], self: Any) -> Any:
    """``VLLMGeneration.sync_weights`` (all ranks)."""
    model = unwrapped(self.model)
    if _has_all_values(model):
        return original(self)
    serves = self.mode == "server"
    stream = stream_of(self, self.model, "rank0" if serves else "all")
    info = described(stream.metadata, "dtype_names")
    with _open_pass(stream) as buckets:
        tensors = chain.from_iterable(buckets)
        overrides = {
            "_iter_named_params": lambda: tensors,
            "_weight_metadata": list(zip(info["names"], info["dtype_names"], info["shapes"], strict=True)),
        }
        if serves and self.accelerator.is_main_process:
            overrides["vllm_client"] = _BucketClient(self.vllm_client, stream, buckets, tensors)
        with override_methods(self, **overrides):
            return original(self)


def sync_weight_merged(original: Callable[..., Any], self: Any, t0: float) -> Any:
    """``AsyncGRPOTrainer._sync_weight_merged`` (all ranks)."""
    model = unwrapped(self.model)
    if _has_all_values(model):
        return original(self, t0)
    adapts = has_adapters(model)
    stream = stream_of(self, self.model, "rank0", "all" if adapts else "trainable")
    if self.accelerator.is_main_process and hasattr(self.weight_transfer, "_weight_update_info"):
        self.weight_transfer._weight_update_info |= described(stream.metadata, "dtype_names")
    nothing = {"merge_adapter": lambda: None, "unmerge_adapter": lambda: None} if adapts else {}
    with _open_pass(stream) as buckets, override_methods(self, _streaming_iter=lambda: chain.from_iterable(buckets)):
        with override_methods(model, **nothing):
            return original(self, t0)


def move_model_to_vllm(original: Callable[..., Any], self: Any) -> Any:
    """``OnlineDPOTrainer._move_model_to_vllm`` (all ranks)."""
    model = unwrapped(self.model)
    if _has_all_values(model):
        return original(self)
    serves = self.vllm_mode == "server"
    stream = stream_of(self, self.model, "rank0" if serves else "all")
    with _open_pass(stream) as buckets:
        tensors, client = chain.from_iterable(buckets), None
        if serves and self.accelerator.is_main_process:
            client = _BucketClient(self.vllm_client, stream, buckets, tensors)

        def move() -> None:
            if client is not None:
                client.update_named_params(None, tensors)
                return
            for each in tensors:
                if not serves:
                    self.llm.llm_engine.model_executor.driver_worker.model_runner.model.load_weights([each])

        overrides = {"_move_model_to_vllm_inner": move, **({} if client is None else {"vllm_client": client})}
        with override_methods(self, **overrides):
            return original(self)


@contextmanager
def _open_pass(stream: WeightStream) -> Iterator[Iterator[Bucket]]:
    """The buckets of a pass. An error of what takes them, or comes before it, is one of all ranks at once."""
    buckets = stream.passing()
    with expected_at(STREAM):
        try:
            yield buckets
        except BaseException as error:
            buckets.throw(error)
            raise


def iter_named_params(original: Callable[..., Any], model: Any) -> Iterator[tuple[str, Any]]:
    """``_iter_vllm_named_params`` of AsyncGRPO's, which rank 0 walks through alone, for names, dtypes and shapes."""
    for name, param in original(model):
        shape = getattr(param, "ds_shape", param.shape)
        yield name, torch.empty(shape, dtype=param.dtype, device="meta") if has_partition(param) else param


def _has_all_values(model: Any) -> bool:
    """Whether TRL's own way is as good: this rank has all parameters, and nothing is merged that we can merge."""
    shares = any(map(has_partition, model.parameters())) or is_sharded(model)
    return not shares and (is_alone() or not merges_values(model))


class _BucketClient:
    """A client of TRL's that broadcasts a bucket as it is: the packer behind TRL's own copies all that it is given.

    TRL's session makes a call that failed again; these calls are made once. `buckets` are a pass of the `stream`, and
    `named_params`, their tensors, what it is to be given.
    """

    def __init__(
        self, client: Any, stream: WeightStream, buckets: Iterator[Bucket], named_params: Iterator[Any]
    ) -> None:
        self._client, self._stream, self._buckets, self._named_params = client, stream, buckets, named_params

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def weight_update(self) -> AbstractContextManager[None]:
        """Nothing: the update of all buckets begins and finishes by itself."""
        return nullcontext()

    def update_named_params(self, metadata: Any, named_params: Iterator[Any]) -> None:
        """Send the buckets, in one update of the server's, in place of the tensors that are given.

        Raises a VersionError if it is not what we have TRL give: the other ranks are at something else then, too.
        """
        if named_params is not self._named_params:
            raise VersionError(
                f"trl {installed_version('trl')} gives vLLM its weights without calling _iter_named_params, which this"
                f" version of {PACKAGE} relies on: install a newer {PACKAGE}, or train outside of streaming()."
            )
        server = _Server(self._client)
        for number, bucket in enumerate(self._buckets, 1):
            if number == 1:  # what ranks find wrong until then leaves the server as it is
                server.begin(self._stream.metadata, "")
            server.send(bucket)
            if number == self._stream.bucket_count:  # within the pass, at whose end ranks agree
                server.end(str(self._stream.version))


class _Server(EngineServer):
    """A server whose group TRL's client has joined. It expects chunks of 1 GB: each bucket is an update of its own."""

    alive = "health"

    def __init__(self, client: Any) -> None:
        device = collective_device()
        super().__init__(ServerClient(client.base_url, self.alive, device), BUCKET_BYTES, None, device)
        self._group = client.communicator
        # Before vLLM 0.28 each update says that it comes in chunks.
        is_told = getattr(sys.modules[_CLIENT], "_HAS_STATEFUL_TRAINER_ENGINE", False)
        self._more = {} if is_told else {"packed": True}

    def begin(self, tensors: Any, version: str) -> None:
        self._client.post("start_weight_update")

    def send(self, bucket: Bucket) -> None:
        self._finish_update()
        info = {**described(tensors_of(bucket), "dtype_names"), **self._more}
        self._announced = self._client.begin_post("update_weights", {"update_info": info})
        packed = bucket.packed
        if sum(tensor.nbytes for _, tensor in bucket) < packed.nbytes:  # dtypes of several sizes
            packed = torch.cat([tensor.reshape(-1).view(torch.uint8) for _, tensor in bucket])
        self._broadcast(packed)

    def end(self, version: str) -> None:
        self._finish_update()
        self._client.post("finish_weight_update", {"weight_version": version})
