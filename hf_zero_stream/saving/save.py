"""One save, from what the ranks hold to the published folder; what calls it stands in :mod:`.calls`."""

from __future__ import annotations

import hashlib
import inspect
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..checkpoint.lazy import LazyTensor
from ..checkpoint.nodes import View
from ..checkpoint.safetensors import NotedShard
from ..checkpoint.wrapped import refuse_wrapped
from ..config import WRITERS, StreamingConfig
from ..destinations.deepspeed.gathered import gathered, not_in_full
from ..errors import ConfigError, SaveError, UnsupportedError
from ..ranks.coordinator import Coordinator
from ..ranks.rendezvous import SAVE, Occasion
from ..reports.load import PhaseClock
from ..reports.memory import AnonymousMemory, collector_paused
from ..reports.progress import progress_bar
from ..reports.save import PHASES, SaveReport, SavingRank
from ..scope import current_config
from ..seams import found_config
from ..seams.saving import index_name, lay_out_pretrained
from ..seams.wrappers import unwrapped
from .files import Comparison, Shards, ShardWriter, reserve
from .parameters import Parameters, state_dict_without_values
from .plan import CHUNK_BYTES, SavePlan, ShardToWrite, make_save_plan, shard_to_write
from .publish import Publication
from .write import execute_save


__all__ = ["Save", "occasion_to_save"]

logger = logging.get_logger(__name__)

ARRIVAL_S = 600.0  # how long the first rank waits for the last one to begin a save
OTHERS_COME_S = 30.0  # how long rank 0 waits for the others inside a ``GatheredParameters``

LayOut = Callable[[Path, Parameters], list[NotedShard]]
"""Writes everything but the weights of a checkpoint into a folder, and says which file they belong in."""

_SUFFIX = re.compile(r"-\d{5}-of-\d{5}(?=\.safetensors$)")


