"""One save, from what the ranks hold to the published folder. :mod:`.calls` makes it."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..accelerators import settle
from ..checkpoint.safetensors import NotedShard
from ..errors import UnsupportedError
from ..holdings.holder import refuse_meta
from ..holdings.introspection import is_packed
from ..holdings.own_names import fixed_names, named_parameters, parameters
from ..holdings.steps import Steps
from ..ranks.coordinator import BackgroundCoordinator, Coordinator, meeting
from ..reports.closing import tell
from ..reports.measures import AnonymousMemory, PhaseClock, collector_paused, progress_bar
from ..reports.save import PHASES, SaveReport, SavingRank
from ..seams.ds_config import settings_in_force
from ..seams.saving import index_name, lay_out_pretrained
from ..seams.wrappers import unwrapped
from .arguments import dtype_of_argument, refuse_values
from .background import ALL, Taken, WholeCopy, begun_snapshot, write_in_background
from .count import anything, ignored_by
from .files import Comparison, ShardWriter, reserve
from .lazy_parameters import LazyParameters, state_dict_without_values
from .pending import PendingSave, finish_pending
from .preparation import Finalizer, SaveItem, SavePlanner, WritePlan
from .publication import Publication
from .readiness import kind_of_save, make_ready
from .targets import (
    AnyPublication,
    ObjectWriter,
    UploadTarget,
    begin_at,
    place_of_save,
    refuse_other_places,
    target_at,
)
from .upload import check_all, planned_shards, send_all, uploads_of
from .whole import note_weights
from .write import Put, bytes_of, execute_save


logger = logging.get_logger(__name__)

# Arguments of transformers' ``save_pretrained``.
_CHANGES_NOTHING = {"push_to_hub", "distributed_checkpoint", "safe_serialization", "is_main_process", "save_function"}


T = TypeVar("T")

_NO_MORE = Finalizer()

_OUTSIDE = "Or save it outside streaming(), with accelerator.get_state_dict and model.save_pretrained."


class Save:
    """One save, which all ranks carry out together; see :func:`.calls.save_pretrained` for the arguments.

    Args:
        state_dict: what to save, lazy, with the parameters' own names in its nodes; default: all of the model.
        coordinator: the ranks, if they have come together already.
        takes_any: the model may be any module; then what is laid out is the caller's.
        is_of_training: plans are kept for the next save; the caller has made the model, of any class, ready.
    """

    def __init__(
        self,
        model: Any,
        folder: str | os.PathLike[str],
        *,
        dtype: torch.dtype | str | None = None,
        state_dict: Mapping[str, Any] | None = None,
        coordinator: Coordinator | None = None,
        takes_any: bool = False,
        is_of_training: bool = False,
        **kwargs: Any,
    ) -> None:
        place = place_of_save(folder)
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
        if not (isinstance(inner, PreTrainedModel) or takes_any or is_of_training):
            raise UnsupportedError(
                f"save_pretrained: expected a transformers model or an engine around one; got {type(inner)}. "
                "A PEFT model saves its adapters itself, and they are not large."
            )
        if not is_of_training:
            make_ready(model, inner, "save_pretrained", _OUTSIDE)
        refuse_meta(dict(named_parameters(inner)))
        self.model: PreTrainedModel = inner
        self._folder, self._dtype, self._state_dict = place, dtype, state_dict
        self._settings, self._is_of_training = settings_in_force(), is_of_training
        self.has_one_place = False
        """Whether ranks have agreed already on where they save."""
        self._write_from = "all"
        self._what = "training state" if is_of_training else "weights"
        self._verify = False
        self._names: list[str] = []
        self._sent_bytes = self._rounds = 0  # to a URL
        self._target = None if isinstance(place, Path) else target_at(place)
        self._background: Taken | None = None
        self._kwargs = {name: value for name, value in kwargs.items() if name not in _CHANGES_NOTHING}
        self._coordinator = coordinator or Coordinator.of_default_group()
        self._clock = PhaseClock(PHASES)
        self._memory = AnonymousMemory()

    @fixed_names()
    def pretrained(self) -> SaveReport:
        """Save what transformers' ``save_pretrained`` would."""
        report = self.run(self.weights())
        note_weights(self.model)
        return report

    def weights(self) -> SaveItem:
        """Give the item that transformers' ``save_pretrained`` would save."""
        variant = self._kwargs.get("variant")
        model = self.model
        # Of a model with adapters transformers saves these alone, and packed weights are written as they are.
        in_part = getattr(model, "_hf_peft_config_loaded", False) or is_packed(model)
        left_out = anything if in_part else ignored_by(model)
        lay_out, index = self._lay_out_pretrained, index_name(variant)
        return SaveItem(lay_out=lay_out, index_name=index, dtype=self._dtype, left_out=left_out)

    def _lay_out_pretrained(self, folder: Path, parameters: LazyParameters) -> list[NotedShard]:
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
        finish_pending(elsewhere=self._folder)
        with self._together():
            with self._measured(), self._staged(items) as (publication, plan):
                ranks = self._write(publication, plan, finalizer)
            return self._report(plan, ranks)

    @fixed_names()
    def start(
        self, *items: SaveItem, finalizer: Finalizer = _NO_MORE, steps: Steps, snapshot_bytes: int, copies: str
    ) -> PendingSave:
        """Save as :meth:`run` does, but return when :mod:`.background` can go on alone.

        It copies `snapshot_bytes` bytes at most, or everything if that has a reason, `copies`, on any rank.
        """
        finish_pending(elsewhere=self._folder)
        with self._together():
            with self._measured(), self._staged(items) as (publication, plan):
                if not self._must_wait(plan):
                    assert isinstance(publication, Publication)
                    with self._clock("copy"), ExitStack() as opened:
                        paths = plan.paths(publication.temporary)
                        writer = ShardWriter(paths, has_digests=finalizer.needs_digests)
                        opened.enter_context(closing(writer))
                        taken = self._taken(plan, writer, steps, snapshot_bytes, copies)
                        opened.pop_all()
                    beside = BackgroundCoordinator(self._coordinator)
                    work = partial(self._finish, publication, plan, finalizer, taken, writer, beside)
                    pending = PendingSave(work, taken.secure, self._folder)
                    try:
                        pending.start()
                    except BaseException as error:
                        taken.end()
                        beside.close(error)
                        raise
                    return pending
                ranks = self._write(publication, plan, finalizer)
            return PendingSave.finished(self._report(plan, ranks))

    def _taken(self, plan: WritePlan, writer: ShardWriter, steps: Steps, snapshot_bytes: int, copies: str) -> Taken:
        """A snapshot of what this rank writes, or copies of it, as all ranks can (all ranks)."""
        settle(parameters(self.model))
        coordinator = self._coordinator
        reasons = [each for each in coordinator.all_gather(copies) if each]
        if not reasons:
            arguments = self.model, plan, writer, coordinator, steps, snapshot_bytes
            return begun_snapshot(*arguments, verifies=self._verify)
        if coordinator.is_main and reasons[0] != ALL:
            logger.warning_once(f"This save copies all that it writes in host memory at the call: {reasons[0]}.")
        return WholeCopy(self.model, plan, writer, coordinator, self._threads())

    def _finish(
        self,
        publication: Publication,
        plan: WritePlan,
        finalizer: Finalizer,
        taken: Taken,
        writer: ShardWriter,
        beside: BackgroundCoordinator,
    ) -> SaveReport:
        self._background = taken
        figures, clock = partial(self._own_figures, plan), self._clock
        ranks = write_in_background(
            publication, plan, finalizer, taken, writer, beside, clock, figures, verifies=self._verify
        )
        return self._report(plan, ranks)

    def _must_wait(self, plan: WritePlan) -> bool:
        """Whether the save cannot be made in the background, which rank 0 says then (all ranks)."""
        if self._target is not None:
            why = "shards that go to a URL are put together of what all ranks hold"
        elif plan.has_single_writer:
            why = "rank 0 writes what all ranks hold, and copies of all of it would be too large"
        elif any(self._coordinator.all_gather(plan.parameters.is_swapped)):
            why = "values are in swap files, and host memory is not to hold them"
        else:
            return False
        if self._coordinator.is_main:
            logger.warning_once(f"This save is not made in the background: {why}.")
        return True

    def _write(self, publication: AnyPublication, plan: WritePlan, finalizer: Finalizer) -> list[SavingRank]:
        """Write all and publish it; returns what each rank has done."""
        settle(parameters(self.model))
        if self._target is not None:
            self._upload(publication, plan, self._target)
            digests: Sequence[Mapping[str, int]] = []
        else:
            digests = self._write_files(plan.paths(publication.temporary), plan, has_digests=finalizer.needs_digests)

        def publish() -> SavingRank:
            if self._coordinator.is_main:
                with self._clock("publish"):
                    finalizer.publish(publication, plan, digests)
            self._memory.sample()
            return self._own_figures(plan)

        return self._coordinator.gather_results(publish)

    def _write_files(
        self, paths: Sequence[Path], plan: WritePlan, *, has_digests: bool
    ) -> Sequence[Mapping[str, int]]:
        """Write all shards; returns the digests of what each rank has written."""

        def finish(writer: ShardWriter) -> Mapping[str, int]:
            writer.sync()
            return plan.named(writer.digests)

        with closing(ShardWriter(paths, has_digests=has_digests)) as writer:
            digests = self._execute("write", plan, writer, "Writing", partial(finish, writer))
        if self._verify:
            with closing(Comparison(paths)) as comparison:
                self._execute("verify", plan, comparison, "Verifying", lambda: None)
        return digests if has_digests else []

    def _upload(self, publication: Any, plan: WritePlan, target: UploadTarget) -> None:
        """Send all shards; what they replace stays until :meth:`.targets.RemotePublication.commit`."""
        coordinator = self._coordinator
        of_items = coordinator.broadcast(partial(publication.assign, planned_shards(plan)))
        urls: list[str] = [*chain.from_iterable(of_items)]
        self._names = [url.removeprefix(f"{self._folder}/") for url in urls]
        uploads = uploads_of(plan.shards, coordinator, single_writer=self._write_from == "rank0")
        mine = [it.shard for it in uploads if it.writer == coordinator.rank]
        self._sent_bytes = sum(shard.size_bytes - len(shard.header) for shard in mine)

        def begin(number: int) -> ObjectWriter:
            return target.writer(urls[number], uploads[number].shard.size_bytes, checks=self._verify)

        with (
            self._clock("write"),
            self._bar(plan, sum(shard.size_bytes for shard in mine), "Sending") as advance,
        ):
            objects, self._rounds = send_all(uploads, plan.parameters, coordinator, begin, advance)
        self._memory.sample()
        if self._verify:
            with self._clock("verify"):
                coordinator.run_on_all(partial(check_all, objects))

    def _together(self) -> AbstractContextManager[object]:
        """Inside, all ranks are here, and watch each other."""
        kind = kind_of_save(self.model, self._coordinator, to_url=self._target is not None)
        return meeting(kind, "a model", self._coordinator)

    @contextmanager
    def _measured(self) -> Iterator[None]:
        with self._memory, self._clock("total"), collector_paused(), torch.no_grad(), torch.inference_mode(False):
            yield

    @contextmanager
    def _staged(self, items: Sequence[SaveItem]) -> Iterator[tuple[AnyPublication, WritePlan]]:
        """Plan `items`; inside, files of their final sizes wait for their bytes, and an error removes them."""
        coordinator = self._coordinator
        publication: AnyPublication | None = None
        try:
            if not self.has_one_place:
                refuse_other_places(coordinator.all_gather(self._folder))
            self._write_from, self._verify, publication = coordinator.broadcast(self._begun)
            folder = publication.temporary
            with self._clock("plan"):
                plan = self._planner().plan(folder, items)
                coordinator.run_on_main(partial(self._reserve, folder, plan))
            yield publication, plan
        except BaseException:
            if publication is not None and coordinator.is_main:
                publication.abandon()
            raise

    def _planner(self) -> SavePlanner:
        keeps = self._is_of_training and not getattr(self.model, "_hf_peft_config_loaded", False)
        return SavePlanner(
            model=self.model,
            coordinator=self._coordinator,
            write_from="all" if self._target else self._write_from,
            threads=self._threads(),
            settings=sorted(self._kwargs.items()) if keeps else None,
            is_state=self._is_of_training,
        )

    def _begun(self) -> tuple[str, bool, AnyPublication]:
        """Decide, on rank 0, who writes, whether the files are read again, and where they are."""
        return self._settings.write_from, self._settings.verify == "full", begin_at(self._folder)

    def _reserve(self, folder: Path, plan: WritePlan) -> None:
        """Make the shards in `folder`, on rank 0."""
        reserve(plan.paths(folder), plan.shards, on_disk=self._target is None)

    def _execute(
        self, phase: str, plan: WritePlan, writer: ShardWriter, doing: str, finish: Callable[[], T]
    ) -> list[T]:
        """Carry out the plan, into a `writer`, and `finish` (all ranks)."""
        with self._bar(plan, plan.plan.bytes_written, doing) as advance:

            def put(shard: int, position: int, pieces: Sequence[torch.Tensor]) -> None:
                buffers = [bytes_of(piece) for piece in pieces]
                writer.put(shard, position, buffers)
                advance(sum(map(len, buffers)))

            return self._execute_into(phase, plan, put, finish)

    def _execute_into(self, phase: str, plan: WritePlan, put: Put, finish: Callable[[], T]) -> list[T]:
        """Carry out the plan, of which `put` takes the bytes, and `finish` (all ranks)."""
        with ExitStack() as writing:
            writing.enter_context(self._clock(phase))

            def then() -> T:
                writing.close()
                self._memory.sample()
                with self._clock("sync"):
                    return finish()

            return execute_save(plan.plan, plan.parameters, put, self._coordinator, self._threads(), then)

    def _bar(self, plan: WritePlan, own_bytes: int, doing: str) -> AbstractContextManager[Callable[[int], None]]:
        """The progress bar of all tensors that ranks write, of which this one writes `own_bytes`."""
        whole = sum(shard.size_bytes - len(shard.header) for shard in plan.shards)
        return progress_bar(own_bytes, f"{doing} {self._what}", self._settings.progress, whole)

    def _threads(self) -> int:
        """This rank's share of the host's cores, at most 8: memory bandwidth bounds writes into the page cache."""
        return max(1, min(8, len(os.sched_getaffinity(0)) // self._coordinator.topology.sharing_cores))

    def _own_figures(self, plan: WritePlan) -> SavingRank:
        return SavingRank(
            rank=self._coordinator.rank,
            seconds=self._clock.seconds,
            bytes_written=self._sent_bytes if self._target else plan.plan.bytes_written,
            bytes_copied=0 if self._background is None else self._background.copied_bytes,
            rounds=self._rounds if self._target else len(plan.plan.rounds),
            anonymous_growth_peak=self._memory.growth_peak,
        )

    def _report(self, plan: WritePlan, ranks: Sequence[SavingRank]) -> SaveReport:
        report = SaveReport(
            folder=str(self._folder),
            files=tuple(self._names or plan.names),
            ranks=tuple(ranks),
            verified=self._verify,
            materialised={each.name: each.reason for each in plan.plan.computations},
            what=self._what,
            asynchronous=self._background is not None,
        )
        if self._coordinator.is_main:
            tell("save", report.summary(), report.to_dict)
        return report
