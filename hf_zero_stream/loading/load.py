"""One streaming load from its checkpoint's headers to filled partitions; knows neither transformers nor patches.

The integration calls, in this order: :meth:`Load.read_ahead`, :meth:`Load.open`, :meth:`Load.place` once the model's
parameters and buffers are lazy, and :meth:`Load.finish`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from ..checkpoint.format import Shard
from ..checkpoint.index import CheckpointIndex
from ..checkpoint.lazy import LazyTensor
from ..checkpoint.nodes import HostTensor, View
from ..checkpoint.slices import AbsentSlice, CheckpointSlice, checkpoint_slices
from ..checkpoint.wrapped import lacks_values, refuse_wrapped
from ..config import StreamingConfig, without_auto
from ..destinations.deepspeed import engine_memory, zero3
from ..destinations.homes import Home, PartitionedHome, ReplicatedHome, Sourced, Sources, whole
from ..engine.allocation import allocating, is_out_of_memory
from ..engine.opened import OpenCheckpoint
from ..engine.reader import Batch, Reader
from ..errors import LoadError
from ..planning.plan import LoadPlan
from ..ranks.coordinator import Coordinator
from ..reports.load import LoadReport, Materialised, PhaseClock, RankReport
from ..reports.memory import AnonymousMemory
from .sameness import description, refuse_differences, refuse_other_files, refuse_other_headers


__all__ = ["Load", "source_of"]

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Load:
    """The state of one ``from_pretrained`` that streams.

    Args:
        config: our settings.
        ds_config: the DeepSpeed config; empty if there is none, or for a load that is only planned.
        coordinator: the ranks that load together.
        replicated: no ZeRO-3: every rank gets all of every parameter.
    """

    def __init__(
        self,
        config: StreamingConfig,
        ds_config: Mapping[str, Any],
        coordinator: Coordinator,
        *,
        replicated: bool = False,
    ) -> None:
        self.config = config
        self.ds_config = ds_config = without_auto(ds_config)
        self.coordinator = coordinator
        coordinator.be_patient(config.peer_timeout_s)
        self.clock = PhaseClock()
        self.memory = AnonymousMemory()
        self.home: Home = (
            ReplicatedHome(ds_config, coordinator, config.staging_bytes, on_device=config.replicas_on == "device")
            if replicated
            else PartitionedHome(ds_config, coordinator)
        )
        self.plan: LoadPlan | None = None
        self.device = zero3.local_device().type
        """The type of the device that will train, on which the memory that is announced depends."""
        self._checkpoint = OpenCheckpoint(config, coordinator)
        self._reader = Reader(self._checkpoint, config, coordinator, self.clock, self.memory)
        self._recast: list[str] = []
        self._index: CheckpointIndex | None = None
        self.absent: Mapping[str, AbsentSlice] = {}
        """Tensors that the checkpoint's index promises and no shard holds."""

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The checkpoint's files, once it is open."""
        return self._checkpoint.shards

    def close(self) -> None:
        """Release file handles; the load's other state is garbage once the model is returned."""
        self._checkpoint.close()

    # ------------------------------------------------------------------------------------------------- open

    def read_ahead(self, files: Sequence[str]) -> None:
        """Begin to bring safetensors shards into the page cache where that is of use; a second call does nothing."""
        self._checkpoint.read_ahead(files)

    @property
    def reads_itself(self) -> bool:
        """Whether this rank reads the shards, and not another one for it (`read_from`)."""
        return self._checkpoint.reads_itself

    def look_into(self, shard: str) -> CheckpointIndex:
        """What is in one shard; where one rank reads for others, all of them ask together, and rank 0 looks."""
        read = partial(self._checkpoint.read_headers, [shard])
        headers = self.coordinator.share(read) if self._checkpoint.relays else read()
        return CheckpointIndex.from_headers([shard], headers)

    def refuse_unseen(self, files: Sequence[str]) -> None:
        """Where one rank reads for others: check that all ranks know of the same `files`, and see what is pickled.

        Raises:
            ReadError: on all ranks; names the rank.
        """
        if not self._checkpoint.relays:
            return
        unseen = [file for file in files if not file.endswith(".safetensors") and not os.path.exists(file)]
        everyone = self.coordinator.exchange((sorted(map(os.path.basename, files)), unseen))
        refuse_other_files(os.path.dirname(files[0]), everyone, self.config.read_from)

    def open(
        self, files: Sequence[str], weight_map: Mapping[str, str] | None
    ) -> dict[str, CheckpointSlice | AbsentSlice | torch.Tensor]:
        """Index safetensors shards and return a state dict of lazy slices; rank 0's headers serve all ranks.

        What the index promises and no shard holds is in it too: see :meth:`refuse_absent`.
        Called once more for each checkpoint that the model's ``__init__`` loads, before that of the model itself.

        Raises:
            CheckpointError, ReadError: on all ranks, if rank 0 cannot read the headers or they are wrong; on the first
                rank of a host, if it finds other headers there.
        """
        read_headers = partial(self._checkpoint.read_headers, files)

        def checked_index() -> CheckpointIndex:
            compares = self.coordinator.topology.is_first_of_host and self._checkpoint.reads_itself
            if compares and not self.coordinator.is_main and self.config.verify != "off":
                refuse_other_headers(files, read_headers(), headers)
            return CheckpointIndex.from_headers(files, headers, weight_map)

        with self.clock("index"):
            self.coordinator.refuse_unlike([os.path.basename(file) for file in files])
            headers = self.coordinator.share(read_headers)
            # Where one rank reads for others, what follows is for all of them together.
            index = self.coordinator.together(checked_index) if self._checkpoint.relays else checked_index()
        for note in index.notes if self.coordinator.is_main else ():
            logger.warning("%s: %s", os.path.dirname(files[0]), note)
        self._index, self.absent = index, {name: AbsentSlice() for name in index.absent}
        index = index.numbered_from(self._checkpoint.add(index.shards))
        slices = checkpoint_slices(index, self._checkpoint.materialise)
        # A module is given its extra state at once, and may look into it.
        extra = {name: piece[...].materialise() for name, piece in slices.items() if _is_extra_state(name)}
        return {**slices, **extra, **self.absent}

    def refuse_absent(self) -> None:
        """Raise if values were asked for that the index promises and no shard holds; else warn of those once.

        Raises:
            CheckpointError: names a tensor, and the file that should hold it.
        """
        if self._index is None or not self.absent:
            return
        self._index.refuse_absent(name for name, piece in self.absent.items() if piece.is_wanted)
        if self.coordinator.is_main:
            folder = os.path.dirname(self._index.shards[0].path)
            logger.warning("%s: %s", folder, self._index.note_of_absent)

    def open_values(self, state_dict: Mapping[str, torch.Tensor]) -> dict[str, CheckpointSlice | torch.Tensor]:
        """A state dict of lazy slices of tensors that are in host memory, or mapped into it, already.

        Raises:
            UnsupportedError: a tensor holds others in its place (DTensor).
            LoadError: one has no values (on the meta device).
        """
        tensors = {name: value for name, value in state_dict.items() if isinstance(value, torch.Tensor)}
        refuse_wrapped(tensors.items(), "state_dict", "Give it whole tensors (DTensor.full_tensor()).")
        empty = [name for name, value in tensors.items() if lacks_values(value)]
        if empty:
            raise LoadError(
                f"state_dict: {len(empty)} tensors have no values (they are on the meta device): "
                f"{', '.join(empty[:8])}. Give it tensors that are in memory."
            )

        def slice_of(name: str, tensor: torch.Tensor) -> CheckpointSlice | torch.Tensor:
            if _is_extra_state(name):
                return tensor
            return CheckpointSlice(HostTensor.of(tensor), tuple(tensor.shape), self._checkpoint.materialise)

        self.coordinator.refuse_unlike("values in memory")
        self._index, self.absent = None, {}
        self._checkpoint.add(())
        return {name: slice_of(name, tensor) for name, tensor in tensors.items()}

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
        parameters, buffers = self._planned(model, missing, lambda: self._prepare(model, missing, tied))
        self._filled(lambda: self.home.batches(model, parameters, buffers))

    def _prepare(self, model: nn.Module, missing: set[str], tied: set[str]) -> tuple[Sources, Sources]:
        self._convert_experts(model, missing, make_groups=True)
        parameters, buffers = self._replace(model, missing, tied)
        self.plan = self._with_footprint(self._make_plan(parameters, buffers), model, tied)
        self.home.check(self.plan)
        return parameters, buffers

    def _planned(self, model: nn.Module, missing: set[str], prepare: Callable[[], T]) -> T:
        """What `prepare`, which makes :attr:`plan` for the lazy `model`, returns.

        Raises on all ranks if it does on any, or if ranks are about to load different things.
        """
        error: BaseException | None = None
        mine: dict[str, str] = {}
        try:
            with self.clock("plan"):
                shares_reads = not self.home.is_partitioned
                mine = description(model, missing, self.ds_config, self.config, shares_reads=shares_reads)
                prepared = prepare()
                assert self.plan is not None
                self._checkpoint.open(read.shard for read in self.plan.reads)
        except BaseException as caught:
            error = _explained(caught, self.coordinator.rank)
        refuse_differences(self.coordinator.exchange(mine, error))
        return prepared

    def _filled(self, begin: Callable[[], Sequence[Batch]]) -> None:
        """Carry out :attr:`plan` in the batches that `begin` gives; raises on all ranks if it fails on any."""
        assert self.plan is not None
        error: BaseException | None = None
        try:
            batches = begin()
            self.memory.sample()
            self._reader.fill(batches, self.plan)
        except BaseException as caught:
            error = _explained(caught, self.coordinator.rank)
        self.coordinator.agree(error)

    def _replace(
        self, model: nn.Module, missing: set[str], tied: set[str]
    ) -> tuple[dict[str, Sourced], dict[str, Sourced]]:
        """Put what the home has for lazy and missing parameters and buffers into `model`.

        Returns the parameters, and the buffers (flat), that have a source, each with its view.
        """
        parameters: dict[str, Sourced] = {}
        buffers: dict[str, Sourced] = {}
        replaced: dict[int, nn.Parameter] = {}
        self.home.expect(model, tied)
        for prefix, module in model.named_modules():
            for key, param in list(module._parameters.items()):
                name = f"{prefix}.{key}" if prefix else key
                if param is None or name in tied:
                    continue
                if id(param) in replaced:
                    setattr(module, key, replaced[id(param)])
                    continue
                with allocating(name, param.nbytes, "the host", self.coordinator.rank):
                    new = self.home.parameter(param)
                if new is None:
                    continue
                replaced[id(param)] = new
                setattr(module, key, new)  # as transformers does: a recurrent layer keeps its weights in a list, too
                _copy_attributes(param, new)
                if isinstance(param, LazyTensor) and param.dtype != new.dtype:
                    self._recast.append(name)
                view = None if name in missing else source_of(param)
                if view is not None:
                    parameters[name] = (new, view)
            for key, buffer in module._buffers.items():
                name = f"{prefix}.{key}" if prefix else key
                real = None if buffer is None else self.home.buffer(buffer)
                if buffer is None or real is None:
                    continue
                module._buffers[key] = real
                if not isinstance(buffer, LazyTensor) and not buffer.is_meta:
                    continue
                _copy_attributes(buffer, real)
                view = source_of(buffer)
                if view is not None:
                    buffers[name] = (real.view(-1), view)
        return parameters, buffers

    def _convert_experts(self, model: nn.Module, missing: set[str], *, make_groups: bool) -> None:
        """DeepSpeed's expert parallelism, if its config asks for it, so that this rank plans for its own experts."""
        if self.home.is_partitioned and (self.ds_config.get("expert_parallel") or {}).get("enabled"):
            from ..destinations.deepspeed import experts  # wants a DeepSpeed that has AutoEP

            rank, world_size = self.coordinator.rank, self.coordinator.world_size
            experts.convert(model, self.ds_config, missing, rank, world_size, make_groups=make_groups)

    def plan_only(self, model: nn.Module, missing: set[str], tied: set[str]) -> LoadPlan:
        """The plan that :meth:`place` would carry out; leaves `model` unusable."""
        self._convert_experts(model, missing, make_groups=False)
        return self._with_footprint(self._make_plan(*self._replace(model, missing, tied)), model, tied)

    def _make_plan(self, parameters: Sources, buffers: Sources) -> LoadPlan:
        items = [(self.home.target(name, param), view) for name, (param, view) in parameters.items()]
        return self._reader.plan([*items, *whole(buffers)])

    def _with_footprint(self, plan: LoadPlan, model: nn.Module, tied: set[str]) -> LoadPlan:
        if not self.home.is_partitioned:
            return plan
        footprint = engine_memory.model_footprint(
            model,
            self.ds_config,
            tied=tied,
            world_size=self.coordinator.world_size,
            staging_bytes=self.config.staging_bytes,
            device=self.device,
        )
        return replace(plan, footprint=footprint)

    # ------------------------------------------------------------------------------------------------- finish

    def finish(self, model: nn.Module, log: logging.Logger) -> LoadReport:
        """Gather every rank's figures (the last agreement), log them on the main process and return the report."""
        unfilled = [name for name, tensor in _all_tensors(model) if lacks_values(tensor)]
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
        assert plan is not None
        return RankReport(
            rank=self.coordinator.rank,
            seconds=self.clock.seconds,
            bytes_needed=plan.cost.bytes_needed,
            bytes_read=self._checkpoint.bytes_read - self._reader.verification.bytes_read,
            reads=self._checkpoint.reads,
            retries=self._checkpoint.retries.count,
            verification=self._reader.verification,
            partition_bytes=plan.cost.target_bytes,
            staging_bytes=self._reader.staging_bytes,
            anonymous_growth_peak=self.memory.growth_peak,
            device_peak=zero3.device_peak_bytes(),
            materialised=tuple(Materialised(name, reason) for name, reason in plan.materialised.items()),
            footprint=plan.footprint,
        ).to_dict()


def _is_extra_state(key: str) -> bool:
    """Whether a checkpoint key holds a module's extra state (``torch.nn.Module.get_extra_state``)."""
    return key.rpartition(".")[2] == "_extra_state"


def source_of(tensor: torch.Tensor) -> View | None:
    """Where a parameter's or buffer's values come from, or None if it was not loaded."""
    if isinstance(tensor, LazyTensor):
        return tensor.view_of_node
    if tensor.is_meta:
        return None
    return View.whole(HostTensor.of(tensor, "a conversion op made it from values"), tuple(tensor.shape))


def _explained(error: BaseException, rank: int) -> BaseException:
    """`error`, or if memory ran out where nobody said what it was for, one of ours that says so."""
    if isinstance(error, LoadError) or not is_out_of_memory(error):
        return error
    explained = LoadError(f"out of memory on rank {rank} while loading: {error}")
    explained.__cause__ = error
    return explained


def _copy_attributes(old: torch.Tensor, new: torch.Tensor) -> None:
    """Python attributes that model code or transformers put on a tensor, such as ``_is_hf_initialized``."""
    for name, value in vars(old).items():
        if name not in LazyTensor.__annotations__ and name != "_is_param":
            setattr(new, name, value)


def _all_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]
