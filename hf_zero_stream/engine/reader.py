"""Filling destinations from a checkpoint's files, batch by batch, in the way that the settings ask for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ..checkpoint.index import Shard
from ..checkpoint.nodes import View
from ..config import StreamingConfig
from ..destinations.deepspeed import zero3
from ..planning.plan import LoadPlan, Target, make_plan
from ..ranks.coordinator import Coordinator
from ..reports.load import PhaseClock, Verification
from ..reports.memory import AnonymousMemory, total_memory_bytes
from ..reports.progress import progress_bar
from ..sources.local import Identity, ShardFiles
from ..sources.mounts import is_on_network
from ..sources.read_ahead import ReadAhead
from ..sources.relay import RelayedFiles, RelayServer
from ..sources.retries import Retries
from .compute import Evaluator
from .execute import execute_reads
from .lanes import buffers_per_lane
from .lookup import Lookup
from .streams import choose_request_bytes, choose_threads
from .verification import Verifier
from .workers import run_in_threads


__all__ = ["Batch", "Item", "Reader"]

CLOSING_S = 10.0
"""How long a reading rank waits, after an error, for the ranks that it reads for to say that they are done."""

Item = tuple[Target, View]
"""What to fill, and from what."""


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Batch:
    """Targets that have memory at the same time.

    Attributes:
        items: what to fill, and from what.
        begin: gives one flat destination for each item; called when the batches before are settled.
        settle: called when the destinations are full, for instance to move them on.
        is_collective: all ranks must settle together, and have the same batches.
        is_lent: the destinations hold the values only until the batch is settled.
        completes: whole tensors, flat, that this rank has once all batches are settled, by the parameter's name.
    """

    items: Sequence[Item]
    begin: Callable[[], Sequence[torch.Tensor]]
    settle: Callable[[], None] = _nothing
    is_collective: bool = False
    is_lent: bool = False
    completes: Mapping[str, torch.Tensor] = field(default_factory=dict)


class Reader:
    """The open files of one load, and how this rank reads them.

    Args:
        config: our settings.
        coordinator: the ranks that load together.
        clock: what the phases took.
        memory: sampled where it may be at its peak.
    """

    def __init__(
        self, config: StreamingConfig, coordinator: Coordinator, clock: PhaseClock, memory: AnonymousMemory
    ) -> None:
        self.staging_bytes = 0
        """Most bytes of staging buffers that there were at one time."""
        self.shards: tuple[Shard, ...] = ()
        self._config = config
        self._coordinator = coordinator
        self._clock = clock
        self._memory = memory
        self._on_network = False
        self._request_bytes = 0
        self._verifier: Verifier | None = None
        self._ahead: ReadAhead | None = None
        self.retries = Retries(config.read_retries)
        self._identities: list[Identity] = []
        self._group: dist.ProcessGroup | None = None
        self._server: RelayServer | None = None
        self._earlier_bytes = self._earlier_reads = 0
        self._files = ShardFiles(())
        self._use_files(self._files)

    def close(self) -> None:
        """Release file handles."""
        self._stop_reading_ahead()
        self._end_relay()
        self._files.close()

    @property
    def bytes_read(self) -> int:
        """Bytes read so far, holes that were read through included; without what was read to verify."""
        verified = self._verifier.result.bytes_read if self._verifier else 0
        return self._earlier_bytes + self._files.bytes_read - verified

    @property
    def reads(self) -> int:
        """Positional reads so far."""
        return self._earlier_reads + self._files.reads

    @property
    def verification(self) -> Verification:
        """What was verified."""
        return self._verifier.result if self._verifier else Verification(how=self._config.verify)

    def read_ahead(self, paths: Sequence[str]) -> None:
        """Begin to bring files into the page cache, if the ranks of this host will read all of them, and through it.

        Over a network each rank reads its own bytes only: many streams are faster there than one long run.
        """
        topology = self._coordinator.topology
        shares = len(topology.ranks_of_host)
        through_cache = self._config.read_from == "all" and not self._config.direct_io
        if self._ahead is not None or shares != self._coordinator.world_size or not through_cache:
            return
        with suppress(OSError, RuntimeError):  # whatever cannot be read, the reads will say so
            if _fit_into_memory(map(os.path.getsize, paths)) and not _are_on_network(paths):
                self._ahead = ReadAhead(paths, topology.position, shares)

    def _stop_reading_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.stop()
            self._ahead = None

    def add(self, shards: tuple[Shard, ...], identities: Sequence[Identity] = ()) -> int:
        """Read from `shards` too from now on; where one rank reads for others, all of them call it together.

        Args:
            identities: what the files were when this rank read their headers, if it did.

        Returns:
            The number of the first of them among :attr:`shards`.
        """
        first = len(self.shards)
        self.shards = shards = (*self.shards, *shards)
        self._identities = [*self._identities, *identities]
        self._on_network = _are_on_network(shard.path for shard in shards)
        self._request_bytes = choose_request_bytes(
            self._config.request_bytes, self._config.staging_bytes, self._on_network, self._config.direct_io
        )
        self._use_files(
            ShardFiles(
                shards,
                direct_io=self._config.direct_io,
                keep_cached=_fit_into_memory(shard.size_bytes for shard in shards),
                retries=self.retries,
                identities=self._identities,
            )
        )
        if self.relays and shards:
            self._begin_relay()
        return first

    def _begin_relay(self) -> None:
        """From here on a rank that does not see the shards asks the one that does, in planning too."""
        is_first = self._group is None
        if is_first:
            with self._coordinator.naming_dead_rank():
                self._group = dist.new_group(backend="gloo")
        reader, *clients = self._readers_clients()
        if self._coordinator.rank != reader:
            self._use_files(RelayedFiles(self.shards, reader, self._group, self._config.chunk_bytes))
        elif self._server is None:
            self._server = RelayServer(lambda: self._files, clients, self._group, self._config.chunk_bytes)
        if not is_first:
            self._coordinator.agree()  # nobody may ask for a shard that the reading rank does not know yet

    def _end_relay(self) -> None:
        group, self._group = self._group, None
        if group is None:
            return
        if isinstance(self._files, RelayedFiles):
            self._files.finish()
        if self._server is None or self._server.has_ended(CLOSING_S):  # else a rank hangs, which is not for us to say
            dist.destroy_process_group(group)

    def _use_files(self, files: ShardFiles) -> None:
        self._files.close()
        self._earlier_bytes += self._files.bytes_read
        self._earlier_reads += self._files.reads
        self._files = files
        self._evaluator = Evaluator(
            files,
            self.shards,
            request_bytes=self._request_bytes,
            seek_bytes=self._config.seek_bytes,
            staging_bytes=self._config.staging_bytes,
        )

    def materialise(self, view: View) -> torch.Tensor:
        """The values of `view`, read now, in a new host tensor.

        Raises:
            ReadError, CheckpointError: a shard could not be read.
            PeerError: the rank that reads for this one died.
        """
        with self._coordinator.naming_dead_rank():
            return self._evaluator.materialise(view)

    def plan(self, items: Iterable[Item]) -> LoadPlan:
        """How this rank would fill the targets of `items`."""
        return make_plan(
            items,
            self.shards,
            rank=self._coordinator.rank,
            world_size=self._coordinator.world_size,
            request_bytes=self._request_bytes,
            seek_bytes=self._config.seek_bytes,
        )

    @property
    def relays(self) -> bool:
        """Whether ranks read for others, and not each for itself."""
        return self._config.read_from != "all" and not self._coordinator.is_alone

    @property
    def reads_itself(self) -> bool:
        """Whether this rank reads the shards, and not another one for it."""
        return not self.relays or self._coordinator.rank == self._readers_clients()[0]

    def _readers_clients(self) -> list[int]:
        """The rank that reads for this one, and after it all that it reads for."""
        on_each_host = self._config.read_from == "local_rank0"
        return self._coordinator.topology.ranks_of_host if on_each_host else [*range(self._coordinator.world_size)]

    def open(self, plan: LoadPlan) -> None:
        """Open the shards that `plan` reads from, so that one that is missing here is found before anything is read.

        Raises:
            ReadError, CheckpointError: a shard cannot be opened, or is not the one whose header was read.
        """
        if self.reads_itself:
            run_in_threads(sorted({read.shard for read in plan.reads}), self._files.open, self._threads())

    def fill(self, batches: Sequence[Batch], plan: LoadPlan) -> None:
        """Fill the destinations of `batches`, one batch after the other.

        Args:
            plan: the plan of all of their items together.

        Raises:
            ReadError, CheckpointError: a shard could not be read, or changed meanwhile.
            LoadError: what was placed is not what the files hold.
            PeerError: another rank died.
        """
        if self._config.verify in ("sample", "full"):
            self._verifier = Verifier(self._config.verify, self._coordinator.rank, self._threads())
        if self._group is None:
            self._fill(batches, plan)
            return
        try:
            with self._coordinator.naming_dead_rank():
                self._fill(batches, plan)
                if self._server is not None:
                    self._server.wait()
        finally:
            if isinstance(self._files, RelayedFiles):
                self._files.finish()  # at once: the reading rank waits for it
        self._end_relay()

    def _threads(self) -> int:
        return choose_threads(
            self._config.reader_threads,
            self._config.staging_bytes // max(1, self._request_bytes * buffers_per_lane(zero3.local_device())),
            self._coordinator.topology.sharing_cores,
            self._on_network,
        )

    def _keep_reading_ahead(self, batches: Sequence[Batch], plan: LoadPlan) -> None:
        """Stop, unless the reads to come go once through nearly all of the files: partitions are of equal size."""
        if self._ahead is not None:
            needed = plan.cost.bytes_read * self._coordinator.world_size
            if len(batches) > 1 or needed < 0.9 * self._ahead.total_bytes:
                self._stop_reading_ahead()

    def _fill(self, batches: Sequence[Batch], plan: LoadPlan) -> None:
        threads = self._threads()
        self._keep_reading_ahead(batches, plan)
        kept: list[tuple[Sequence[Item], Sequence[torch.Tensor]]] = []
        with progress_bar(plan.cost.bytes_read, "Streaming weights", self._config.progress) as bar:

            def on_bytes(nbytes: int) -> None:
                bar.update(nbytes)
                if self._ahead is not None:
                    self._ahead.reached(self._files.bytes_read / max(1, plan.cost.bytes_read))
                self._coordinator.check()  # no need to read on for ranks that are not there any more

            for batch in batches:
                error: BaseException | None = None
                try:
                    of_batch = plan if len(batches) == 1 else self.plan(batch.items)
                    destinations = batch.begin()
                    self._carry_out(of_batch, destinations, threads, on_bytes)
                    if batch.is_lent:
                        self._verify(batch.items, destinations)
                    else:
                        kept.append((batch.items, destinations))
                except BaseException as caught:
                    error = caught
                    if not batch.is_collective:
                        raise
                if batch.is_collective:
                    self._coordinator.agree(error)  # nobody may wait in a collective for a rank that gave up
                batch.settle()
        self._verify_kept(kept, {name: tensor for batch in batches for name, tensor in batch.completes.items()})
        if self._config.verify != "off":
            self._files.check_unchanged()

    def _verify(self, items: Sequence[Item], destinations: Sequence[torch.Tensor]) -> None:
        if self._verifier is not None:
            files = self._files
            lookup = Lookup(files, self._evaluator.materialise)
            self._verifier.verify(items, destinations, lookup, lambda: files.bytes_read, self._coordinator.check)

    def _verify_kept(
        self, kept: Sequence[tuple[Sequence[Item], Sequence[torch.Tensor]]], completes: Mapping[str, torch.Tensor]
    ) -> None:
        error: BaseException | None = None
        try:
            for items, destinations in kept:
                self._verify(items, destinations)
        except BaseException as caught:
            error = caught
            if not completes:
                raise
        if completes and self._config.verify == "full":
            assert self._verifier is not None
            mine = {name: part for name, part in self._verifier.parts.items() if name in completes}
            self._verifier.verify_whole(completes, self._coordinator.all_gather(mine, error))
        elif error is not None:
            raise error

    def _carry_out(
        self, plan: LoadPlan, destinations: Sequence[torch.Tensor], threads: int, on_bytes: Callable[[int], None]
    ) -> None:
        topology = self._coordinator.topology
        times = execute_reads(
            plan,
            destinations,
            self._files,
            threads=threads,
            # Ranks that read ahead together go through the files together.
            begin=0.0 if self._ahead else topology.position / len(topology.ranks_of_host),
            on_bytes=on_bytes,
        )
        self.staging_bytes = max(self.staging_bytes, times.staging_bytes)
        self._clock.add("read", times.read)
        self._clock.add("convert", times.convert)
        self._clock.add("copy", times.copy)
        self._memory.sample()
        with self._clock("convert"):
            self._evaluator.place(plan, destinations, threads, on_bytes)
        self._memory.sample()


def _are_on_network(paths: Iterable[str]) -> bool:
    # The hub's cache is made of links, and its files may lie elsewhere.
    return any(map(is_on_network, {os.path.dirname(os.path.realpath(path)) for path in paths}))


def _fit_into_memory(sizes: Iterable[int]) -> bool:
    """What does not would only push its own beginning out of the page cache, and all else first."""
    return sum(sizes) < total_memory_bytes()
