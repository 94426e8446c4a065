"""The order in which vLLM's and SGLang's servers want to be called for new weights, as rank 0 calls them.

Read from vllm 0.32 and 0.33 and sglang 0.5.23. Both get names, dtypes and shapes by HTTP, and bytes by a group of
their own, of which the sender is rank 0: what is broadcast is a bucket as it is.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ...errors import StreamError, VersionError
from ...plugin_api import Coordinator, accelerators, dtype_name
from .buckets import Bucket
from .plan import StreamedTensor
from .server_client import ServerClient
from .weights import WeightStream


Join = Callable[[dict[str, Any]], Any]
"""Joins the group that servers were told of, as rank 0; what it returns has ``broadcast(tensor, src)``."""

JOIN_TIMEOUT = timedelta(minutes=5)
SERVER_GROUP = "hf_zero_stream"


class EngineServer:
    """A server that gets weights: :meth:`connect` once, then for each update begin, send each bucket, end."""

    alive = ""
    """The route that says quickly whether it is alive."""

    packs = True
    """Whether nothing may lie between two tensors of a bucket, which ends after the one that passes its size."""

    def __init__(self, client: ServerClient, bucket_bytes: int, join: Join | None, device: torch.device) -> None:
        self._client, self.bucket_bytes, self._device = client, bucket_bytes, device
        self._join = join or self._join_by_nccl
        self._group: Any = None
        self._announced: Future[Any] | None = None
        self._sent: Future[Any] | None = None

    def checkpoint(self) -> str:
        """The checkpoint that the server was started from, as it names it."""
        raise NotImplementedError

    def connect(self, address: str | None, port: int | None) -> None:
        raise NotImplementedError

    def meet(self, coordinator: Coordinator, address: str | None, port: int | None) -> None:
        """Connect, with all ranks."""
        coordinator.run_on_main(lambda: self.connect(address, port))

    def passing(self, stream: WeightStream, coordinator: Coordinator) -> Generator[Any]:
        """A pass of the `stream`, of which :meth:`give` takes each item (all ranks)."""
        return stream.passing(coordinator)

    def give(self, item: Any, coordinator: Coordinator) -> None:
        if coordinator.is_main:
            with coordinator.reporting():
                self.send(item)

    def begin(self, stream: WeightStream, version: str) -> None:
        raise NotImplementedError

    def send(self, bucket: Bucket) -> None:
        raise NotImplementedError

    def end(self, version: str) -> None:
        raise NotImplementedError

    def abandon(self) -> None:
        """Leave the group in which the server may wait; its memory is worth nothing any more."""
        destroy = getattr(self._group, "destroy", None)
        self._group = None
        if destroy is not None:
            self._client.background(destroy)

    def _join_by_nccl(self, info: dict[str, Any]) -> Any:
        raise NotImplementedError

    def _joined(self, path: str, body: dict[str, Any], info: dict[str, Any]) -> None:
        """Tell the server to join the group, and join it: each waits for the other."""
        accepted = self._client.begin_post(path, body)
        self._group = self._client.wait(self._client.background(lambda: self._join(info)), accepted)
        self._client.wait(accepted)

    def _send_in_background(self, send: Callable[[], None]) -> None:
        """Begin to `send` bytes; those before have arrived by then."""
        self._wait_for_bytes()
        accelerators.synchronise([self._device])  # what fills them was queued by another thread than sends them

        def work() -> None:
            # On the default stream, which all threads have in common, it would wait for the training's kernels.
            with accelerators.on_side_stream(self._device):
                send()
                accelerators.synchronise([self._device])

        self._sent = self._client.background(work)

    def _broadcast(self, packed: torch.Tensor) -> None:
        self._send_in_background(partial(self._group.broadcast, packed, src=0))

    def _wait_for_bytes(self) -> None:
        if self._sent is not None:
            self._client.wait(self._sent, self._announced)
        self._sent = None

    def _finish_update(self) -> None:
        """Wait until all that was announced has been loaded."""
        self._wait_for_bytes()
        if self._announced is not None:
            self._client.wait(self._announced)
        self._announced = None

    def _own_place(self, address: str | None, port: int | None) -> dict[str, Any]:
        return {"master_address": address or self._client.own_address(), "master_port": port or _free_port()}


class VLLM(EngineServer):
    """vLLM's server, started with ``VLLM_SERVER_DEV_MODE=1`` and ``--weight-transfer-config '{"backend": "nccl"}'``.

    All buckets are one update: it takes tensors until their bytes pass the size that it was told, which is how this
    stream makes its buckets.
    """

    alive = "health"

    def checkpoint(self) -> str:
        return str(self._client.get("v1/models")["data"][0]["root"])

    def connect(self, address: str | None, port: int | None) -> None:
        info = self._client.get("server_info?config_format=json")
        if info["vllm_config"].get("weight_transfer_config") is None:
            raise StreamError(
                f"{self._client.url}: this vLLM has no engine for weight transfer. Start it with "
                """VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config '{"backend": "nccl"}'."""
            )
        init_info = {
            **self._own_place(address, port),
            "rank_offset": 1,
            "world_size": self._client.get("get_world_size")["world_size"] + 1,
            "packed": True,
            "packed_buffer_size_bytes": self.bucket_bytes,
        }
        self._joined("init_weight_transfer_engine", {"init_info": init_info}, init_info)

    def begin(self, stream: WeightStream, version: str) -> None:
        # What generates between two buckets would kill the engine. "keep": requests go on afterwards.
        self._client.post("pause?mode=keep")
        self._client.post("start_weight_update")
        self._announced = self._client.begin_post("update_weights", {"update_info": self._update_info(stream)})

    def _update_info(self, stream: WeightStream) -> dict[str, Any]:
        return described(stream.metadata, "dtype_names")

    def send(self, bucket: Bucket) -> None:
        self._broadcast(bucket.packed)

    def end(self, version: str) -> None:
        self._finish_update()
        self._client.post("finish_weight_update", {"weight_version": version})
        self._client.post("reset_prefix_cache")
        self._client.post("resume")

    def _join_by_nccl(self, info: dict[str, Any]) -> Any:
        try:
            from vllm.distributed.weight_transfer.nccl_common import trainer_init
        except ImportError as error:
            raise VersionError(
                "Weights go to a vLLM server through vLLM's own NCCL group: install vllm (0.28 or newer) beside the "
                f"training, or give weight_sender a function as `join`. {error}"
            ) from error
        return trainer_init(info)


class SGLang(EngineServer):
    """SGLang's server. Each bucket is an update of its own, in one session."""

    alive = "ping"

    def checkpoint(self) -> str:
        return str(self._client.get("model_info")["model_path"])

    def connect(self, address: str | None, port: int | None) -> None:
        info = self._client.get("server_info")
        if info.get("pp_size", 1) > 1:
            raise StreamError(
                f"{self._client.url}: SGLang takes weights from a group without pipeline parallelism only."
            )
        group = {
            **self._own_place(address, port),
            "rank_offset": 1,
            "world_size": info["tp_size"] + 1,
            "group_name": SERVER_GROUP,
            "backend": "nccl" if accelerators.is_accelerator(self._device) else "gloo",
        }
        self._joined("init_weights_update_group", group, group)

    def begin(self, stream: WeightStream, version: str) -> None:
        self._version = version
        self._client.post("pause_generation", {"mode": "retract"})  # requests go on afterwards, from their tokens
        self._client.post("begin_weight_update")

    def send(self, bucket: Bucket) -> None:
        self._finish_update()
        self._announced = self._client.begin_post(
            "update_weights_from_distributed",
            {
                **described(tensors_of(bucket), "dtypes"),
                "group_name": SERVER_GROUP,
                "load_format": "flattened_bucket",
                "flush_cache": False,
                "weight_version": self._version,
            },
        )
        self._broadcast(bucket.packed)

    def end(self, version: str) -> None:
        self._finish_update()
        self._client.post("end_weight_update")
        self._client.post("flush_cache")
        self._client.post("continue_generation")

    def _join_by_nccl(self, info: dict[str, Any]) -> Any:
        return TorchGroup(info, info["backend"])


