"""vLLM's weight transfer over gloo: what the backend "nccl" gets, in the server's process."""

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


def register() -> None:
    """Called by vLLM in each of its processes."""
    if "gloo" not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine("gloo", __name__, GlooEngine.__name__)


@dataclass(kw_only=True)
class InitInfo(WeightTransferInitInfo):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    packed: bool = True
    packed_buffer_size_bytes: int = 2**30


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class GlooEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.buffer_size_bytes = init_info.packed_buffer_size_bytes
        address, port, size = init_info.master_address, init_info.master_port, init_info.world_size
        self.store = dist.TCPStore(address, port, size, False, timeout=timedelta(minutes=5))
        rank = init_info.rank_offset + self.parallel_config.rank
        self.group = dist.ProcessGroupGloo(self.store, rank, size, timedelta(minutes=10))

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        chunk: list[tuple[str, torch.dtype, list[int], int]] = []
        size = 0
        for name, dtype_name, shape in zip(
            update_info.names, update_info.dtype_names, update_info.shapes, strict=True
        ):
            dtype = getattr(torch, dtype_name)
            nbytes = math.prod(shape) * dtype.itemsize
            chunk.append((name, dtype, shape, nbytes))
            size += nbytes
            if size > self.buffer_size_bytes:
                self._load(chunk, size)
                chunk, size = [], 0
        if chunk:
            self._load(chunk, size)

    def _load(self, chunk: list[tuple[str, torch.dtype, list[int], int]], size: int) -> None:
        packed = torch.empty(size, dtype=torch.uint8)
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self.group.broadcast([packed], options).wait()
        pieces = packed.split([nbytes for *_, nbytes in chunk])
        tensors = [(each[0], piece.view(each[1]).view(each[2])) for each, piece in zip(chunk, pieces, strict=True)]
        self.model.load_weights(tensors)

    def shutdown(self) -> None:
        self.group = self.store = None
