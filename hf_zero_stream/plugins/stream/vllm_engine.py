"""vLLM's end of a weight stream without a gather: a plugin, in each process of the engine.

Install this package beside vLLM (``pip install --no-deps .`` in a clone: what is imported here needs vLLM and torch
alone), and start the server with ``--weight-transfer-config '{"backend": "hf_zero_stream"}'``. Interfaces: vllm 0.32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.checkpoint_weight_patch import (
    CheckpointWeightPatch,
    load_checkpoint_weight_patches,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from .receiver import Receiver


@dataclass(kw_only=True)
class InitInfo(WeightTransferInitInfo):
    """For :class:`.wire.WeightGroup`."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    backend: str


@dataclass(kw_only=True)
class UpdateInfo(WeightTransferUpdateInfo):
    """An update in so many `buckets`: all weights by a `plan`, or slices of them, or what has changed of them."""

    plan: str
    buckets: int
    sliced: bool
    changes: bool


class Engine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Gives the model's own loader whole tensors, or patches."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False
    _receiver: Receiver | None = None
    _reloads = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        # It moves experts between workers while it serves.
        keeps_slices = not parallel.enable_eplb
        self._receiver = Receiver(vars(init_info), worker, self.device, keeps_slices=keeps_slices)

    def start_weight_update(self) -> None:
        self._reloads = False  # known when the update comes: vLLM applies patches outside its reload

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        assert self._receiver is not None, "init_transfer_engine comes first"
        if update_info.changes:
            for changes in self._receiver.changes(update_info.buckets):
                patches = [
                    CheckpointWeightPatch(name, shape, values.dtype, values, indices)
                    for name, shape, indices, values in changes
                ]
                load_checkpoint_weight_patches(self.model, patches)
            return
        if not self._reloads:
            initialize_layerwise_reload(self.model)
        self._reloads = True
        for tensors in self._receiver.tensors(update_info.plan, update_info.buckets, sliced=update_info.sliced):
            with self._receiver.loading():
                self.model.load_weights(tensors)

    def finish_weight_update(self) -> None:
        if self._reloads:
            assert self._receiver is not None
            with self._receiver.loading():
                finalize_layerwise_reload(self.model, self.model_config)
            self._receiver.finish()

    def shutdown(self) -> None:
        self._receiver = None