class TorchGroup:
    """A group beside those of this process, as SGLang makes it."""

    def __init__(self, info: dict[str, Any], backend: str) -> None:
        size, name = info["world_size"], info["group_name"]
        store: Any = dist.TCPStore(
            info["master_address"], info["master_port"], size, True, timeout=JOIN_TIMEOUT, wait_for_workers=False
        )
        device = "cpu" if backend == "gloo" else "cuda"
        for prefix in (name, f"{name}/", f"{device}/"):  # those of torch's init_process_group, within its own
            store = dist.PrefixStore(prefix, store)
        if backend == "gloo":
            self._group: Any = dist.ProcessGroupGloo(store, 0, size, JOIN_TIMEOUT)
        else:
            self._group = dist.ProcessGroupNCCL(store, 0, size, dist.ProcessGroupNCCL.Options())

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self._group.broadcast([tensor], options).wait()

    def destroy(self) -> None:
        self._group.abort()


def tensors_of(bucket: Bucket) -> list[StreamedTensor]:
    return [StreamedTensor(name, tensor.dtype, tuple(tensor.shape), ()) for name, tensor in bucket]


def described(tensors: Sequence[StreamedTensor], dtypes: str) -> dict[str, Any]:
    """Describe the tensors that will come, as servers take it; `dtypes`: the name of that field."""
    return {
        "names": [each.name for each in tensors],
        dtypes: [dtype_name(each.dtype) for each in tensors],
        "shapes": [list(each.shape) for each in tensors],
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
