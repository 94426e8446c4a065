"""One streaming load, from its checkpoint's headers to filled memory; knows neither transformers nor DeepSpeed.

Its callers are the seams of transformers. They call, in this order: :meth:`.OpenCheckpoint.read_ahead`,
:meth:`Load.open`, :meth:`Load.fill` once the model's parameters and buffers are lazy, and :meth:`Load.finish`.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ..accelerators import peak_bytes, reserved_bytes, used_bytes
from ..checkpoint.format import ShardHeader, TensorEntry
from ..checkpoint.lazy import AbsentSlice, CheckpointSlice, LazyTensor
from ..checkpoint.map import CheckpointMap
from ..checkpoint.nodes import HostTensor, Leaf, View
from ..destinations.base import Batch, Destination, is_out_of_memory, lacks_values, refuse_wrapped
from ..errors import DisagreementError, HfZeroStreamError, LoadError, ReadError
from ..planning.plan import LoadPlan
from ..ranks.coordinator import Coordinator
from ..registry import has_tool, tool
from ..reports.closing import note_read, tell
from ..reports.load import PHASES, LoadReport, RankReport
from ..reports.measures import AnonymousMemory, PhaseClock
from ..reports.text import bytes_text
from ..settings.config import StreamingConfig
from ..sources.base import is_url
from .opened import OpenCheckpoint
from .reader import Reader
from .sameness import HeaderAndSample, describe_load, refuse_differences, refuse_other_shards


logger = logging.getLogger(__name__)


class Seen(NamedTuple):
    """What a rank sees of a checkpoint's files."""

    folder: str
    identity: str | None
    """See :meth:`.OpenCheckpoint.identity`; None from all but the first rank of each host."""


