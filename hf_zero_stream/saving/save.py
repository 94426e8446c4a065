"""One save, from what the ranks hold to the published folder. :mod:`.calls` makes it."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import PreTrainedModel
from transformers.utils import logging

from ..accelerators import settle
from ..checkpoint.safetensors import NotedShard
from ..destinations.base import fill_whole
from ..errors import UnsupportedError
from ..holdings.holder import refuse_meta, refuse_unreadable
from ..holdings.introspection import has_gathered, is_packed
from ..holdings.model_parallel import refuse_unknown_shards
from ..holdings.own_names import fixed_names
from ..ranks.coordinator import BackgroundCoordinator, Coordinator, meeting
from ..ranks.rendezvous import SAVE, MeetingKind
from ..reports.measures import AnonymousMemory, PhaseClock, collector_paused, progress_bar
from ..reports.save import PHASES, SaveReport, SavingRank
from ..seams.ds_config import settings_in_force
from ..seams.saving import index_name, lay_out_pretrained
from ..seams.wrappers import unwrapped
from .arguments import dtype_of_argument, refuse_url, refuse_values
from .background import write_in_background
from .count import anything, ignored_by
from .files import Comparison, Publication, ShardWriter, reserve, sync_all
from .host_copy import HostCopy, HostMemory
from .lazy_parameters import state_dict_without_values
from .parameters import NewParameters
from .pending import PendingSave, finish_pending
from .preparation import Finalizer, SaveItem, SavePlanner, WritePlan
from .write import Put, SaveTask, bytes_of, execute_saves


logger = logging.get_logger(__name__)

ARRIVAL_S = 600.0  # how long the first rank waits for the last one to begin a save
OTHERS_COME_S = 30.0  # how long rank 0 waits for the others inside a ``GatheredParameters``

# Arguments of transformers' ``save_pretrained``.
_CHANGES_NOTHING = {"push_to_hub", "distributed_checkpoint", "safe_serialization", "is_main_process", "save_function"}

_NO_MORE = Finalizer()

_OUTSIDE = "Or save it outside streaming(), with accelerator.get_state_dict and model.save_pretrained."


class Save:
    """One save, which all ranks carry out together; see :func:`.calls.save_pretrained` for the arguments.

    Args:
        state_dict: what to save, lazy, with the parameters' own names in its nodes; default: all of the model.
        coordinator: the ranks, if they have come together already.
        keeps_plans: keep the plans for the next save.
        takes_any: the model may be any module; then what is laid out is the caller's.
    """

    def __init__(
        self,
        model: Any,
        folder: str | os.PathLike[str],
        *,
        dtype: torch.dtype | str | None = None,
        state_dict: Mapping[str, Any] | None = None,
        coordinator: Coordinator | None = None,
        keeps_plans: bool = False,
        takes_any: bool = False,
        **kwargs: Any,
    ) -> None:
        refuse_url(folder)
        refuse_values(state_dict, kwargs.get("variant"))
        dtype = dtype_of_argument(dtype)
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
        if not isinstance(inner, PreTrainedModel) and not takes_any:
            raise UnsupportedError(
                f"save_pretrained: expected a transformers model or an engine around one; got {type(inner)}. "
                "A PEFT model saves its adapters itself, and they are not large."
            )
        make_ready(model, inner, "save_pretrained", _OUTSIDE)
        refuse_meta(dict(inner.named_parameters()))
        self.model: PreTrainedModel = inner
        self._folder, self._dtype, self._state_dict = Path(folder), dtype, state_dict
        self._settings, self._keeps_plans = settings_in_force(), keeps_plans
        self._verify = self._has_single_writer = False
        self._plans: list[WritePlan] = []
        self._kwargs = {name: value for name, value in kwargs.items() if name not in _CHANGES_NOTHING}
        self._coordinator = coordinator or Coordinator.of_default_group()
        self._clock = PhaseClock(PHASES)
        self._memory = AnonymousMemory()

    @fixed_names()
    def pretrained(self) -> SaveReport:
        """Save what transformers' ``save_pretrained`` would."""
        return self.run(self.weights())

    def weights(self) -> SaveItem:
        """Give the item that transformers' ``save_pretrained`` would save."""
        variant = self._kwargs.get("variant")
        model = self.model
        # Of a model with adapters transformers saves these alone, and packed weights are written as they are.
        in_part = getattr(model, "_hf_peft_config_loaded", False) or is_packed(model)
        left_out = anything if in_part else ignored_by(model)
        lay_out, index = self._lay_out_pretrained, index_name(variant)
        return SaveItem(lay_out=lay_out, index_name=index, dtype=self._dtype, left_out=left_out)

    def _lay_out_pretrained(self, folder: Path, parameters: NewParameters) -> list[NotedShard]:
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

    @fixed_names()
    def run(self, *items: SaveItem, finalizer: Finalizer = _NO_MORE) -> SaveReport:
        """Save `items` and publish them together (all ranks); rank 0 gives the `finalizer`."""
        finish_pending()
        with self._together():
            with self._measured(), self._staged(items) as publication:
                self._write(publication, finalizer)
            return self._report(self._coordinator.all_gather(self._own_figures()))

    @fixed_names()
    def start(self, *items: SaveItem, finalizer: Finalizer = _NO_MORE) -> PendingSave:
        """Save as :meth:`run` does, but return when the values are copied; they are written in the background."""
        finish_pending()
        with self._together():
            with self._measured(), self._staged(items) as publication:
                if not self._must_wait():
                    with self._clock("copy"):
                        copies = self._copied()
                    beside = BackgroundCoordinator(self._coordinator)
                    pending = PendingSave(partial(self._finish_in_background, publication, finalizer, copies, beside))
                    try:
                        pending.start()
                    except BaseException as error:
                        beside.close(error)
                        raise
                    return pending
                self._write(publication, finalizer)
            return PendingSave.finished(self._report(self._coordinator.all_gather(self._own_figures())))

    def _finish_in_background(
        self, publication: Publication, finalizer: Finalizer, copies: Sequence[HostCopy], beside: BackgroundCoordinator
    ) -> SaveReport:
        ranks = write_in_background(
            publication,
            self._plans,
            finalizer,
            copies,
            beside,
            self._clock,
            self._own_figures,
            verifies=self._verify,
        )
        return self._report(ranks)

    def _must_wait(self) -> bool:
        """Whether the save cannot be made in the background, which rank 0 says then (all ranks)."""
        swapped = any(each.parameters.is_swapped for each in self._plans)
        if self._has_single_writer:
            why = "rank 0 writes what all ranks hold, and copies of all of it would be too large"
        elif any(self._coordinator.all_gather(swapped)):
            why = "values are in swap files, and host memory is not to hold them"
        else:
            return False
        if self._coordinator.is_main:
            logger.warning_once(f"This save is not made in the background: {why}.")
        return True

    def _copied(self) -> list[HostCopy]:
        """Copies in host memory of what this rank writes (all ranks)."""
        settle(self.model.parameters())
        sizes = [each.plan.bytes_written for each in self._plans]
        memory = self._coordinator.run_on_all(partial(HostMemory.of_model, self.model, sum(sizes)))
        copies = [HostCopy(memory, stop - size) for stop, size in zip(accumulate(sizes), sizes, strict=True)]
        puts = [copy.put for copy in copies]
        execute_saves(self._tasks(puts), self._coordinator, self._threads())
        for copy in copies:
            copy.wait()
        return copies

    def _tasks(self, puts: Sequence[Put]) -> list[SaveTask]:
        """The tasks of all plans, of which each `put` takes the bytes of one."""
        return [SaveTask(each.plan, each.parameters, put) for each, put in zip(self._plans, puts, strict=True)]

    def _write(self, publication: Publication, finalizer: Finalizer) -> None:
        settle(self.model.parameters())
        folder = publication.temporary
        with self._execute("write", folder, ShardWriter, "Writing weights") as writers, self._clock("sync"):
            self._coordinator.run_on_all(partial(sync_all, writers))
        if self._verify:
            with self._execute("verify", folder, Comparison, "Verifying weights"):
                pass
        with self._clock("publish"):
            self._coordinator.run_on_main(partial(finalizer.publish, publication, self._plans))

    def _together(self) -> AbstractContextManager[object]:
        """Inside, all ranks are here, and watch each other."""
        return meeting(kind_of_save(self.model, self._coordinator), coordinator=self._coordinator)

    @contextmanager
    def _measured(self) -> Iterator[None]:
        with (
            self._memory,
            self._clock("total"),
            collector_paused(),
            torch.no_grad(),
            torch.inference_mode(False),
        ):
            yield

    @contextmanager
    def _staged(self, items: Sequence[SaveItem]) -> Iterator[Publication]:
        """Plan `items`; inside, files of their final sizes wait for their bytes, and an error removes them."""
        coordinator = self._coordinator
        publication: Publication | None = None
        try:
            write_from, self._verify, publication = coordinator.broadcast(self._begun)
            folder = publication.temporary
            if write_from == "auto":
                write_from = "rank0" if self._is_hidden(folder) else "all"
            self._has_single_writer = write_from == "rank0"
            with self._clock("plan"):
                planner = self._planner()
                self._plans = [each for item in items for each in planner.plan(folder, item)]
                coordinator.run_on_main(partial(self._reserve, folder))
                for item in items:
                    if item.check is not None:
                        coordinator.run_on_main(partial(item.check, folder / item.folder))
            yield publication
        except BaseException:
            if publication is not None and coordinator.is_main:
                publication.abandon()
            raise

    def _planner(self) -> SavePlanner:
        keeps = self._keeps_plans and not getattr(self.model, "_hf_peft_config_loaded", False)
        return SavePlanner(
            model=self.model,
            coordinator=self._coordinator,
            single_writer=self._has_single_writer,
            threads=self._threads(),
            settings=sorted(self._kwargs.items()) if keeps else None,
            is_state=self._keeps_plans,
        )

    def _begun(self) -> tuple[str, bool, Publication]:
        """Decide, on rank 0, who writes, whether the files are read again, and where they are."""
        return self._settings.write_from, self._settings.verify == "full", Publication.begin(self._folder)

    def _reserve(self, folder: Path) -> None:
        """Make the shards in `folder`, on rank 0."""
        for each in self._plans:
            reserve(folder / each.folder, each.shards)

    def _is_hidden(self, folder: Path) -> bool:
        """Whether any rank cannot write into rank 0's temporary folder, whose unique name no other folder has."""
        sees = self._coordinator.all_gather(os.access(folder, os.W_OK | os.X_OK))
        blind = [rank for rank, sees_it in enumerate(sees) if not sees_it]
        if blind and self._coordinator.is_main:
            logger.info(f"{self._folder}: rank(s) {blind} cannot write there, so rank 0 writes what they hold too.")
        return bool(blind)

    @contextmanager
    def _execute(
        self, phase: str, folder: Path, kind: type[ShardWriter], description: str
    ) -> Iterator[Sequence[ShardWriter]]:
        """Carry out all plans, into writers of this `kind` in the `folder`, which are open inside."""
        nbytes = sum(each.plan.bytes_written for each in self._plans)
        with ExitStack() as opened:
            writers = [opened.enter_context(closing(kind(each.paths(folder)))) for each in self._plans]
            with self._clock(phase), progress_bar(nbytes, description, self._settings.progress) as advance:

                def put(writer: ShardWriter, shard: int, position: int, pieces: Sequence[torch.Tensor]) -> None:
                    buffers = [bytes_of(piece) for piece in pieces]
                    writer.put(shard, position, buffers)
                    advance(sum(map(len, buffers)))

                tasks = self._tasks([partial(put, writer) for writer in writers])
                execute_saves(tasks, self._coordinator, self._threads())
            self._memory.sample()
            yield writers

    def _threads(self) -> int:
        """This rank's share of the host's cores, at most 8: memory bandwidth bounds writes into the page cache."""
        return max(1, min(8, len(os.sched_getaffinity(0)) // self._coordinator.topology.sharing_cores))

    def _own_figures(self) -> SavingRank:
        return SavingRank(
            rank=self._coordinator.rank,
            seconds=self._clock.seconds,
            bytes_written=sum(each.plan.bytes_written for each in self._plans),
            rounds=sum(len(each.plan.rounds) for each in self._plans),
            anonymous_growth_peak=self._memory.growth_peak,
        )

    def _report(self, ranks: Sequence[SavingRank]) -> SaveReport:
        computations = [computation for each in self._plans for computation in each.plan.computations]
        report = SaveReport(
            folder=str(self._folder),
            files=tuple(name for each in self._plans for name in each.names),
            ranks=tuple(ranks),
            verified=self._verify,
            materialised={each.name: each.reason for each in computations},
        )
        if self._coordinator.is_main:
            logger.info(report.summary())
        return report


def make_ready(model: Any, inner: torch.nn.Module, doing: str, instead: str) -> None:
    """Have all parameters of `inner` be there to be read; raises if those of `model`, around it, cannot be.

    The error is ``{doing}: ... {instead}``.
    """
    refuse_unknown_shards(model, doing)
    fill_whole(inner)
    if isinstance(model, torch.nn.Module):
        _refuse_fsdp1(model, doing, instead)
    refuse_unreadable(inner, doing, instead)
    if isinstance(inner, PreTrainedModel):
        _refuse_without_dtype(inner, doing, instead)


def _refuse_without_dtype(model: PreTrainedModel, doing: str, instead: str) -> None:
    """Raise an UnsupportedError (``{doing}: ... {instead}``) if transformers cannot tell the dtype that it writes."""
    try:
        _ = model.dtype
    except StopIteration:  # no error that anybody should get to see
        dtypes = sorted({str(param.dtype) for param in model.parameters()})
        raise UnsupportedError(
            f"{doing}: expected a floating-point parameter, whose dtype transformers takes for the model's; found "
            f"{', '.join(dtypes) or 'no parameters'} alone. DeepSpeed's stages 1 and 2 make all parameters complex "
            f"that they flatten with a complex one: keep that as real numbers (torch.view_as_real). {instead}"
        ) from None


def _refuse_fsdp1(model: torch.nn.Module, doing: str, instead: str) -> None:
    """Raise if FSDP1 shards any of `model`, whose parameters then are flat pieces that look like whole ones."""
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise UnsupportedError(
            f"{doing}: expected parameters that are DTensors, ZeRO partitions or whole; FSDP1 "
            "(FullyShardedDataParallel) keeps flat pieces in their place. Use FSDP2 (fully_shard; accelerate: "
            f"fsdp_version 2). {instead}"
        )


def kind_of_save(model: PreTrainedModel, coordinator: Coordinator) -> MeetingKind:
    """How ranks come together to save `model`. Rank 0 waits briefly in a ``GatheredParameters``: it is often alone."""
    if coordinator.is_alone or not coordinator.is_main or not has_gathered(model):
        return replace(SAVE, patience_s=ARRIVAL_S)
    from ..holdings.deepspeed.gathered import partitioned_names  # imports deepspeed, which takes seconds

    missing = partitioned_names(model)
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
