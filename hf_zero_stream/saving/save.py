"""One save, from what the ranks hold to the published folder; what calls it stands in :mod:`.calls`."""

from __future__ import annotations

import hashlib
import inspect
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import PreTrainedModel
from transformers.utils import logging

from ..checkpoint.safetensors import NotedShard, lay_out_shard
from ..checkpoint.without_values import refuse_wrapped
from ..config import WRITERS, StreamingConfig
from ..destinations.deepspeed.gathered import gathered, not_in_full
from ..destinations.deferred import fill_whole
from ..destinations.shards import local_of
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
from .files import Comparison, Publication, ShardWriter, reserve
from .lazy_parameters import Held, state_dict_without_values
from .parameters import Parameters
from .plan import CHUNK_BYTES, SavePlan, make_save_plan
from .planned import Alike, LayOut, Planned
from .write import execute_save


__all__ = ["Save", "occasion_to_save"]

logger = logging.get_logger(__name__)

ARRIVAL_S = 600.0  # how long the first rank waits for the last one to begin a save
OTHERS_COME_S = 30.0  # how long rank 0 waits for the others inside a ``GatheredParameters``

# Arguments of transformers' ``save_pretrained``.
_CHANGES_NOTHING = {"push_to_hub", "distributed_checkpoint", "safe_serialization", "is_main_process", "save_function"}

_SUFFIX = re.compile(r"-\d{5}-of-\d{5}(?=\.safetensors$)")