class Load:
    """The state of one ``from_pretrained`` that streams; `ds_config` is empty if there is none.

    A load that goes on where another one ended has that one's `checkpoint` (:meth:`.OpenCheckpoint.reopened`).
    """

    def __init__(
        self,
        config: StreamingConfig,
        ds_config: Mapping[str, Any],
        coordinator: Coordinator,
        destination: Destination,
        checkpoint: OpenCheckpoint | None = None,
    ) -> None:
        self.config = config
        self.ds_config = ds_config
        self.coordinator = coordinator
        self.destination = destination
        self.clock = PhaseClock(PHASES)
        self.memory = AnonymousMemory()
        self.plan: LoadPlan | None = None
        """The plan of this rank's reads, once it is known."""
        self._tied: set[str] = set()
        self.checkpoint = checkpoint or OpenCheckpoint(config, coordinator, device=destination.device)
        """The files that the bytes come from."""
        self._reader = Reader(self.checkpoint, self.clock, self.memory)
        self._map: CheckpointMap | None = None
        self.absent: Mapping[str, AbsentSlice] = {}
        """Tensors that the checkpoint's index promises and no shard holds."""
        self._peak_before = 0

    def close(self) -> None:
        """Release file handles."""
        self.checkpoint.close()

    def map_file(self, file: str) -> CheckpointMap:
        """Map one file, or what it describes; where one rank reads for others, rank 0 reads the header (all ranks)."""
        read = partial(self.checkpoint.read_headers, [file])
        headers = self.coordinator.broadcast(read) if self.checkpoint.relays else read()
        return self.checkpoint.map_from_headers([file], headers)

    def compare_files(self, files: Sequence[str]) -> list[Seen]:
        """Check that all ranks load files of the same names, and return what each sees of them (all ranks).

        Raises a DisagreementError that names a rank with other names, or where one rank reads for others, a ReadError
        that also names the files that every rank must see.
        """
        folder, relays = os.path.dirname(files[0]) if files else "", self.checkpoint.relays
        unseen = [file for file in files if not file.endswith(".safetensors") and not os.path.exists(file)]
        must_see = f"With read_from={self.config.read_from!r} every rank must still see "
        try:
            names = [os.path.basename(file) for file in files]
            seen = Seen(folder, self.checkpoint.identity(files) if self._stands_for_host else None)
            everyone = self.coordinator.require_same(names, beside=(seen, unseen if relays else []))
        except DisagreementError as error:
            if not relays:
                raise
            small = "the small files (config.json, the index of the shards), and files that are not safetensors."
            raise ReadError(f"{folder}: {error} {must_see}{small}") from error
        for rank, (_, lacking) in enumerate(everyone):
            if lacking:
                raise ReadError(
                    f"{lacking[0]}: rank {rank} does not see it. {must_see}files that are not safetensors. Save the "
                    "checkpoint as safetensors, or put it where every rank sees it."
                )
        return [each for each, _ in everyone]

    def open(
        self, files: Sequence[str], weight_map: Mapping[str, str] | None
    ) -> dict[str, CheckpointSlice | torch.Tensor]:
        """Open these files, and return a state dict of lazy slices; rank 0's headers serve all ranks.

        Tensors that the index promises and no shard holds are in it too: see :meth:`refuse_absent`.
        Called once more for each checkpoint that the model's ``__init__`` loads, before that of the model itself.

        Raises:
            CheckpointError, ReadError: on all ranks, if rank 0 cannot read the headers or they are wrong; on the first
                rank of a host, and on one that has another folder than rank 0, if it finds other shards there.
            UnsupportedError: a tensor of a folder of torch.distributed.checkpoint is not stored plainly.
        """
        with self.clock("index"):
            found = self._map_files(files, weight_map)
        folder, is_main = os.path.dirname(files[0]), self.coordinator.is_main
        for note in found.notes if is_main else ():
            logger.warning("%s: %s", folder, note)
        untagged = self.checkpoint.source.hints(files).is_everywhere and not all(shard.tag for shard in found.shards)
        if untagged and is_main:
            logger.warning(
                "%s: the server gives neither ETag nor Last-Modified of all files. If somebody replaces one by "
                "another of the same size during this load, that is not noticed.",
                folder,
            )
        self._map, self.absent = found, {name: AbsentSlice() for name in found.absent}
        self.checkpoint.add(found.shards)
        if self.destination.fills_device:
            self.checkpoint.pin_ahead()
        slices = found.slices(self.checkpoint.materialise)
        # Modules read their extra state as soon as they get it.
        extra = {name: piece[...].materialise() for name, piece in slices.items() if _is_extra_state(name)}
        return {**slices, **extra, **self.absent}

    def _map_files(self, files: Sequence[str], weight_map: Mapping[str, str] | None) -> CheckpointMap:
        """Map these files by rank 0's headers (all ranks)."""
        seen = self.compare_files(files)
        compares = self._has_copies(files, seen)

        def read() -> tuple[list[ShardHeader], list[bytes]]:
            return self.checkpoint.read_headers(files), self.checkpoint.samples(files) if compares else []

        headers, samples = self.coordinator.broadcast(read)

        def checked_map() -> CheckpointMap:
            if compares:
                self._refuse_other_copy(files, seen, lambda: zip(*read()), zip(headers, samples))
            return self.checkpoint.map_from_headers(files, headers, weight_map)

        # Where one rank reads for others, an error of one must be an error of all.
        return self.coordinator.run_on_all(checked_map) if self.checkpoint.relays else checked_map()

    @property
    def _stands_for_host(self) -> bool:
        return not self.coordinator.is_alone and self.coordinator.topology.position == 0

    def _has_copies(self, files: Sequence[str], seen: Sequence[Seen]) -> bool:
        """Whether ranks that read may see other files than rank 0's, on other hosts or in other folders."""
        if self.coordinator.is_alone or self.config.verify == "off" or self.config.read_from == "rank0":
            return False
        of_hosts = [each.identity for each in seen if each.identity is not None]
        is_shared = len(of_hosts) == 1 or (bool(of_hosts[0]) and len(set(of_hosts)) == 1)
        may_differ = not is_shared or len({each.folder for each in seen}) > 1
        return may_differ and not self.checkpoint.source.hints(files).is_everywhere

    def refuse_other_copies(self) -> None:
        """Check that files which each rank opened alone are those of rank 0 (all ranks); raises as :meth:`open`."""
        files = [shard.path for shard in self.checkpoint.shards]
        seen = self.compare_files(files)
        if not files or not self._has_copies(files, seen):
            return
        described = [*dict.fromkeys(shard.described_in or shard.path for shard in self.checkpoint.shards)]

        def look() -> list[HeaderAndSample]:
            return [*zip(self.checkpoint.read_headers(described), self.checkpoint.samples(described))]

        self._refuse_other_copy(described, seen, look, self.coordinator.broadcast(look))

    def _refuse_other_copy(
        self,
        paths: Sequence[str],
        seen: Sequence[Seen],
        look: Callable[[], Iterable[HeaderAndSample]],
        of_rank_0: Iterable[HeaderAndSample],
    ) -> None:
        """Compare this rank's files with rank 0's, if it is the first of another host, or one of another folder."""
        own, first = seen[self.coordinator.rank], seen[0]
        is_first = self._stands_for_host and not self.coordinator.is_main
        if self.checkpoint.reads_itself and (own.folder != first.folder or is_first):
            shares_host = 0 in self.coordinator.topology.ranks_of_host
            refuse_other_shards(paths, look(), of_rank_0, first.folder, shares_host=shares_host)

    @property
    def entries(self) -> Collection[TensorEntry]:
        """The tensors of the checkpoint that lie in one run of bytes each."""
        return () if self._map is None else self._map.entries.values()

    def refuse_absent(self) -> None:
        """Raise a CheckpointError if the model needs tensors that the index promises and no shard holds; else warn."""
        if self._map is None or not self.absent:
            return
        self._map.refuse_absent(name for name, piece in self.absent.items() if piece.is_wanted)
        if self.coordinator.is_main:
            folder = os.path.dirname(self._map.shards[0].path)
            logger.warning("%s: %s", folder, self._map.note_of_absent)

    def open_values(self, state_dict: Mapping[str, torch.Tensor]) -> dict[str, CheckpointSlice | torch.Tensor]:
        """A state dict of lazy slices of tensors that are in host memory, or mapped into it, already."""
        tensors = {name: value for name, value in state_dict.items() if isinstance(value, torch.Tensor)}
        refuse_wrapped(tensors.items(), "state_dict", "Give it whole tensors (DTensor.full_tensor()).")
        empty = [name for name, value in tensors.items() if lacks_values(value)]
        if empty:
            raise LoadError(
                f"state_dict: {len(empty)} tensors have no values (they are on the meta device): "
                f"{', '.join(empty[:8])}. Give it tensors that are in memory."
            )

        self.coordinator.require_same("values in memory")
        self._map, self.absent = None, {}
        materialise = self.checkpoint.materialise
        return tensors | {
            name: CheckpointSlice(View.whole(HostTensor.of(tensor)), materialise)
            for name, tensor in tensors.items()
            if not _is_extra_state(name)
        }

    def fill(self, model: nn.Module, missing: set[str], tied: set[str]) -> None:
        """Turn a lazy model into one that the destination trains, and read this rank's bytes into it (all ranks).

        For the arguments see :meth:`Destination.batches`. All ranks raise an error if planning or reading fails on any
        of them, or if they would load different things.
        """
        self._peak_before = peak_bytes(self.destination.device)
        self.coordinator.moves(lambda: self.checkpoint.source.bytes_read)
        with self.coordinator.reporting():
            try:
                with self.clock("plan"):
                    settings = self.destination.exchange_settings
                    described = describe_load(model, missing, self.ds_config, self.config, settings)
                    batches, plan, leaves = self.make_plan(model, missing, tied)
                    described["the number of exchanges"] = str(sum(batch.is_collective for batch in batches))
                    self.destination.check(plan.targets)
                    self.checkpoint.open(read.shard for read in plan)
                with self.clock("wait"):
                    read = refuse_differences(self.coordinator, described, beside=plan.cost.bytes_read)
                    self.destination.begin()
                self.memory.sample()
                self._reader.fill(batches, plan, leaves, sum(read))
                with self.clock("wait"):
                    self.coordinator.agree()
                self.destination.finish()
                note_read(self.checkpoint.source.bytes_read)
            except BaseException as error:
                if not self.checkpoint.reads_itself:
                    self.checkpoint.source.finish()  # the rank that reads for this one waits for it
                if isinstance(error, HfZeroStreamError) or not is_out_of_memory(error):
                    raise
                raise LoadError(f"out of memory on rank {self.coordinator.rank} while loading: {error}") from error

    def make_plan(
        self, model: nn.Module, missing: set[str], tied: set[str], *, only_planned: bool = False
    ) -> tuple[Sequence[Batch], LoadPlan, Sequence[Sequence[Leaf]]]:
        """Make the :attr:`plan` that :meth:`fill` carries out; spoils `model`."""
        self.destination.hints, self._tied = self.checkpoint.hints, tied
        self.destination.only_planned = only_planned
        batches = self.destination.batches(model, missing, tied)
        self.plan, leaves = self._reader.plan(batches)
        return batches, self.plan, leaves

    def finish(self, model: nn.Module, log: logging.Logger) -> LoadReport:
        """Gather every rank's figures, log them on the main process and return the report (all ranks)."""
        self.destination.complete(model)
        tensors = [*model.named_parameters(), *model.named_buffers()]
        if self.destination.leaves_lazy:
            tensors = [named for named in tensors if not isinstance(named[1], LazyTensor)]
        unfilled = [name for name, tensor in tensors if lacks_values(tensor)]
        if unfilled:
            raise LoadError(
                f"{len(unfilled)} parameters or buffers got no values: {', '.join(unfilled[:8])}. "
                "This is a fault of hf_zero_stream; please report it with the model's config."
            )
        plan = self.plan
        assert plan is not None
        figures = RankReport(
            rank=self.coordinator.rank,
            seconds=self.clock.seconds,
            bytes_needed=plan.cost.bytes_needed,
            bytes_read=self.checkpoint.source.bytes_read - self._reader.verification.bytes_read,
            reads=self.checkpoint.source.reads,
            retries=self.checkpoint.retries.count,
            verification=self._reader.verification,
            partition_bytes=plan.cost.target_bytes,
            staging_bytes=self._reader.staging_bytes,
            thread_seconds=self._reader.thread_seconds,
            anonymous_growth_peak=self.memory.growth_peak,
            device_peak=self._device_peak(),
            device_reserved=reserved_bytes(self.destination.device),
            materialised=plan.materialised,
        )
        ranks, recast = tuple(self.coordinator.all_gather(figures)), tuple(self.destination.recast)
        forecast = None
        if engine := self.destination.trained_by:
            forecast = partial(
                _memory_of,
                weakref.ref(model),
                tied=self._tied,
                engine=engine,
                ds_config=self.ds_config,
                world_size=self.coordinator.world_size,
                config=self.config,
                device=self.destination.device.type,
            )
        report = LoadReport(
            world_size=self.coordinator.world_size,
            ranks=ranks,
            into=self.destination.into,
            recast=recast,
            checkpoint_bytes=plan.checkpoint_bytes,
            stock_reader=self.destination.stock_reader if self._stock_could_read(plan) else "",
            forecast=forecast,
        )
        if self.coordinator.is_main:
            if log.isEnabledFor(logging.INFO):
                log.info(report.table())
            until = self.destination.until
            later = f"{bytes_text(plan.checkpoint_bytes)} of weights will be read when {until}"
            tell("load", later if until else report.summary(), report.to_dict)
        return report

    def _stock_could_read(self, plan: LoadPlan) -> bool:
        """Whether stock loads this checkpoint as it loads most: from shards of safetensors, by several ranks."""
        paths = [shard.path for shard in plan.shards]
        is_usual = all(path.endswith(".safetensors") and not is_url(path) for path in paths)
        return bool(paths) and is_usual and not self.checkpoint.mounts and not self.coordinator.is_alone

    def _device_peak(self) -> int:
        """See :attr:`RankReport.device_peak`. The statistics are not reset: the user may be in a training."""
        peak = peak_bytes(self.destination.device)
        return peak if peak > self._peak_before else used_bytes(self.destination.device)


def _memory_of(model: Callable[[], nn.Module | None], **how: Any) -> Any:
    """What a plug-in computes of the memory in which `model` is trained; None without the plug-in, or the model."""
    there = model()
    return tool("forecast", "forecast")(there, **how) if there is not None and has_tool("forecast") else None


def _is_extra_state(key: str) -> bool:
    """Whether a checkpoint key holds a module's extra state (``torch.nn.Module.get_extra_state``)."""
    return key.rpartition(".")[2] == "_extra_state"
