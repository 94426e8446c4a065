"""The open files of one load: which rank reads them, in what sizes and threads, and reading ahead."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..accelerators import is_accelerator, on_device, pinned
from ..checkpoint import formats
from ..checkpoint.format import Shard, ShardHeader
from ..checkpoint.formats import Format
from ..checkpoint.map import CheckpointMap
from ..checkpoint.nodes import View
from ..errors import ReadError
from ..ranks.coordinator import Coordinator
from ..registry import tool
from ..settings.config import READS_STAGED, StreamingConfig
from ..sources.base import RETRIES, ByteSource, Hints, Retries
from ..sources.by_path import FilesByPath, mounted_folders
from ..sources.local import LocalFiles, identity_of
from ..sources.page_cache import ReadAhead, free_memory
from .execute import run_in_threads
from .lanes import Lane, SideLane


if TYPE_CHECKING:
    from .compute import ShardEvaluator


SAMPLES, SAMPLE_BYTES = 8, 4096
"""Number and size of the pieces of a file that are compared with those of its copy on another host."""

SAMPLING_THREADS = 8
"""They wait for a disk or a network, and hardly compute."""

HEADER_THREADS = 64
"""Headers read at once over a network: each is one request or two, and of these the latency counts."""


class OpenCheckpoint:
    """The open files of one load, and how a rank that trains on `device` reads them.

    A rank that reads itself reads from what `make_source` returns; default: files of this host, and URLs.
    """

    def __init__(
        self,
        config: StreamingConfig,
        coordinator: Coordinator,
        make_source: Callable[[], ByteSource] | None = None,
        format: Format = formats,
        device: torch.device = torch.device("cpu"),
    ) -> None:
        self.config = config
        self.coordinator = coordinator
        self._make_source, self._format = make_source, format
        self._device = device
        self.staging_bytes = config.staging_on(device.type)
        self._is_relayed = False
        self._server: Any = None
        """Of :mod:`..plugins.relay`: it reads for other ranks."""
        self._ahead: ReadAhead | None = None
        self._pinning: threading.Thread | None = None
        self.shards: tuple[Shard, ...] = ()
        self.mounts: list[str] = []
        """Folders that are to be mounted wherever these files are opened again."""
        self.retries = Retries(RETRIES)
        # What others use is not there for files, whatever the machine has. What is read twice stays.
        reads_twice = config.compares_values
        self._cache_bytes = sys.maxsize if reads_twice else free_memory()
        local = LocalFiles(cache_bytes=self._cache_bytes, retries=self.retries)
        self.source = make_source() if make_source else FilesByPath(local, self.retries, _maker_at)
        """The source of this rank; once there are files, another rank if that one reads for this one."""
        self._use_hints()

    def reopened(self, coordinator: Coordinator, device: torch.device) -> OpenCheckpoint:
        """Open the same files for another load; one that has changed since is an error (all ranks)."""
        reopened = OpenCheckpoint(self.config, coordinator, self._make_source, self._format, device)
        if isinstance(self.source, FilesByPath) and isinstance(reopened.source, FilesByPath):
            reopened.source.local.first_status.update(self.source.local.first_status)
        reopened.add(self.shards)
        return reopened

    def close(self) -> None:
        """Release file handles."""
        if self._ahead is not None:
            self._ahead.stop()
        if self._pinning is not None:
            self._pinning.join()
        if self._server is not None:
            self._server.close()
        self.source.close()

    def read_ahead(self, paths: Sequence[str]) -> None:
        """Begin to bring files into the page cache, if the ranks of this host will read all of them.

        Not over a network, where many streams are faster than one long run. A second call does nothing.
        """
        topology = self.coordinator.topology
        shares = len(topology.ranks_of_host)
        if self._ahead is not None or shares != self.coordinator.world_size or self.config.read_from != "all":
            return
        with suppress(OSError, RuntimeError):  # ignored here: the reads themselves will raise
            # Files that do not fit would push everything else out of the page cache, and then their own beginnings.
            fits = sum(map(os.path.getsize, paths)) < free_memory()
            if fits and self.source.hints(paths).reads_ahead:
                self._ahead = ReadAhead(paths, topology.position, shares)

    def begin_pass(self, nbytes: int) -> tuple[float, Callable[[], None]]:
        """Prepare for one pass through the files that reads `nbytes`.

        Reading ahead stops unless all ranks, whose partitions are of equal size, will read nearly all of the files.
        Returns where in its reads this rank begins, in [0, 1), and what to call after each read. Ranks that read ahead
        together all begin with the first.
        """
        ahead, before, topology = self._ahead, self.source.bytes_read, self.coordinator.topology
        if ahead is not None and nbytes * self.coordinator.world_size >= 0.9 * ahead.total_bytes:
            return 0.0, lambda: ahead.set_progress((self.source.bytes_read - before) / max(1, nbytes))
        if ahead is not None:
            ahead.stop()
        return topology.position / len(topology.ranks_of_host), lambda: None

    def expect(self, nbytes: int) -> None:
        """Note that each rank is about to read `nbytes`.

        It stays in the page cache if the ranks of this host read it more than once, or if all that they read fits into
        free memory: a restart on this host reads nothing from storage.
        """
        ranks, total = self.coordinator.topology.ranks_of_host, sum(shard.size_bytes for shard in self.shards)
        # A tenth may be what all hold alike, buffers and small parameters.
        is_read_again = len(ranks) > 1 and nbytes * self.coordinator.world_size > 1.1 * total
        if isinstance(self.source, FilesByPath) and (is_read_again or self.fits_in_cache(nbytes * len(ranks))):
            self.source.local.keep_cached()

    def fits_in_cache(self, nbytes: int) -> bool:
        """Whether the page cache has room for so many bytes."""
        return nbytes < self._cache_bytes

    def read_headers(self, paths: Sequence[str]) -> list[ShardHeader]:
        """Read the headers of `paths`; when values are read, each file must still be the one that it was then."""
        found: dict[str, ShardHeader] = {}

        def work(pending: Iterator[str]) -> None:
            for path in pending:
                read = partial(self._format.read_header, self.source, path)
                found[path] = self.retries.call(read, lambda error: self.source.is_transient(error.__cause__))

        # From a disk one after the other: parsing what is in the page cache takes the time.
        many = self.source.hints(paths).is_remote
        run_in_threads(paths, work, min(len(paths), HEADER_THREADS) if many else 1)
        return [found[path] for path in paths]

    def map_from_headers(
        self, paths: Sequence[str], headers: Sequence[ShardHeader], weight_map: Mapping[str, str] | None = None
    ) -> CheckpointMap:
        """Map the files at `paths` by `headers`, which another rank may have read; :meth:`add` takes the shards."""
        return formats.map_from_headers(paths, headers, weight_map, len(self.shards), parse=self._format.parse_header)

    def identity(self, paths: Sequence[str]) -> str:
        """What is the same on hosts that see the same files of a network file system; "" if that is not known.

        Nor is it where all ranks are on one host, and see the same files.
        """
        is_one_host = len(self.coordinator.topology.ranks_of_host) == self.coordinator.world_size
        if is_one_host or not self.source.hints(paths).grows_requests:
            return ""
        with suppress(OSError):  # the headers' reader will raise it
            return identity_of(paths)
        return ""

    def samples(self, paths: Sequence[str]) -> list[bytes]:
        """A digest of each file's values at some places, 8 bytes long; a ReadError if a file cannot be read."""
        found = {path: b"" for path in paths if not formats.format_of_file(path).holds_values}

        def work(pending: Iterator[str]) -> None:
            for path in pending:
                found[path] = self._sample(path)

        with_values = [path for path in paths if path not in found]
        run_in_threads(with_values, work, min(len(with_values), SAMPLING_THREADS))  # ends all once one has failed
        return [found[path] for path in paths]

    def _sample(self, path: str) -> bytes:
        def sample() -> bytes:
            with self.source.open_file(path) as file:
                starts = (file.size_bytes * (2 * piece + 1) // (2 * SAMPLES) for piece in range(SAMPLES))
                pieces = (file.read(start, SAMPLE_BYTES) for start in starts)
                return hashlib.blake2b(b"".join(pieces), digest_size=8).digest()

        try:
            return self.retries.call(sample, self.source.is_transient)
        except OSError as error:
            raise ReadError(f"{path}: cannot read: {error.strerror or error}. Check the file system.") from error

    def _reader_and_clients(self) -> list[int]:
        """The rank that reads for this one, followed by all others that it reads for."""
        if self.config.read_from == "local_rank0":
            return list(self.coordinator.topology.ranks_of_host)
        return list(range(self.coordinator.world_size))

    def add(self, shards: tuple[Shard, ...]) -> int:
        """Append to :attr:`shards`, and return the number of the first of them (all ranks, if one reads for others).

        From then on a rank that does not see the shards asks the one that does, in planning too.
        """
        first = len(self.shards)
        self.shards, self.mounts = (*self.shards, *shards), mounted_folders()
        if self.relays and shards and not self._is_relayed:
            relay = tool("relay", "relay", f"read_from={self.config.read_from!r}")
            reader, *clients = self._reader_and_clients()
            with self.coordinator.naming_dead_rank():
                group = dist.new_group(backend="gloo")
            if self.coordinator.rank == reader:
                self._server = relay.RelayServer(self.source, clients, group)
            else:
                self.source = relay.RelayedFiles(self.source, reader, group)
            self._is_relayed = True
        self.source.add(shards)
        if self._is_relayed:
            self.coordinator.agree()  # no rank may ask for a shard that the reading rank does not know yet
        self._use_hints()
        return first

    def _use_hints(self) -> None:
        self.hints = self.source.hints([shard.path for shard in self.shards])
        if self._is_relayed:  # holes would be sent to other ranks, too
            self.hints = replace(self.hints, reads_per_exchange=1)
        wanted = self.hints.request_bytes
        if is_accelerator(self._device):
            wanted = self.hints.device_request_bytes or wanted
        if self.hints.grows_requests and self.shards:
            streams = streams_of_rank(self.coordinator.topology.sharing_cores, self.hints)
            wanted = max(wanted, self.staging_bytes // streams)
        self.request_bytes = max(1, min(self.staging_bytes // READS_STAGED, wanted))
        """Largest single read."""
        self.seek_bytes = self.hints.seek_bytes
        """Longest hole that is read through."""
        vars(self).pop("_evaluator", None)

    def evaluator(self, threads: int = 1, on_bytes: Callable[[int], None] | None = None) -> ShardEvaluator:
        from .compute import ShardEvaluator  # most checkpoints have nothing to compute

        return ShardEvaluator(
            self.source,
            request_bytes=self.request_bytes,
            seek_bytes=self.seek_bytes,
            staging_bytes=self.staging_bytes,
            threads=threads,
            on_bytes=on_bytes,
        )

    @cached_property
    def _evaluator(self) -> ShardEvaluator:
        return self.evaluator()

    def materialise(self, view: View) -> torch.Tensor:
        """The values of `view`, read now, in a new host tensor."""
        with self.coordinator.naming_dead_rank():
            return self._evaluator.materialise(view)

    @property
    def relays(self) -> bool:
        """Whether some ranks read for others."""
        return self.config.read_from != "all" and not self.coordinator.is_alone

    @property
    def reads_itself(self) -> bool:
        """Whether this rank reads the shards, and no other rank for it."""
        return not self.relays or self.coordinator.rank == self._reader_and_clients()[0]

    def pin_ahead(self) -> None:
        """Make the pinned buffers in a thread, while the plan is made: torch keeps them for the reads."""
        if not is_accelerator(self._device) or self._pinning is not None or not self.reads_itself:
            return
        count = self.threads() * SideLane.buffers

        def pin() -> None:
            with suppress(RuntimeError), on_device(self._device):  # the reads themselves will raise
                [pinned(self.request_bytes) for _ in range(count)]

        self._pinning = threading.Thread(target=pin, name="hf_zero_stream-pin", daemon=True)
        self._pinning.start()

    def open(self, numbers: Iterable[int]) -> None:
        """Open these shards if this rank reads them, so that a missing or changed one is found early."""
        if self.reads_itself:
            shards = sorted(set(numbers))
            run_in_threads(shards, self.source.open, min(len(shards), self.threads()))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A context for the reads of a load; at its end, no other rank reads for this one any more.

        Raises a ReadError at the end if this rank could not read for another one.
        """
        if self._pinning is not None:
            self._pinning.join()
        with self.coordinator.naming_dead_rank() if self._is_relayed else nullcontext():
            yield
            self.source.finish()
            if self._server is not None:
                self._server.finish()

    def threads(self) -> int:
        lane = SideLane if is_accelerator(self._device) else Lane
        buffers = self.staging_bytes // max(1, self.request_bytes * lane.buffers)
        ranks = self.coordinator.topology.sharing_cores
        most = MOST_THREADS_TO_DEVICE if lane is SideLane else MOST_THREADS
        return choose_threads(self.config.reader_threads, buffers, ranks, self.hints, most)


def _maker_at(url: str) -> Callable[[Retries], ByteSource]:
    from ..checkpoint.urls import checkpoints_at  # only URLs need it

    return checkpoints_at(url).source


def streams_of_rank(ranks_on_host: int, hints: Hints) -> int:
    """The requests that a rank has in flight to another machine: its share of those of its host, and at least 4."""
    return min(hints.streams_per_rank, max(4, hints.streams_per_host // ranks_on_host))


MOST_THREADS, MOST_THREADS_TO_DEVICE = 8, 12
"""Of one rank that reads local files, into host memory and onto an accelerator: there a plain loop of 12 threads took
0.36 s for 12 GB that 8 of ours took 0.65 s for."""


def choose_threads(wanted: int, buffers: int, ranks_on_host: int, hints: Hints, most: int = MOST_THREADS) -> int:
    """Choose the reading threads of a rank: `wanted`, or if that is 0 by the source; at most one for each buffer.

    From a local disk: the rank's share of the host's cores; at least 4, so that the disk has several requests while
    one thread copies or waits for fresh memory; at most `most`, because memory bandwidth bounds copies from the page
    cache.
    From another machine: the rank's share of the streams that use all of the bandwidth, at least 4 whatever the cores,
    because such threads mostly wait.
    """
    if not wanted and hints.is_remote:
        wanted = streams_of_rank(ranks_on_host, hints)
    elif not wanted:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        wanted = min(most, max(4, cores // ranks_on_host))
    return max(1, min(wanted, buffers))
