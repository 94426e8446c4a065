"""``save_pretrained``: a partitioned model into the folder that transformers would write for the whole one."""

from __future__ import annotations

import hashlib
import inspect
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..checkpoint.layout import NotedShard
from ..checkpoint.lazy import LazyTensor
from ..checkpoint.nodes import View
from ..checkpoint.wrapped import refuse_wrapped
from ..config import WRITERS, StreamingConfig
from ..destinations import kinds
from ..errors import ConfigError, SaveError, UnsupportedError
from ..ranks.coordinator import Coordinator, expected_at
from ..ranks.rendezvous import SAVE
from ..reports.load import PhaseClock
from ..reports.memory import AnonymousMemory, collector_paused
from ..reports.progress import progress_bar
from ..reports.save import PHASES, SaveReport, SavingRank
from ..scope import current_config
from ..seams import other_config, zero3_config
from ..seams.saving import index_name, lay_out_pretrained
from ..seams.wrappers import unwrapped
from . import calls
from .arguments import floating_dtype, refuse_unsupported
from .files import Comparison, ShardWriter, reserve
from .gathered import occasion_to_save
from .parameters import Parameters, lazy_parameters, lazy_state_dict
from .plan import SavePlan, ShardToWrite, make_save_plan, shard_to_write
from .publish import Publication
from .write import Sink, execute_save


__all__ = ["CHUNK_BYTES", "LayOut", "Save", "save_pretrained"]

logger = logging.get_logger(__name__)

CHUNK_BYTES = 16 * 2**20

LayOut = Callable[[Path, Parameters], list[NotedShard]]
"""Writes everything but the weights of a checkpoint into a folder, and says which file they belong in."""

_SUFFIX = re.compile(r"-\d{5}-of-\d{5}(?=\.safetensors$)")


def save_pretrained(
    model: Any,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | str | None = None,
    write_from: Literal["auto", "all", "rank0"] | None = None,
    verify: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
    progress: bool = True,
    **kwargs: Any,
) -> SaveReport:
    """Save a model under DeepSpeed as transformers' ``save_pretrained`` saves the whole of it; nothing is gathered.

    Every rank must call it, and writes the bytes that it holds. The folder is the one that transformers writes: the
    same shards with the same bytes, index, config and generation config, with the names and layouts of the checkpoint
    that the model came from. Works before and after ``deepspeed.initialize``, with every ZeRO stage and without any.

    Files appear under their final names when all are complete; whatever fails, an earlier checkpoint there stays.

    Args:
        model: the model, or the engine, or what ``accelerator.prepare`` made of it.
        folder: where to save; it need not be seen by other ranks than rank 0.
        max_shard_size: of a file, in bytes, or as in ``"5GB"``.
        dtype: of the floating-point weights; default: the model's own. ``torch.float32`` takes the fp32 values that
            the optimizer trains, where there are any.
        write_from: ``"all"`` ranks write, or ``"rank0"`` does, to which the others send theirs in chunks; ``"auto"``
            is the first if all see the folder, else the second. Default: :attr:`StreamingConfig.write_from`.
        verify: compare what is in the files with what the ranks hold before the files get their names.
        chunk_bytes: memory of this size, a few times over, is what a rank needs to exchange elements with others.
        progress: show a bar on the first rank of each host.
        kwargs: anything else that transformers' ``save_pretrained`` takes, for instance ``variant``.

    Returns:
        What every rank did; the same on all of them.

    Raises:
        SaveError: on all ranks, if a file cannot be written on any.
        ConfigError, UnsupportedError: an argument has a value that is not known, or cannot be honoured.

    Example:
        >>> hf_zero_stream.save_pretrained(engine, "trained", dtype=torch.float32)
    """
    settings = {"write_from": write_from, "chunk_bytes": chunk_bytes, "verify": verify, "progress": progress}
    if calls.is_led():  # a save_pretrained of the model's own calls this
        return calls.save_as_led(
            model, folder, dtype=floating_dtype(dtype), max_shard_size=max_shard_size, **settings, **kwargs
        )
    with expected_at(SAVE):
        dtype = floating_dtype(dtype)
        save = Save(model, Path(folder), dtype=dtype, write_from=write_from, chunk_bytes=chunk_bytes)
        if not calls.has_own_save_pretrained(save.model):
            return save.pretrained(verify=verify, progress=progress, max_shard_size=max_shard_size, **kwargs)
        refuse_unsupported(kwargs)
        report = calls.led(
            save.model,
            lambda: save.by_own_code(max_shard_size=max_shard_size, **kwargs),
            takes_all=True,
            dtype=dtype,
            **settings,
        )
        if report is None:
            raise SaveError(f"{folder}: {type(save.model).__name__}.save_pretrained has saved nothing.")
        return report


