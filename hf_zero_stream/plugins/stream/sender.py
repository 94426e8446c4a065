"""Weights of a sharded training for a server of vLLM or SGLang: checked before the first byte, one error for all."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from transformers.utils import logging

from ...errors import ConfigError, HfZeroStreamError, StreamError
from ...plugin_api import (
    Coordinator,
    View,
    collective_device,
    dtype_of_argument,
    expected_at,
    meeting,
    place_of,
    read_checkpoint_map,
)
from .arguments import STREAM
from .plan import StreamedTensor
from .server_client import ServerClient
from .servers import VLLM, EngineServer, Join, SGLang
from .weights import BUCKET_BYTES, WeightStream


logger = logging.get_logger(__name__)

SERVERS: dict[str, type[EngineServer]] = {"vllm": VLLM, "sglang": SGLang}

_MOST_NAMED = 5
_NEVER_LOADED = r"rotary_emb\.inv_freq$"
"""Buffers in old checkpoints, which engines and transformers leave out."""


def weight_sender(
    model: Any,
    url: str,
    engine: Literal["vllm", "sglang"] = "vllm",
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    dtype: torch.dtype | str | None = None,
    address: str | None = None,
    port: int | None = None,
    join: Join | None = None,
    direct: bool = False,
    deltas: bool = False,
) -> WeightSender:
    """A connection to a server that generates with the weights of `model`, as often as it is sent them (all ranks).

    Names, dtypes and shapes are compared with the checkpoint that the server was started from: engines drop a name
    that they do not know without a word, and a wrong shape kills them. If anything differs, nothing is sent.

    Args:
        model: as for :func:`weight_stream`; adapters are merged into what is sent.
        url: of the server, such as ``"http://10.0.0.7:8000"``.
        engine: what serves there.
        checkpoint: what the server was started from: a folder, a repository or a URL; default: what it says itself.
        bucket_bytes: a bucket ends after the tensor that passes this size.
        dtype: of the floating-point tensors; default: the model's own.
        address: of this host, for the server's ranks; default: the one from which this host reaches `url`.
        port: of rank 0, where the server's ranks join its group; default: any that is free.
        join: how rank 0 joins that group, instead of by NCCL: it gets what the server was told, and returns an object
            with ``broadcast(tensor, src)``.
        direct: each rank sends what it holds, and nothing is gathered, also not on rank 0. For a vLLM server with the
            plugin of this package, which puts tensors together.
        deltas: updates after the first one have only what has changed since (:meth:`WeightStream.deltas`). That needs
            `direct`, and keeps a copy of what this rank sends, in host memory.

    Raises:
        ConfigError, UnsupportedError: an argument or its value is not known, or cannot be honoured.
        StreamError, PeerError: on all ranks, if there is no such server, if tensors differ, or if a rank fails.

    Examples:
        >>> sender = hf_zero_stream.weight_sender(engine, "http://10.0.0.7:8000")
        >>> sender.send()  # on all ranks, after each step
    """
    with expected_at(STREAM):
        if engine not in SERVERS:
            raise ConfigError(f"engine: expected one of {', '.join(SERVERS)}; got {engine!r}")
        if (direct and (engine != "vllm" or join is not None)) or (deltas and not direct):
            raise ConfigError("direct: expected engine='vllm' beside it, and no `join`; deltas: expected direct=True")
        device = collective_device()
        client = ServerClient(url, SERVERS[engine].alive, device)
        server: EngineServer
        if direct:
            from .direct import DirectVLLM

            server = DirectVLLM(client, bucket_bytes, None, device, deltas=deltas)
        else:
            server = SERVERS[engine](client, bucket_bytes, join, device)
        options = {"overfull": server.packs, "deltas": deltas}
        stream = WeightStream(model, "rank0", bucket_bytes, dtype_of_argument(dtype), "all", "hub", **options)
    sender = WeightSender(stream, server, client, checkpoint)
    with meeting(STREAM, f"a new sender of {stream.name}") as coordinator:
        sender._connect(coordinator, address, port)
    return sender


class WeightSender:
    """A server that gets the weights of a training; see :func:`weight_sender`.

    Attributes:
        stream: what is sent.
    """

    def __init__(
        self,
        stream: WeightStream,
        server: EngineServer,
        client: ServerClient,
        checkpoint: str | os.PathLike[str] | None,
    ) -> None:
        self.stream = stream
        self._server, self._client, self._checkpoint = server, client, checkpoint
        self._compared: Sequence[StreamedTensor] | None = None
        self._lost = ""

    def send(self, version: str | None = None) -> None:
        """Give the server the weights of this moment, and wait until it has loaded them (all ranks).

        It generates nothing meanwhile, and goes on with its requests afterwards. `version`: what it says of its
        weights then; default: the number of this pass.

        Raises:
            StreamError: on all ranks: tensors differ from the server's, and nothing has been sent; or the server is
                lost. It keeps its requests waiting, because it has some of the new weights: end it.
        """
        begun = False
        try:
            with meeting(STREAM, f"an update by {self.stream.name}") as coordinator:
                if self._lost:
                    raise StreamError(self._lost)
                for item in self._server.passing(self.stream, coordinator):
                    if not begun:  # what ranks find wrong until then leaves the server as it is
                        self._compare(coordinator)
                        name = version or str(self.stream.version)
                        self._client.check = coordinator.check
                        begun = True
                        coordinator.run_on_main(lambda: self._server.begin(self.stream, name))
                    self._server.give(item, coordinator)
                    del item
                coordinator.run_on_main(lambda: self._server.end(name))
        except BaseException as error:
            if not begun or self._lost:
                raise
            self._server.abandon()
            self._lost = (
                f"The server at {self._client.url} may have some of the weights of an update that failed, so it is "
                f"lost: end it, start it again, and make a new weight_sender. The error was: {error}"
            )
            if isinstance(error, Exception):
                raise StreamError(self._lost) from error
            raise

    def _connect(self, coordinator: Coordinator, address: str | None, port: int | None) -> None:
        self._client.check = coordinator.check
        self._compare(coordinator)
        self._server.meet(coordinator, address, port)

    def _compare(self, coordinator: Coordinator) -> None:
        """Refuse tensors that the server's checkpoint does not have so (all ranks)."""
        if self._compared is self.stream.metadata:
            return
        coordinator.run_on_main(self._compare_on_main)
        self._compared = self.stream.metadata

    def _compare_on_main(self) -> None:
        path = str(self._checkpoint or self._server.checkpoint())
        try:
            with place_of(path, None) as place:
                views = read_checkpoint_map(place).views
        except HfZeroStreamError as error:
            raise StreamError(
                f"The checkpoint from which the server at {self._client.url} was started is not to be had here, so "
                f"names cannot be compared: {error} Give weight_sender its place as `checkpoint`."
            ) from error
        model = self.stream.model
        tied = list(getattr(model, "_tied_weights_keys", None) or ())
        left_out = [*tied, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), _NEVER_LOADED]
        found = [
            *differences(self.stream.metadata, views, left_out),
            *(_unaligned(self.stream.metadata, self._server.bucket_bytes) if self._server.packs else ()),
        ]
        if found:
            more = f"\n... and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
            raise StreamError(
                f"{len(found)} tensors differ between this training and {path}, from which the server at "
                f"{self._client.url} was started. Nothing has been sent.\n"
                + "\n".join(found[:_MOST_NAMED])
                + more
                + "\nStart the server from a checkpoint of this model, such as one that save_pretrained wrote."
            )
        others = [each for each in self.stream.metadata if each.dtype != views[each.name].node.dtype]
        if others:
            logger.warning(
                f"{len(others)} tensors are sent in another dtype than {path} has them in, for instance "
                f"{others[0].name}: {others[0].dtype}, and {views[others[0].name].node.dtype} there. The server casts "
                "them, as it did when it loaded its own. `dtype` of weight_sender chooses."
            )


