"""One streaming load from its checkpoint's headers to filled partitions; knows neither transformers nor patches.

The integration calls, in this order: :meth:`Load.open`, :meth:`Load.place` once the model's parameters and buffers are
lazy, and :meth:`Load.finish`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .checkpoint.index import DTYPES, CheckpointIndex, Shard, read_header
from .checkpoint.lazy import CheckpointSlice, LazyTensor, checkpoint_slices
from .checkpoint.nodes import HostTensor, View
from .checkpoint.source import ShardFiles
from .checkpoint.storage import is_on_network
from .config import StreamingConfig
from .coordination import Coordinator
from .engine.compute import Evaluator
from .engine.execute import execute_reads
from .engine.lanes import buffers_per_lane
from .engine.relay import RelayedFiles, serve
from .engine.streams import choose_request_bytes, choose_threads
from .errors import LoadError
from .memory import AnonymousMemory, total_memory_bytes
from .partition import zero3
from .planning.plan import LoadPlan, Target, make_plan, partition_range
from .progress import progress_bar
from .report import LoadReport, Materialised, PhaseClock, RankReport


__all__ = ["Load"]

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Load:
    """The state of one ``from_pretrained`` that streams.

    Args:
        config: our settings.
        ds_config: the DeepSpeed config that ZeRO-3 was found in; empty for a load that is only planned.
        coordinator: the ranks that load together.
    """

    def __init__(self, config: StreamingConfig, ds_config: Mapping[str, Any], coordinator: Coordinator) -> None:
        self.config = config
        self.ds_config = ds_config
        self.coordinator = coordinator
        self.clock = PhaseClock()
        self.memory = AnonymousMemory()
        self.dtype: torch.dtype | None = zero3.partition_dtype(ds_config) if ds_config else None
        self.plan: LoadPlan | None = None
        self._files: ShardFiles | None = None
        self._evaluator: Evaluator | None = None
        self._shards: tuple[Shard, ...] = ()
        self._on_network = False
        self._request_bytes = 0
        self._staging_bytes = 0
        self._recast: list[str] = []

    def close(self) -> None:
        """Release file handles; the load's other state is garbage once the model is returned."""
        if self._files is not None:
            self._files.close()

    # ------------------------------------------------------------------------------------------------- open

    def open(
        self, files: Sequence[str], weight_map: Mapping[str, str] | None
    ) -> dict[str, CheckpointSlice | torch.Tensor]:
        """Index safetensors shards and return a state dict of lazy slices; rank 0's headers serve all ranks.

        Raises:
            CheckpointError, ReadError: on all ranks, if rank 0 cannot read the headers or they are wrong.
        """
        with self.clock("index"):
            headers = self.coordinator.share(lambda: [read_header(path) for path in files])
            index = CheckpointIndex.from_headers(files, headers)
            if weight_map:
                index.check_weight_map(weight_map)
        self._use(index.shards)
        slices: dict[str, CheckpointSlice | torch.Tensor] = {**checkpoint_slices(index, self._materialise)}
        for name in slices:
            if _is_extra_state(name):
                slices[name] = slices[name][...].materialise()  # a module is given it at once, and may look into it
        return slices

    def open_values(self, state_dict: Mapping[str, torch.Tensor]) -> dict[str, CheckpointSlice | torch.Tensor]:
        """A state dict of lazy slices of tensors that are in host memory, or mapped into it, already."""

        def slice_of(name: str, tensor: torch.Tensor) -> CheckpointSlice | torch.Tensor:
            if _is_extra_state(name):
                return tensor
            flat = tensor.detach().cpu().contiguous().view(-1)
            node = HostTensor(flat.numel(), flat.dtype, flat)
            return CheckpointSlice(node, tuple(tensor.shape), _DTYPE_NAMES.get(tensor.dtype, ""), self._materialise)

        self._use(())
        return {
            name: slice_of(name, tensor) for name, tensor in state_dict.items() if isinstance(tensor, torch.Tensor)
        }

    def _use(self, shards: tuple[Shard, ...]) -> None:
        self._shards = shards
        # The hub's cache is made of links, and its files may lie elsewhere.
        folders = {os.path.dirname(os.path.realpath(shard.path)) for shard in shards}
        self._on_network = any(map(is_on_network, folders))
        self._request_bytes = choose_request_bytes(
            self.config.request_bytes, self.config.staging_bytes, self._on_network
        )
        # What does not fit into memory would only push its own beginning out of the page cache, and all else first.
        fits = sum(shard.size_bytes for shard in shards) < total_memory_bytes()
        self._use_files(ShardFiles(shards, direct_io=self.config.direct_io, keep_cached=fits))

    def _use_files(self, files: ShardFiles) -> None:
        self._files = files
        self._evaluator = Evaluator(
            files,
            self._shards,
            request_bytes=self._request_bytes,
            seek_bytes=self.config.seek_bytes,
            staging_bytes=self.config.staging_bytes,
        )

    def _materialise(self, view: View) -> torch.Tensor:
        assert self._evaluator is not None
        return self._evaluator.materialise(view)

    # ------------------------------------------------------------------------------------------------- place

    def place(self, model: nn.Module, missing: set[str], tied: set[str]) -> None:
        """Turn a lazy model into a partitioned one and read this rank's bytes into it.

        Args:
            model: its loaded parameters and buffers are :class:`LazyTensor`; missing ones are on the meta device.
            missing: names that initialisation will give values to.
            tied: names that will be replaced by the other end of a tie, so that no memory is spent on them.

        Raises:
            HfZeroStreamError: on all ranks, if planning or reading failed on any.
        """
        error: BaseException | None = None
        try:
            with self.clock("plan"):
                parameters, buffers = self._replace(model, missing, tied)
                self.plan = self._make_plan(parameters, buffers)
        except Exception as caught:
            error = caught
        self.coordinator.agree(error)
        assert self.plan is not None
        zero3.PartitionedInit(model, self.ds_config)
        self.memory.sample()
        try:
            partitions = [param.ds_tensor for param, _ in parameters.values()]
            self._read(self.plan, [*partitions, *(buffer for buffer, _ in buffers.values())])
        except BaseException as caught:
            error = caught
        self.coordinator.agree(error)

    def _replace(
        self, model: nn.Module, missing: set[str], tied: set[str]
    ) -> tuple[dict[str, tuple[Any, View]], dict[str, tuple[torch.Tensor, View]]]:
        """Put placeholders for lazy and missing parameters and real memory for buffers into `model`.

        Returns the parameters, and the buffers (flat), that have a source, each with its view.
        """
        device = zero3.local_device()
        parameters: dict[str, tuple[Any, View]] = {}
        buffers: dict[str, tuple[torch.Tensor, View]] = {}
        replaced: dict[int, nn.Parameter] = {}
        for prefix, module in model.named_modules():
            for key, param in module._parameters.items():
                name = f"{prefix}.{key}" if prefix else key
                if param is None or name in tied:
                    continue
                new = replaced.get(id(param))
                if new is None:
                    dtype = self.dtype if param.is_floating_point() else param.dtype
                    requires_grad = param.requires_grad if isinstance(param, LazyTensor) else param.is_floating_point()
                    new = zero3.placeholder(param.shape, dtype, device, requires_grad)
                    _copy_attributes(param, new)
                    replaced[id(param)] = new
                    if isinstance(param, LazyTensor) and param.dtype != dtype:
                        self._recast.append(name)
                    view = None if name in missing else _source_of(param)
                    if view is not None:
                        parameters[name] = (new, view)
                module._parameters[key] = new
            for key, buffer in module._buffers.items():
                name = f"{prefix}.{key}" if prefix else key
                if buffer is None:
                    continue
                if not isinstance(buffer, LazyTensor) and not buffer.is_meta:
                    module._buffers[key] = buffer.to(device)
                    continue
                real = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
                _copy_attributes(buffer, real)
                module._buffers[key] = real
                view = _source_of(buffer)
                if view is not None:
                    buffers[name] = (real.view(-1), view)
        return parameters, buffers

    def plan_only(self, model: nn.Module, missing: set[str], tied: set[str]) -> LoadPlan:
        """The plan that :meth:`place` would carry out; leaves `model` unusable."""
        return self._make_plan(*self._replace(model, missing, tied))

    def _make_plan(
        self, parameters: Mapping[str, tuple[torch.Tensor, View]], buffers: Mapping[str, tuple[torch.Tensor, View]]
    ) -> LoadPlan:
        """Parameters are partitioned over the ranks, buffers are replicated."""
        rank, world_size = self.coordinator.rank, self.coordinator.world_size
        targets: list[tuple[Target, View]] = []
        for name, (param, view) in parameters.items():
            targets.append((Target(name, param.dtype, *partition_range(param.numel(), rank, world_size)), view))
        for name, (buffer, view) in buffers.items():
            targets.append((Target(name, buffer.dtype, buffer.numel(), 0, buffer.numel()), view))
        return make_plan(
            targets,
            self._shards,
            rank=rank,
            world_size=world_size,
            request_bytes=self._request_bytes,
            seek_bytes=self.config.seek_bytes,
        )

    def _read(self, plan: LoadPlan, destinations: Sequence[torch.Tensor]) -> None:
        """Read in the way that the settings ask for: every rank for itself, or some for the others."""
        if self.config.read_from == "all" or self.coordinator.is_alone or not self._shards:
            self._read_plan(plan, destinations)
            return
        group = dist.new_group(backend="gloo")
        try:
            self._read_relayed(plan, destinations, group)
        finally:
            dist.destroy_process_group(group)

    def _read_relayed(self, plan: LoadPlan, destinations: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
        """The reader answers the others first, then reads for itself."""
        assert self._files is not None
        on_each_host = self.config.read_from == "local_rank0"
        number = zero3.local_rank() if on_each_host else self.coordinator.rank
        ranks = zero3.ranks_on_this_host() if on_each_host else self.coordinator.world_size
        if number == 0:
            serve(self._files, ranks - 1, group, self.config.chunk_bytes)
            self._read_plan(plan, destinations)
            return
        relayed = RelayedFiles(self._shards, self.coordinator.rank - number, group, self.config.chunk_bytes)
        self._use_files(relayed)
        try:
            self._read_plan(plan, destinations)
        finally:
            relayed.finish()

    def _read_plan(self, plan: LoadPlan, destinations: Sequence[torch.Tensor]) -> None:
        assert self._files is not None and self._evaluator is not None
        threads = choose_threads(
            self.config.reader_threads,
            self.config.staging_bytes // (self._request_bytes * buffers_per_lane(zero3.local_device())),
            zero3.ranks_on_this_host(),
            self._on_network,
        )
        with progress_bar(plan.cost.bytes_read, "Streaming weights", self.config.progress) as bar:
            times = execute_reads(
                plan,
                destinations,
                self._files,
                threads=threads,
                begin=zero3.local_rank() / zero3.ranks_on_this_host(),
                on_bytes=bar.update,
            )
            self._staging_bytes = times.staging_bytes
            self.clock.add("read", times.read)
            self.clock.add("convert", times.convert)
            self.clock.add("copy", times.copy)
            self.memory.sample()
            with self.clock("convert"):
                self._evaluator.place(plan, destinations, threads, bar.update)
        self.memory.sample()

    # ------------------------------------------------------------------------------------------------- finish

    def finish(self, model: nn.Module, log: logging.Logger) -> LoadReport:
        """Gather every rank's figures (the last agreement), log them on the main process and return the report."""
        unfilled = [name for name, tensor in _all_tensors(model) if isinstance(tensor, LazyTensor) or tensor.is_meta]
        error = None
        if unfilled:
            error = LoadError(
                f"{len(unfilled)} parameters or buffers got no values: {', '.join(unfilled[:8])}. "
                "This is a fault of hf_zero_stream; please report it with the model's config."
            )
        entries = self.coordinator.exchange(self._entry(), error)
        report = LoadReport(
            world_size=self.coordinator.world_size,
            ranks=tuple(RankReport.from_dict(entry) for entry in entries),
            recast=tuple(self._recast),
        )
        if self.coordinator.is_main and self.config.log_report and log.isEnabledFor(logging.INFO):
            log.info(report.table())
        return report

    def _entry(self) -> dict[str, Any]:
        plan = self.plan
        assert plan is not None and self._files is not None
        return RankReport(
            rank=self.coordinator.rank,
            seconds=self.clock.seconds,
            bytes_needed=plan.cost.bytes_needed,
            bytes_read=self._files.bytes_read,
            reads=self._files.reads,
            partition_bytes=plan.cost.target_bytes,
            staging_bytes=self._staging_bytes,
            anonymous_growth_peak=self.memory.growth_peak,
            device_peak=zero3.device_peak_bytes(),
            materialised=tuple(Materialised(name, reason) for name, reason in plan.materialised.items()),
        ).to_dict()


def _is_extra_state(key: str) -> bool:
    """Whether a checkpoint key holds a module's extra state (``torch.nn.Module.get_extra_state``)."""
    return key.rpartition(".")[2] == "_extra_state"


def _source_of(tensor: torch.Tensor) -> View | None:
    """Where a parameter's or buffer's values come from, or None if it was not loaded."""
    if isinstance(tensor, LazyTensor):
        return tensor.view_of_node
    if tensor.is_meta:
        return None
    flat = tensor.detach().contiguous().view(-1)  # a conversion op made real values
    return View.whole(HostTensor(flat.numel(), flat.dtype, flat, "an op made it from values"), tuple(tensor.shape))


def _copy_attributes(old: torch.Tensor, new: torch.Tensor) -> None:
    """Python attributes that model code or transformers put on a tensor, such as ``_is_hf_initialized``."""
    for name, value in vars(old).items():
        if name not in LazyTensor.__annotations__ and name != "_is_param":
            setattr(new, name, value)


def _all_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]