class Save:
    """One save, which all ranks carry out together; see :func:`.calls.save_pretrained` for the arguments.

    Args:
        state_dict: what to save, lazy, with the parameters' own names in its nodes; default: all of the model.
        coordinator: the ranks, if they have come together already.
        kwargs: for transformers' ``save_pretrained``.
    """

    def __init__(
        self,
        model: Any,
        folder: str | os.PathLike[str],
        *,
        dtype: torch.dtype | str | None = None,
        write_from: str | None = None,
        verify: bool = False,
        chunk_bytes: int = CHUNK_BYTES,
        progress: bool = True,
        state_dict: Mapping[str, Any] | None = None,
        coordinator: Coordinator | None = None,
        **kwargs: Any,
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
        advice = "Save it with model.save_pretrained, which gathers such tensors."
        refuse_wrapped(inner.named_parameters(), "save_pretrained", advice)
        self.model: PreTrainedModel = inner
        self._folder = Path(folder)
        self._dtype = _floating_dtype(dtype)
        self._write_from = write_from
        self._verify = verify
        self._chunk_bytes = chunk_bytes
        self._progress = progress
        self._state_dict = state_dict
        self._kwargs = _supported(kwargs)
        self._coordinator = coordinator or Coordinator.of_default_group()
        self._clock = PhaseClock(PHASES)
        self._memory = AnonymousMemory()

    def pretrained(self) -> SaveReport:
        """Save what transformers' ``save_pretrained`` would."""

        def lay_out(folder: Path, parameters: Parameters) -> list[NotedShard]:
            if self._state_dict is None:
                entries = parameters.state_dict()
            else:
                entries = {name: _with_values(value, parameters.gather) for name, value in self._state_dict.items()}
                _refuse_empty(entries, parameters)
            numel, dtype = parameters.numel, self._dtype
            return lay_out_pretrained(
                self.model, folder, dict(entries), entries, numel, dtype, own_code=False, **self._kwargs
            )

        return self.run(lay_out, index_name(self._kwargs.get("variant")))

    def call_own_code(self) -> None:
        """Call the ``save_pretrained`` of the model's own class, with a lazy state dict if it takes one."""
        given = {**self._kwargs, "state_dict": self._state_dict}
        if self._state_dict is None:
            given["state_dict"] = state_dict_without_values(self.model, self._dtype)
            try:
                inspect.signature(self.model.save_pretrained).bind(self._folder, **given)
            except TypeError:
                del given["state_dict"]
        self.model.save_pretrained(self._folder, **given)

    def run(self, lay_out: LayOut, index_name: str) -> SaveReport:
        """Save what `lay_out` lays out, and publish it; all ranks must call it."""
        with self._coordinator.watched(occasion_to_save(self.model, self._coordinator)):
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
                    if write_from == "auto":
                        write_from = "rank0" if self._is_hidden(publication) else "all"
                    with self._clock("plan"):
                        parameters, shards, plan = self._planned(publication, lay_out, write_from == "rank0")
                    self._write(plan, parameters, [publication.temporary / shard.name for shard in shards])
                    with self._clock("publish"):
                        weights = _SUFFIX.sub("", shards[0].name)
                        self._coordinator.run_on_main(partial(publication.commit, weights, index_name))
            except BaseException:
                if publication is not None and self._coordinator.is_main:
                    publication.abandon()
                raise
            return self._report(plan, shards)

    def _planned(
        self, publication: Publication, lay_out: LayOut, single_writer: bool
    ) -> tuple[Parameters, list[ShardToWrite], SavePlan]:
        coordinator = self._coordinator
        parameters = Parameters(
            self.model, coordinator, dtype=self._dtype, single_writer=single_writer, threads=self._threads()
        )
        shards = coordinator.run_on_all(lambda: self._shards(publication, parameters, lay_out))
        plan = coordinator.run_on_all(
            lambda: make_save_plan(
                shards,
                parameters.sources,
                rank=coordinator.rank,
                world_size=coordinator.world_size,
                chunk_bytes=self._chunk_bytes,
                single_writer=single_writer,
            )
        )
        digests = coordinator.all_gather(hashlib.sha256(b"".join(shard.layout.header for shard in shards)).hexdigest())
        different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if different:
            raise SaveError(
                f"Rank(s) {different} would save other tensors than rank 0: the model must be the same on every rank."
            )
        coordinator.run_on_main(partial(reserve, publication.temporary, shards))
        return parameters, shards, plan

    def _is_hidden(self, publication: Publication) -> bool:
        """Whether any rank cannot write into rank 0's temporary folder, whose unique name no other folder has."""
        sees = self._coordinator.all_gather(os.access(publication.temporary, os.W_OK | os.X_OK))
        blind = [rank for rank, sees_it in enumerate(sees) if not sees_it]
        if blind and self._coordinator.is_main:
            logger.info(f"{self._folder}: rank(s) {blind} cannot write there, so rank 0 writes what they hold too.")
        return bool(blind)

    def _shards(self, publication: Publication, parameters: Parameters, lay_out: LayOut) -> list[ShardToWrite]:
        """The files to write; on rank 0 everything else gets into the temporary folder."""
        with tempfile.TemporaryDirectory() as elsewhere, _quiet(self._coordinator.is_main):
            noted = lay_out(publication.temporary if self._coordinator.is_main else Path(elsewhere), parameters)
        return [shard_to_write(shard) for shard in noted]

    def _write(self, plan: SavePlan, parameters: Parameters, paths: Sequence[Path]) -> None:
        with closing(ShardWriter(paths)) as files:
            with self._clock("write"):
                self._execute(plan, parameters, files, "Writing weights")
            with self._clock("sync"):
                self._coordinator.run_on_all(files.sync)
        if self._verify:
            with closing(Comparison(paths)) as comparison, self._clock("verify"):
                self._execute(plan, parameters, comparison, "Verifying weights")

    def _execute(self, plan: SavePlan, parameters: Parameters, files: Shards, description: str) -> None:
        with progress_bar(plan.bytes_written, description, self._progress) as bar:
            execute_save(plan, parameters, files, self._coordinator, threads=self._threads(), on_bytes=bar.update)
        self._memory.sample()

    def _threads(self) -> int:
        """This rank's share of the host's cores, at most 8: memory bandwidth bounds writes into the page cache."""
        return max(1, min(8, len(os.sched_getaffinity(0)) // self._coordinator.topology.sharing_cores))

    def _report(self, plan: SavePlan, shards: Sequence[ShardToWrite]) -> SaveReport:
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
            verified=self._verify,
            materialised={computation.name: computation.reason for computation in plan.computations},
        )
        if self._coordinator.is_main:
            logger.info(report.summary())
        return report


def occasion_to_save(model: PreTrainedModel, coordinator: Coordinator) -> Occasion:
    """How ranks come together to save `model`.

    Inside a ``GatheredParameters`` rank 0 is often the only one that saves, so it waits only briefly there.
    """
    if coordinator.is_alone or not coordinator.is_main or not gathered(model.parameters()):
        return replace(SAVE, patience_s=ARRIVAL_S)
    missing = not_in_full(model)
    if missing:
        advice = (
            f"Inside GatheredParameters rank 0 cannot save alone, because {len(missing)} parameters are not gathered: "
            f"{', '.join(missing[:8])}. Gather these too, or save on all ranks, outside of `if rank == 0:` and the "
            "like."
        )
    else:
        advice = (
            "Inside GatheredParameters, hf_zero_stream.save_pretrained is for all ranks: take it out of "
            "`if rank == 0:` and the like. Or call model.save_pretrained inside streaming(): rank 0 may do so alone, "
            "as all the model is gathered."
        )
    return replace(SAVE, patience_s=OTHERS_COME_S, advice=advice)


def _floating_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype.removeprefix("torch."), dtype)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(f'dtype: expected a floating-point torch dtype or its name ("float32"); got {dtype!r}')
    return dtype


def _supported(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of transformers' ``save_pretrained`` without those that change nothing here."""
    if kwargs.get("push_to_hub"):
        raise UnsupportedError(
            "push_to_hub=True: save first, then upload the folder from one rank: "
            "huggingface_hub.upload_folder(repo_id=..., folder_path=...)."
        )
    if kwargs.get("distributed_checkpoint"):
        raise UnsupportedError(
            "distributed_checkpoint=True: a distributed checkpoint is not a safetensors checkpoint; leave it out."
        )
    ignored = ("push_to_hub", "distributed_checkpoint", "safe_serialization", "is_main_process", "save_function")
    return {name: value for name, value in kwargs.items() if name not in ignored}


def _with_values(value: Any, materialise: Callable[[View], torch.Tensor]) -> Any:
    """An entry of a state dict; if it is lazy, or its view came from rank 0, conversions can read its values."""
    view = value.view_of_node if isinstance(value, LazyTensor) else value
    return LazyTensor.of(view, materialise) if isinstance(view, View) else value


def _refuse_empty(entries: Mapping[str, Any], parameters: Parameters) -> None:
    """Refuse the empty tensors that ``model.state_dict()`` gives for ZeRO-3 parameters."""
    for name, value in entries.items():
        expected = parameters.lazy[name].numel() if name in parameters.lazy else 0
        if expected and isinstance(value, torch.Tensor) and value.numel() == 0:
            raise SaveError(
                f"{name}: expected {expected} elements in the state dict that is to be saved; got none. "
                "model.state_dict() does not hold the values of a ZeRO-3 model: use the state dict that "
                "save_pretrained is given, or gather the parameters (deepspeed.zero.GatheredParameters)."
            )


def _settings() -> StreamingConfig:
    """The settings of the ``streaming()`` around the caller, if there is one."""
    return StreamingConfig.resolve(current_config(), found_config()[0])


@contextmanager
def _quiet(is_main: bool) -> Iterator[None]:
    """Inside, transformers shows no bar for shards that it only lays out, and warns on rank 0 only."""
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
