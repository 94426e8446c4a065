"""The open files of one load: who reads them, how much at once, whether they are read ahead, and what was read."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial

import psutil
import torch

from ..checkpoint import safetensors
from ..checkpoint.format import Format, Shard, ShardHeader
from ..checkpoint.nodes import View
from ..config import StreamingConfig
from ..errors import ReadError
from ..ranks.coordinator import Coordinator
from ..sources.base import ByteSource, Hints
from ..sources.local import LocalFiles
from ..sources.read_ahead import ReadAhead
from ..sources.relay import reader_and_clients, through_relay
from ..sources.retries import Retries
from .compute import Evaluator
from .lanes import lane_class
from .workers import run_in_threads


__all__ = ["OpenCheckpoint", "choose_threads"]

SAMPLES, SAMPLE_BYTES = 8, 4096
"""How many pieces of a file are compared with those of its copy on another host, and how large each is."""

SAMPLING_THREADS = 8
"""They wait for a disk or a network, and hardly compute."""


class OpenCheckpoint:
    """The open files of one load, and how this rank reads them.

    Args:
        source: where a rank that reads itself reads from; default: files of this host.
        device: the device that this rank trains on; it decides how many staging buffers a thread has.
    """

    def __init__(
        self,
        config: StreamingConfig,
        coordinator: Coordinator,
        source: ByteSource | None = None,
        format: Format = safetensors,
        device: torch.device = torch.device("cpu"),
    ) -> None:
        self._format = format
        self._config = config
        self._coordinator = coordinator
        self._device = device
        self._is_relayed = False
        self._ahead: ReadAhead | None = None
        self._before = self._expected = 0
        self.shards: tuple[Shard, ...] = ()
        self.retries = Retries(config.read_retries)
        self.source = source or LocalFiles(
            direct_io=config.direct_io, cache_bytes=psutil.virtual_memory().total, retries=self.retries
        )
        """Where this rank reads from; once there are files, that is another rank if that one reads for this one."""
        self._use_hints()

    def close(self) -> None:
        """Release file handles."""
        self._stop_reading_ahead()
        self.source.close()

    def read_ahead(self, paths: Sequence[str]) -> None:
        """Begin to bring files into the page cache, if the ranks of this host will read all of them, and through it.

        Over a network each rank reads its own bytes only: there, many streams are faster than one long run.
        """
        topology = self._coordinator.topology
        shares = len(topology.ranks_of_host)
        through_cache = self._config.read_from == "all" and not self._config.direct_io
        if self._ahead is not None or shares != self._coordinator.world_size or not through_cache:
            return
        with suppress(OSError, RuntimeError):  # ignored here: the reads themselves will raise
            # Files that do not fit would push everything else out of the page cache, and then their own beginnings.
            fits = sum(map(os.path.getsize, paths)) < psutil.virtual_memory().total
            if fits and self.source.hints(paths).reads_ahead:
                self._ahead = ReadAhead(paths, topology.position, shares)

    def expect(self, nbytes: int) -> None:
        """Prepare for one pass through the files that reads `nbytes`; called before it.

        Reading ahead stops unless all ranks, whose partitions are of equal size, will read nearly all of the files.
        """
        if self._ahead is not None and nbytes * self._coordinator.world_size < 0.9 * self._ahead.total_bytes:
            self._stop_reading_ahead()
        self._before, self._expected = self.source.bytes_read, nbytes

    def note_progress(self) -> None:
        """Tell reading ahead how far the reads have come; called after each read."""
        if self._ahead is not None:
            self._ahead.reached((self.source.bytes_read - self._before) / max(1, self._expected))

    @property
    def first_read(self) -> float:
        """Where in its reads this rank begins, in [0, 1): ranks that read ahead together all begin with the first."""
        topology = self._coordinator.topology
        return 0.0 if self._ahead else topology.position / len(topology.ranks_of_host)

    def _stop_reading_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.stop()
            self._ahead = None

    def read_headers(self, paths: Sequence[str]) -> list[ShardHeader]:
        """Read the headers of `paths`; when values are read, each file must still be the one that it was then."""

        def is_transient(error: BaseException) -> bool:
            return self.source.is_transient(error.__cause__)

        reads = (partial(self._format.read_header, self.source, path) for path in paths)
        return [self.retries.call(read, is_transient) for read in reads]

    def samples(self, paths: Sequence[str]) -> list[bytes]:
        """For each file, a digest of some of its bytes, 8 bytes long; raises ReadError if one cannot be read."""
        found: dict[str, bytes] = {}

        def work(pending: Iterator[str]) -> None:
            for path in pending:
                try:
                    found[path] = self.retries.call(partial(self._sample, path), self.source.is_transient)
                except OSError as error:
                    message = f"{path}: cannot read: {error.strerror or error}. Check the file system."
                    raise ReadError(message) from error

        run_in_threads(paths, work, SAMPLING_THREADS)
        return [found[path] for path in paths]

    def _sample(self, path: str) -> bytes:
        with self.source.open_file(path) as file:
            starts = (file.size_bytes * (2 * piece + 1) // (2 * SAMPLES) for piece in range(SAMPLES))
            pieces = (file.read(start, SAMPLE_BYTES) for start in starts)
            return hashlib.blake2b(b"".join(pieces), digest_size=8).digest()

    def add(self, shards: tuple[Shard, ...]) -> int:
        """Append to :attr:`shards`, and return the number of the first of them (all ranks, if one reads for others).

        From then on a rank that does not see the shards asks the one that does, in planning too.
        """
        first = len(self.shards)
        self.shards = (*self.shards, *shards)
        self.source.add(shards)
        if self._is_relayed:
            self._coordinator.agree()  # no rank may ask for a shard that the reading rank does not know yet
        elif self.relays and self.shards:
            self.source = through_relay(self.source, self._paths, self._config, self._coordinator)
            self._is_relayed = True
        self._use_hints()
        return first

    @property
    def _paths(self) -> list[str]:
        return [shard.path for shard in self.shards]

    def _use_hints(self) -> None:
        self._hints = self.source.hints(self._paths)
        self.request_bytes = self._config.request_bytes or min(self._config.staging_bytes, self._hints.request_bytes)
        """Largest single read."""
        self._evaluator = self.evaluator()

    def evaluator(self, threads: int = 1, on_bytes: Callable[[int], None] | None = None) -> Evaluator:
        return Evaluator(
            self.source,
            request_bytes=self.request_bytes,
            seek_bytes=self._config.seek_bytes,
            staging_bytes=self._config.staging_bytes,
            threads=threads,
            on_bytes=on_bytes,
        )

    def materialise(self, view: View) -> torch.Tensor:
        """The values of `view`, read now, in a new host tensor."""
        with self._coordinator.naming_dead_rank():
            return self._evaluator.materialise(view)

    @property
    def relays(self) -> bool:
        """Whether some ranks read for others."""
        return self._config.read_from != "all" and not self._coordinator.is_alone

    @property
    def reads_itself(self) -> bool:
        """Whether this rank reads the shards, and no other rank for it."""
        return not self.relays or self._coordinator.rank == reader_and_clients(self._config, self._coordinator)[0]

    def open(self, numbers: Iterable[int]) -> None:
        """Open these shards, so that one that is missing or not the one whose header was read is found early."""
        if self.reads_itself:
            run_in_threads(sorted(set(numbers)), self.source.open, self.threads())

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around the reads of a load; afterwards no other rank reads for this one any more.

        Raises a ReadError at the end if this rank could not read for another one.
        """
        try:
            with self._coordinator.naming_dead_rank() if self._is_relayed else nullcontext():
                yield
                self.source.finish()
        except BaseException:
            if not self.reads_itself:
                self.source.finish()  # the rank that reads for this one waits for it
            raise

    def threads(self) -> int:
        buffers = self._config.staging_bytes // max(1, self.request_bytes * lane_class(self._device).buffers)
        ranks = self._coordinator.topology.sharing_cores
        return choose_threads(self._config.reader_threads, buffers, ranks, self._hints)


def choose_threads(wanted: int, buffers: int, ranks_on_host: int, hints: Hints) -> int:
    """How many threads of a rank read at once: `wanted`, or if that is 0 by the source; at most one for each buffer.

    From a local disk: the rank's share of the host's cores; at least 4, so that the disk has several requests while
    one thread copies or waits for fresh memory; at most 8, because memory bandwidth bounds copies from the page cache.
    From another machine: the rank's share of the streams that use all of the bandwidth, at least 4 whatever the cores,
    because such threads mostly wait.
    """
    if not wanted and hints.is_remote:
        wanted = min(hints.streams_per_rank, max(4, hints.streams_per_host // ranks_on_host))
    elif not wanted:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        wanted = min(8, max(4, cores // ranks_on_host))
    return max(1, min(wanted, buffers))