class Save:
    """One save, which all ranks carry out together; see :func:`.calls.save_pretrained` for the arguments.

    Args:
        state_dict: what to save, lazy, with the parameters' own names in its nodes; default: all of the model.
        coordinator: the ranks, if they have come together already.
        held: what to save under the names of parameters in place of their values; default: the values.
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
        held: Held | None = None,
        **kwargs: Any,
    ) -> None:
        if write_from is not None and write_from not in WRITERS:
            raise ConfigError(f"write_from: expected one of {', '.join(WRITERS)}; got {write_from!r}")
        if chunk_bytes < 1:
            raise ConfigError(f"chunk_bytes: expected a size in bytes, at least 1; got {chunk_bytes!r}")
        if isinstance(dtype, str):
            dtype = getattr(torch, dtype.removeprefix("torch."), dtype)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ConfigError(f'dtype: expected a floating-point torch dtype or its name ("float32"); got {dtype!r}')
        if kwargs.get("push_to_hub"):
            raise UnsupportedError(
                "push_to_hub=True: save first, then upload the folder from one rank: "
                "huggingface_hub.upload_folder(repo_id=..., folder_path=...)."
            )
        if kwargs.get("distributed_checkpoint"):
            raise UnsupportedError(
                "distributed_checkpoint=True: a distributed checkpoint is not a safetensors checkpoint; leave it out."
            )
        inner = unwrapped(model)
        if not isinstance(inner, PreTrainedModel):
            raise UnsupportedError(
                f"save_pretrained: expected a transformers model or an engine around one; got {type(inner)}. "
                "A PEFT model saves its adapters itself, and they are not large."
            )
        fill_whole(inner)
        if isinstance(model, torch.nn.Module):
            _refuse_fsdp1(model)
        advice = "Save it with model.save_pretrained, outside streaming()."
        values = ((name, local_of(param)) for name, param in inner.named_parameters())
        refuse_wrapped(values, "save_pretrained", advice)
        self.model: PreTrainedModel = inner
        self._folder, self._dtype, self._state_dict = Path(folder), dtype, state_dict
        self._write_from, self._verify, self._held = write_from, verify, held
        self._chunk_bytes, self._progress = chunk_bytes, progress
        self._kwargs = {name: value for name, value in kwargs.items() if name not in _CHANGES_NOTHING}
        self._coordinator = coordinator or Coordinator.of_default_group()
        self._clock = PhaseClock(PHASES)
        self._memory = AnonymousMemory()

    def pretrained(self) -> SaveReport:
        """Save what transformers' ``save_pretrained`` would."""

        return self.run(self.lay_out_pretrained, index_name(self._kwargs.get("variant")))

    def lay_out_pretrained(self, folder: Path, parameters: Parameters) -> list[NotedShard]:
        """The :data:`LayOut` of transformers' ``save_pretrained``."""
        entries, numel, dtype = parameters.entries(self._state_dict), parameters.numel, self._dtype
        return lay_out_pretrained(
            self.model, folder, dict(entries), entries, numel, dtype, own_code=False, **self._kwargs
        )

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

    def run(self, lay_out: LayOut, index_name: str, beside: Sequence[Alike] = ()) -> SaveReport:
        """Save what `lay_out` lays out, and what is `beside` it, and publish it; all ranks must call it."""
        coordinator, clock = self._coordinator, self._clock
        publication: Publication | None = None
        with coordinator.watched(occasion_to_save(self.model, coordinator)):
            try:
                with (
                    coordinator.reporting(),
                    self._memory,
                    clock("total"),
                    collector_paused(),
                    torch.no_grad(),
                    torch.inference_mode(False),
                ):
                    write_from, publication = coordinator.broadcast(self._begun)
                    folder = publication.temporary
                    if write_from == "auto":
                        write_from = "rank0" if self._is_hidden(folder) else "all"
                    with clock("plan"):
                        alone = write_from == "rank0"
                        first = self._planned(folder, lay_out, alone, self._parameters(alone, self._held))
                        others = (self._planned_like(first, folder, index_name, alone, each) for each in beside)
                        planned = [first, *others]
                        shards = [shard for each in planned for shard in each.shards]
                        coordinator.run_on_main(partial(reserve, folder, shards))
                    with ExitStack() as opened:
                        files = [opened.enter_context(closing(ShardWriter(each.paths(folder)))) for each in planned]
                        for each, writer in zip(planned, files, strict=True):
                            self._execute("write", each, writer, "Writing weights")
                        with clock("sync"):
                            for writer in files:
                                coordinator.run_on_all(writer.sync)
                    for each in planned if self._verify else ():
                        with closing(Comparison(each.paths(folder))) as comparison:
                            self._execute("verify", each, comparison, "Verifying weights")
                    with clock("publish"):
                        weights = _SUFFIX.sub("", shards[0].name)
                        coordinator.run_on_main(partial(publication.commit, weights, index_name))
            except BaseException:
                if publication is not None and coordinator.is_main:
                    publication.abandon()
                raise
            return self._report(planned)

    def _begun(self) -> tuple[str, Publication]:
        """Who writes, and where; by rank 0, in the settings of the ``streaming()`` around it, if there is one."""
        write_from = self._write_from or StreamingConfig.resolve(current_config(), found_config()[0]).write_from
        return write_from, Publication.begin(self._folder)

    def _is_hidden(self, folder: Path) -> bool:
        """Whether any rank cannot write into rank 0's temporary folder, whose unique name no other folder has."""
        sees = self._coordinator.all_gather(os.access(folder, os.W_OK | os.X_OK))
        blind = [rank for rank, sees_it in enumerate(sees) if not sees_it]
        if blind and self._coordinator.is_main:
            logger.info(f"{self._folder}: rank(s) {blind} cannot write there, so rank 0 writes what they hold too.")
        return bool(blind)

    def _parameters(self, single_writer: bool, held: Held | None) -> Parameters:
        return Parameters(self.model, self._coordinator, self._dtype, single_writer, self._threads(), held)

    def _planned_like(
        self, first: Planned, folder: Path, index_name: str, single_writer: bool, alike: Alike
    ) -> Planned:
        """What to write of something that is held, most likely, as the `first` is."""
        parameters = self._parameters(single_writer, alike.held)
        if not all(self._coordinator.all_gather(parameters.lie_as(first.parameters))):
            return self._planned(folder, alike.lay_out, single_writer, parameters)
        self._coordinator.run_on_main(partial(alike.write_index, folder, index_name))
        return first.like(alike, parameters)

    def _planned(self, folder: Path, lay_out: LayOut, single_writer: bool, parameters: Parameters) -> Planned:
        """What to write; on rank 0 everything but the weights gets into `folder`."""
        coordinator = self._coordinator

        def planned() -> Planned:
            with tempfile.TemporaryDirectory() as elsewhere, _quiet(coordinator.is_main):
                noted = lay_out(folder if coordinator.is_main else Path(elsewhere), parameters)
            shards = [lay_out_shard(shard) for shard in noted]
            plan = make_save_plan(
                shards,
                parameters.sources,
                rank=coordinator.rank,
                world_size=coordinator.world_size,
                chunk_bytes=self._chunk_bytes,
                single_writer=single_writer,
            )
            if parameters.replaces_values:
                _refuse_computed(plan)
            return Planned(parameters, shards, plan)

        found = coordinator.run_on_all(planned)
        headers = b"".join(shard.header for shard in found.shards)
        digests = coordinator.all_gather(hashlib.sha256(headers).hexdigest())
        different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if different:
            raise SaveError(
                f"Rank(s) {different} would save other tensors than rank 0: the model must be the same on every rank."
            )
        return found

    def _execute(self, phase: str, planned: Planned, files: ShardWriter, description: str) -> None:
        parameters, _, plan = planned
        with self._clock(phase), progress_bar(plan.bytes_written, description, self._progress) as advance:

            def put(shard: int, position: int, buffers: Sequence[memoryview]) -> None:
                files.put(shard, position, buffers)
                advance(sum(map(len, buffers)))

            execute_save(plan, parameters, put, self._coordinator, self._threads())
        self._memory.sample()

    def _threads(self) -> int:
        """This rank's share of the host's cores, at most 8: memory bandwidth bounds writes into the page cache."""
        return max(1, min(8, len(os.sched_getaffinity(0)) // self._coordinator.topology.sharing_cores))

    def _report(self, planned: Sequence[Planned]) -> SaveReport:
        plans = [each.plan for each in planned]
        mine = SavingRank(
            rank=self._coordinator.rank,
            seconds=self._clock.seconds,
            bytes_written=sum(plan.bytes_written for plan in plans),
            rounds=sum(len(plan.rounds) for plan in plans),
            anonymous_growth_peak=self._memory.growth_peak,
        )
        report = SaveReport(
            folder=str(self._folder),
            files=tuple(shard.name for each in planned for shard in each.shards),
            ranks=tuple(self._coordinator.all_gather(mine)),
            verified=self._verify,
            materialised={each.name: each.reason for plan in plans for each in plan.computations},
        )
        if self._coordinator.is_main:
            logger.info(report.summary())
        return report


def _refuse_computed(plan: SavePlan) -> None:
    """Raise if anything would be computed of what belongs to parameters and is not their values, such as moments."""
    if computed := [f"{each.name} ({each.reason})" for each in plan.computations]:
        raise UnsupportedError(
            "What is kept beside the parameters can only be saved as it lies. To save the model, transformers "
            f"computes {len(computed)} tensors and does not merely put them in another order: "
            f"{', '.join(computed[:8])}. Use the checkpoints of DeepSpeed or accelerate."
        )


def _refuse_fsdp1(model: torch.nn.Module) -> None:
    """Raise if FSDP1 shards any of `model`, whose parameters then are flat pieces that look like whole ones."""
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise UnsupportedError(
            "save_pretrained: expected parameters that are DTensors, ZeRO partitions or whole; FSDP1 "
            "(FullyShardedDataParallel) keeps flat pieces in their place. Use FSDP2 (fully_shard; accelerate: "
            "fsdp_version 2), or save with accelerator.get_state_dict and model.save_pretrained outside streaming()."
        )


def occasion_to_save(model: PreTrainedModel, coordinator: Coordinator) -> Occasion:
    """How ranks come together to save `model`; in a ``GatheredParameters`` rank 0, often alone, waits briefly."""
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