def differences(
    tensors: Sequence[StreamedTensor], views: Mapping[str, View], left_out: Sequence[str] = ()
) -> list[str]:
    """Describe in words what a checkpoint lacks or has otherwise than `tensors`, and has in addition.

    Of names that match a pattern of `left_out`, the checkpoint may have more. Floating-point dtypes of at least 16
    bits are as good as each other: an engine casts what it loads.
    """
    found = []
    for each in tensors:
        view = views.get(each.name)
        if view is None:
            found.append(f"{each.name}: the checkpoint has no such tensor")
        elif tuple(view.sizes) != each.shape:
            found.append(f"{each.name}: shape {list(each.shape)}, and {list(view.sizes)} in the checkpoint")
        elif each.dtype != view.node.dtype and not (_is_cast(each.dtype) and _is_cast(view.node.dtype)):
            found.append(f"{each.name}: {each.dtype}, and {view.node.dtype} in the checkpoint")
    for name in sorted(views.keys() - {each.name for each in tensors}):
        if not any(re.search(pattern, name) for pattern in left_out):
            found.append(f"{name}: only the checkpoint has it")
    return found


def _unaligned(tensors: Sequence[StreamedTensor], bucket_bytes: int) -> Iterator[str]:
    """Tensors that no server could view in a bucket, where nothing may lie between two of them."""
    at = 0
    for each in tensors:
        if at % each.dtype.itemsize:
            yield f"{each.name}: {each.dtype} cannot begin at byte {at} of a bucket; `dtype` makes all tensors alike"
        at += math.prod(each.shape) * each.dtype.itemsize
        at = 0 if at > bucket_bytes else at


def _is_cast(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize >= 2