class Save:
    """One save, which all ranks carry out together; see :func:`save_pretrained`."""

    def __init__(
        self,
        model: Any,
        folder: Path,
        *,
        dtype: torch.dtype | None = None,
        write_from: str | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        if write_from is not None and write_from not in WRITERS:
            raise ConfigError(f"write_from: expected one of {', '.join(WRITERS)}; got {write_from!r}")
        if chunk_bytes < 1:
            raise ConfigError(f"chunk_bytes: expected a size in bytes, at least 1; got {chunk_bytes!r}")
        inner = unwrapped(model)
        if not isinstance(inner, PreTrainedModel):
            raise UnsupportedError(
                f"save_pretrained: expected a transformers model or an engine around one; got {type(inner)}. "
                "A PEFT model saves its adapters itself, and they are not large."
            )
        refuse_wrapped(
            inner.named_parameters(),
            "save_pretrained",
            "Save it with model.save_pretrained, which gathers such tensors.",
        )
        self.model: PreTrainedModel = inner
        self._folder = folder
        self._dtype = dtype
        self._write_from = write_from
        self._single_writer = False
        self._chunk_bytes = chunk_bytes
        self._coordinator = Coordinator.of_default_group()
        self._clock = PhaseClock(PHASES)
        self._memory = AnonymousMemory()

    def pretrained(
        self,
        *,
        state_dict: Mapping[str, Any] | None = None,
        verify: bool = False,
        progress: bool = True,
        **kwargs: Any,
    ) -> SaveReport:
        """Save what transformers' ``save_pretrained`` would.

        Args:
            state_dict: what to save, lazy, with the parameters' own names in its nodes; default: all of the model.
            kwargs: for transformers' function.
        """
        refuse_unsupported(kwargs)

        def lay_out(folder: Path, parameters: Parameters) -> list[NotedShard]:
            entries = state_dict
            if entries is None:
                entries = lazy_state_dict(self.model, parameters.lazy, parameters.gather, self._dtype)
            else:
                entries = {name: _with_values(value, parameters.gather) for name, value in entries.items()}
                _refuse_empty(entries, parameters)
            return lay_out_pretrained(
                self.model, folder, dict(entries), entries, parameters.numel, self._dtype, own_code=False, **kwargs
            )

        return self.run(lay_out, index_name(kwargs.get("variant")), verify=verify, progress=progress)

    def by_own_code(self, **kwargs: Any) -> None:
        """Call the ``save_pretrained`` of the model's own class, with a lazy state dict if it takes one."""
        held = kinds.holdings(
            self.model,
            masters=self._dtype == torch.float32,
            rank=self._coordinator.rank,
            world_size=self._coordinator.world_size,
        )
        lazy = lazy_parameters(held, calls.refuse_values, self._dtype)
        given = {"state_dict": lazy_state_dict(self.model, lazy, calls.refuse_values, self._dtype), **kwargs}
        try:
            inspect.signature(self.model.save_pretrained).bind(self._folder, **given)
        except TypeError:
            given = kwargs
        self.model.save_pretrained(self._folder, **given)

    def run(self, lay_out: LayOut, index_name: str, *, verify: bool = False, progress: bool = True) -> SaveReport:
        """Save what `lay_out` lays out, and publish it; all ranks must call it."""
        with self._coordinator.watched(occasion_to_save(self.model, self._coordinator)):
            return self._run(lay_out, index_name, verify, progress)

    def _run(self, lay_out: LayOut, index_name: str, verify: bool, progress: bool) -> SaveReport:
        publication: Publication | None = None
        try:
            with (
                self._coordinator.reporting(),
                self._memory,
                self._clock("total"),
                collector_paused(),
                torch.no_grad(),
                torch.inference_mode(False),
            ):
                write_from, publication = self._coordinator.broadcast(
                    lambda: (self._write_from or _settings().write_from, Publication.begin(self._folder))
                )
                self._single_writer = write_from == "rank0" or (write_from == "auto" and self._is_hidden(publication))
                with self._clock("plan"):
                    parameters, shards, plan = self._planned(publication, lay_out)
                paths = [publication.temporary / shard.name for shard in shards]
                self._write(plan, parameters, paths, progress)
                if verify:
                    self._verify(plan, parameters, paths, progress)
                with self._clock("publish"):
                    weights = _SUFFIX.sub("", shards[0].name)
                    self._coordinator.run_on_main(lambda: publication.commit(weights, index_name))
        except BaseException:
            if publication is not None and self._coordinator.is_main:
                publication.abandon()
            raise
        return self._report(plan, shards, verify)

    # ------------------------------------------------------------------------------------------------------- phases

    def _planned(self, publication: Publication, lay_out: LayOut) -> tuple[Parameters, list[ShardToWrite], SavePlan]:
        coordinator = self._coordinator
        holdings = coordinator.run_on_all(
            lambda: kinds.holdings(
                self.model,
                masters=self._dtype == torch.float32,
                rank=coordinator.rank,
                world_size=coordinator.world_size,
            )
        )
        parameters = Parameters(
            holdings,
            coordinator,
            dtype=self._dtype,
            single_writer=self._single_writer,
            threads=_threads(coordinator.topology.sharing_cores),
        )
        shards = coordinator.run_on_all(lambda: self._shards(publication, parameters, lay_out))
        plan = coordinator.run_on_all(
            lambda: make_save_plan(
                shards,
                parameters.shares,
                joined=parameters.joined,
                everywhere=parameters.everywhere,
                rank=coordinator.rank,
                world_size=coordinator.world_size,
                chunk_bytes=self._chunk_bytes,
                single_writer=self._single_writer,
            )
        )
        digests = coordinator.all_gather(hashlib.sha256(b"".join(shard.layout.header for shard in shards)).hexdigest())
        different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if different:
            raise SaveError(
                f"Rank(s) {different} would save other tensors than rank 0: the model must be the same on every rank."
            )

        def reserve_all() -> None:
            for shard in shards:
                reserve(publication.temporary / shard.name, shard.layout.header, shard.layout.size_bytes)

        coordinator.run_on_main(reserve_all)
        return parameters, shards, plan

    def _is_hidden(self, publication: Publication) -> bool:
        """Whether there are ranks that cannot write into the folder that rank 0 has made: its name is unique."""
        sees = self._coordinator.all_gather(os.access(publication.temporary, os.W_OK | os.X_OK))
        if not all(sees) and self._coordinator.is_main:
            blind = [rank for rank, sees_it in enumerate(sees) if not sees_it]
            logger.info(f"{self._folder}: rank(s) {blind} cannot write there, so rank 0 writes what they hold too.")
        return not all(sees)

    def _shards(self, publication: Publication, parameters: Parameters, lay_out: LayOut) -> list[ShardToWrite]:
        """The files to write; on rank 0 everything else gets into the temporary folder."""
        with tempfile.TemporaryDirectory() as elsewhere, _quiet(self._coordinator.is_main):
            noted = lay_out(publication.temporary if self._coordinator.is_main else Path(elsewhere), parameters)
        return [shard_to_write(shard) for shard in noted]

    def _write(self, plan: SavePlan, parameters: Parameters, paths: Sequence[Path], progress: bool) -> None:
        files = ShardWriter(paths)
        try:
            with self._clock("write"):
                self._execute(plan, parameters, files, "Writing weights", progress)
            with self._clock("sync"):
                self._coordinator.run_on_all(files.sync)
        finally:
            files.close()

    def _verify(self, plan: SavePlan, parameters: Parameters, paths: Sequence[Path], progress: bool) -> None:
        comparison = Comparison(paths)
        try:
            with self._clock("verify"):
                self._execute(plan, parameters, comparison, "Verifying weights", progress)
        finally:
            comparison.close()

    def _execute(self, plan: SavePlan, parameters: Parameters, sink: Sink, description: str, progress: bool) -> None:
        with progress_bar(plan.bytes_written, description, progress) as bar:
            execute_save(
                plan,
                parameters,
                sink,
                self._coordinator,
                threads=_threads(self._coordinator.topology.sharing_cores),
                on_bytes=bar.update,
            )
        self._memory.sample()

    def _report(self, plan: SavePlan, shards: Sequence[ShardToWrite], verified: bool) -> SaveReport:
        mine = SavingRank(
            rank=self._coordinator.rank,
            seconds=self._clock.seconds,
            bytes_written=plan.bytes_written,
            rounds=len(plan.rounds),
            anonymous_growth_peak=self._memory.growth_peak,
        )
        report = SaveReport(
            folder=str(self._folder),
            files=tuple(shard.name for shard in shards),
            ranks=tuple(self._coordinator.all_gather(mine)),
            verified=verified,
            materialised={computation.name: computation.reason for computation in plan.computations},
        )
        if self._coordinator.is_main:
            logger.info(report.summary())
        return report


def _with_values(value: Any, materialise: Callable[[View], torch.Tensor]) -> Any:
    """`value`, if it is lazy, with values for conversions that need them."""
    return LazyTensor.of(value.view_of_node, materialise) if isinstance(value, LazyTensor) else value


def _refuse_empty(entries: Mapping[str, Any], parameters: Parameters) -> None:
    """What ``model.state_dict()`` gives for a ZeRO-3 parameter has no elements, and must not be saved for it."""
    for name, value in entries.items():
        expected = parameters.lazy[name].numel() if name in parameters.lazy else 0
        if expected and isinstance(value, torch.Tensor) and value.numel() == 0:
            raise SaveError(
                f"{name}: expected {expected} elements in the state dict that is to be saved; got none. "
                "model.state_dict() does not hold the values of a ZeRO-3 model: use the state dict that "
                "save_pretrained is given, or gather the parameters (deepspeed.zero.GatheredParameters)."
            )


def _settings() -> StreamingConfig:
    """Those of the ``streaming()`` around this thread's code, if any."""
    return StreamingConfig.resolve(current_config(), zero3_config() or other_config())


def _threads(ranks: int) -> int:
    """Writers into the page cache are bound by memory bandwidth: the share of one of `ranks` of the cores, up to 8."""
    return max(1, min(8, len(os.sched_getaffinity(0)) // ranks))


@contextmanager
def _quiet(is_main: bool) -> Iterator[None]:
    """transformers shows no bar for shards that it only lays out, and warns on rank 0 of what it does on all."""
    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    if not is_main:
        logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()
