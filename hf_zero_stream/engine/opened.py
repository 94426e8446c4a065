"""The open files of one load: who reads them, how much at once, whether they are read ahead, and what was read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist

from ..checkpoint.index import Shard
from ..checkpoint.nodes import View
from ..config import StreamingConfig
from ..ranks.coordinator import Coordinator
from ..reports.memory import total_memory_bytes
from ..sources.local import Identity, ShardFiles
from ..sources.mounts import is_on_network
from ..sources.read_ahead import ReadAhead
from ..sources.relay import RelayedFiles, RelayServer
from ..sources.retries import Retries
from .compute import Evaluator
from .lanes import buffers_per_lane
from .streams import choose_request_bytes, choose_threads
from .workers import run_in_threads


__all__ = ["OpenCheckpoint"]

CLOSING_S = 10.0
"""How long a reading rank waits, after an error, for the ranks that it reads for to say that they are done."""


class OpenCheckpoint:
    """The open files of one load, and how this rank reads them.

    Args:
        config: our settings.
        coordinator: the ranks that load together.
        device: the device that this rank trains on; it decides how many staging buffers a thread has.
    """

    def __init__(self, config: StreamingConfig, coordinator: Coordinator, device: torch.device | None = None) -> None:
        self.shards: tuple[Shard, ...] = ()
        self.request_bytes = 0
        """Largest single read."""
        self.retries = Retries(config.read_retries)
        self._config = config
        self._coordinator = coordinator
        self._device = device or torch.device("cpu")
        self._on_network = False
        self._ahead: ReadAhead | None = None
        self._before = self._expected = 0
        self._identities: list[Identity] = []
        self._group: dist.ProcessGroup | None = None
        self._server: RelayServer | None = None
        self._earlier_bytes = self._earlier_reads = 0
        self.source = ShardFiles(())
        """Reads the bytes of the shards."""
        self._use_files(self.source)

    def close(self) -> None:
        """Release file handles."""
        self._stop_reading_ahead()
        self._end_relay()
        self.source.close()

    @property
    def bytes_read(self) -> int:
        """Bytes read so far, holes that were read through included; also what was read to verify."""
        return self._earlier_bytes + self.source.bytes_read

    @property
    def reads(self) -> int:
        """Positional reads so far."""
        return self._earlier_reads + self.source.reads

    # ------------------------------------------------------------------------------------------ reading ahead

    def read_ahead(self, paths: Sequence[str]) -> None:
        """Begin to bring files into the page cache, if the ranks of this host will read all of them, and through it.

        Over a network each rank reads its own bytes only: many streams are faster there than one long run.
        """
        topology = self._coordinator.topology
        shares = len(topology.ranks_of_host)
        through_cache = self._config.read_from == "all" and not self._config.direct_io
        if self._ahead is not None or shares != self._coordinator.world_size or not through_cache:
            return
        with suppress(OSError, RuntimeError):  # ignored here: the reads themselves will raise
            if _fit_into_memory(map(os.path.getsize, paths)) and not _are_on_network(paths):
                self._ahead = ReadAhead(paths, topology.position, shares)

    def expect(self, nbytes: int) -> None:
        """Say how many bytes this rank is about to read, going once through the files.

        Reading ahead stops, unless these are nearly all of the files: partitions are of equal size.
        """
        if self._ahead is not None and nbytes * self._coordinator.world_size < 0.9 * self._ahead.total_bytes:
            self._stop_reading_ahead()
        self._before, self._expected = self.bytes_read, nbytes

    def note_progress(self) -> None:
        """Tell reading ahead how far the reads have come; called after each."""
        if self._ahead is not None:
            self._ahead.reached((self.bytes_read - self._before) / max(1, self._expected))

    @property
    def first_read(self) -> float:
        """Which part of its reads this rank begins with, in [0, 1).

        Ranks that read ahead together go through the files together; others begin at different places.
        """
        topology = self._coordinator.topology
        return 0.0 if self._ahead else topology.position / len(topology.ranks_of_host)

    def _stop_reading_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.stop()
            self._ahead = None

    # ------------------------------------------------------------------------------------------ files

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
        self.request_bytes = choose_request_bytes(
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
            self._server = RelayServer(lambda: self.source, clients, self._group, self._config.chunk_bytes)
        if not is_first:
            self._coordinator.agree()  # nobody may ask for a shard that the reading rank does not know yet

    def _end_relay(self) -> None:
        group, self._group = self._group, None
        if group is None:
            return
        if isinstance(self.source, RelayedFiles):
            self.source.finish()
        if self._server is None or self._server.has_ended(CLOSING_S):  # else a rank hangs, which is not for us to say
            dist.destroy_process_group(group)

    def _use_files(self, files: ShardFiles) -> None:
        self.source.close()
        self._earlier_bytes += self.source.bytes_read
        self._earlier_reads += self.source.reads
        self.source = files
        self.evaluator = Evaluator(
            files,
            request_bytes=self.request_bytes,
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
            return self.evaluator.materialise(view)

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

    def open(self, numbers: Iterable[int]) -> None:
        """Open these shards, so that one that is missing here is found before anything is read.

        Raises:
            ReadError, CheckpointError: a shard cannot be opened, or is not the one whose header was read.
        """
        if self.reads_itself:
            run_in_threads(sorted(set(numbers)), self.source.open, self.threads())

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around the reads of a load; afterwards no other rank reads for this one any more.

        Raises:
            PeerError: another rank died.
            ReadError: this rank could not read for another one.
        """
        if self._group is None:
            yield
            return
        try:
            with self._coordinator.naming_dead_rank():
                yield
                if self._server is not None:
                    self._server.wait()
        finally:
            if isinstance(self.source, RelayedFiles):
                self.source.finish()  # at once: the reading rank waits for it
        self._end_relay()

    def threads(self) -> int:
        """How many threads read at once."""
        return choose_threads(
            self._config.reader_threads,
            self._config.staging_bytes // max(1, self.request_bytes * buffers_per_lane(self._device)),
            self._coordinator.topology.sharing_cores,
            self._on_network,
        )


def _are_on_network(paths: Iterable[str]) -> bool:
    # The hub's cache is made of links, and its files may lie elsewhere.
    return any(map(is_on_network, {os.path.dirname(os.path.realpath(path)) for path in paths}))


def _fit_into_memory(sizes: Iterable[int]) -> bool:
    """What does not would only push its own beginning out of the page cache, and all else first."""
    return sum(sizes) < total_memory_bytes()
