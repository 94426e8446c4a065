"""One save, from what the ranks hold to the published folder. :mod:`.calls` makes it."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..checkpoint.safetensors import NotedShard
from ..errors import UnsupportedError
from ..holdings.holder import refuse_meta
from ..holdings.introspection import is_packed, is_peft_model
from ..holdings.own_names import adapter_names, named_parameters, own_names
from ..holdings.slots import VALUES, holdings_of
from ..holdings.steps import Steps
from ..ranks.background import BackgroundCoordinator
from ..ranks.coordinator import Coordinator, meeting
from ..reports.closing import tell
from ..reports.save import SaveReport, SavingRank
from ..reports.text import bytes_text
from ..seams.adapters import lay_out_adapters
from ..seams.ds_config import settings_in_force
from ..seams.saving import index_name, lay_out_pretrained
from ..seams.wrappers import unwrapped
from ..sources.page_cache import free_memory
from .arguments import dtype_of_argument, kind_of_save, make_ready, refuse_values
from .background import Staged
from .beside import Kept, slots_beside
from .count import anything, ignored_by
from .lazy_parameters import Holds, LazyParameters, held_values, state_dict_without_values
from .pending import PendingSave, note_weights
from .places import Place, Publishing, Written, place_at, refuse_other_places
from .preparation import Finalizer, SaveItem, SavePlanner, WritePlan
from .room import Room
from .snapshot import ALL, Copies
from .write import Work


logger = logging.get_logger(__name__)

# Arguments of transformers' ``save_pretrained``.
_CHANGES_NOTHING = {"push_to_hub", "distributed_checkpoint", "safe_serialization", "is_main_process", "save_function"}


_NO_MORE = Finalizer()

_OUTSIDE = "Or save it outside streaming(), with accelerator.get_state_dict and model.save_pretrained."


class Save:
    """One save, which all ranks carry out together; see :func:`.calls.save_pretrained` for the arguments.

    Args:
        state_dict: what to save, lazy, with the parameters' own names in its nodes; default: all of the model.
        values: what is saved in place of the values of parameters.
        coordinator: the ranks, if they have come together already.
        takes_any: the model may be any module; then what is laid out is the caller's.
        is_of_training: plans are kept for the next save; the caller has made the model, of any class, ready.
    """

    def __init__(
        self,
        model: Any,
        folder: str | os.PathLike[str] | Place,
        *,
        dtype: torch.dtype | str | None = None,
        state_dict: Mapping[str, Any] | None = None,
        values: Kept | None = None,
        coordinator: Coordinator | None = None,
        takes_any: bool = False,
        is_of_training: bool = False,
        **kwargs: Any,
    ) -> None:
        place = place_at(folder) if isinstance(folder, (str, os.PathLike)) else folder
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
        if not (isinstance(inner, PreTrainedModel) or is_peft_model(inner) or takes_any or is_of_training):
            raise UnsupportedError(
                f"save_pretrained: expected a model of transformers or PEFT, or an engine of one; got {type(inner)}"
            )
        if not is_of_training:
            make_ready(model, inner, "save_pretrained", _OUTSIDE)
        refuse_meta(dict(named_parameters(inner)))
        self.model: PreTrainedModel = inner
        self._place, self._dtype, self._state_dict, self._values = place, dtype, state_dict, values
        self._is_of_training = is_of_training
        self.has_one_place = False
        """Whether ranks have agreed already on where they save."""
        self._kwargs = {name: value for name, value in kwargs.items() if name not in _CHANGES_NOTHING}
        what = "training state" if is_of_training else "weights"
        self._work = Work(inner, what, settings_in_force(), coordinator or Coordinator.of_default_group())

    def pretrained(self) -> SaveReport:
        """Save what transformers' ``save_pretrained`` would."""
        report = self.run(self.weights())
        if self._values is None:
            note_weights(self.model)
        return report

    def weights(self) -> SaveItem:
        """Give the item that the ``save_pretrained`` of transformers, or of PEFT, would save."""
        if is_peft_model(self.model):
            return self._adapters()
        variant = self._kwargs.get("variant")
        model = self.model
        # Of a model with adapters transformers saves these alone, and packed weights are written as they are.
        in_part = getattr(model, "_hf_peft_config_loaded", False) or is_packed(model)
        left_out = anything if in_part else ignored_by(model)
        lay_out, index = self._lay_out_pretrained, index_name(variant)
        return SaveItem(
            lay_out=lay_out, index_name=index, dtype=self._dtype, instead=self._instead(), left_out=left_out
        )

    def _instead(self) -> Holds | None:
        """What holds the values that the call gives in place of the model's own."""
        if (values := self._values) is None:
            return None
        return lambda: holdings_of(slots_beside(self.model, VALUES, values, self._work.coordinator), VALUES)

    def _adapters(self) -> SaveItem:
        model, chosen = self.model, self._kwargs.get("selected_adapters")
        # A state has embeddings that are trained. For PEFT they may be saved with adapters, trained or not.
        embeddings = False if self._is_of_training else self._kwargs.get("save_embedding_layers", "auto")
        adapters = adapter_names(model)
        names = {name for name, param in named_parameters(model) if param.requires_grad or name in adapters}
        own, kept = own_names(model), own_names(model, keeps_adapters=True)
        buffers = {kept[name] for name, _ in model.named_buffers(remove_duplicate=False) if own[name] in adapters}

        def lay_out(folder: Path, parameters: LazyParameters) -> list[NotedShard]:
            if not self._is_of_training:
                model.create_or_update_model_card(str(folder))
            entries = parameters.entries(buffers=buffers)
            return lay_out_adapters(model, folder, entries, chosen, save_embedding_layers=embeddings)

        return SaveItem(
            lay_out=lay_out,
            index_name="adapter_model.safetensors.index.json",
            dtype=self._dtype,
            held=partial(held_values, model, names, self._work.coordinator) if embeddings is False else None,
            instead=self._instead(),
            left_out=anything,  # a state has all that is trained
        )

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
                inspect.signature(self.model.save_pretrained).bind(self._place.location, **given)
            except TypeError:
                del given["state_dict"]
        self.model.save_pretrained(self._place.location, **given)

    def run(self, *items: SaveItem, finalizer: Finalizer = _NO_MORE) -> SaveReport:
        """Save `items` and publish them together (all ranks, in an operation); rank 0 gives the `finalizer`."""
        with self._together():
            with self._measured(), self._prepared(items) as (publication, plan):
                self._work.settle()
                written = self._place.write(self._work, publication, plan, finalizer)
            return self._report(plan, written)

    def start(
        self, *items: SaveItem, finalizer: Finalizer = _NO_MORE, steps: Steps, snapshot_bytes: int, copies: str
    ) -> PendingSave:
        """Save as :meth:`run` does, but return when a thread can go on alone, from a :class:`.snapshot.Snapshot`.

        It copies `snapshot_bytes` bytes at most, or everything if that has a reason, `copies`, on any rank.
        """
        work = self._work
        with self._together():
            with self._measured(), self._prepared(items) as (publication, plan):
                work.settle()
                must_wait, copies_all = self._must_wait_or_copy(plan, copies)
                if not must_wait:
                    with work.clock("copy"):
                        how = Copies(None if copies_all else steps, snapshot_bytes)
                        staged = self._place.stage(work, publication, plan, finalizer, how)
                    return self._begun_in_background(publication, staged)
                written = self._place.write(work, publication, plan, finalizer)
            return PendingSave.finished(self._report(plan, written))

    def _must_wait_or_copy(self, plan: WritePlan, copies: str) -> tuple[bool, bool]:
        """Whether the save cannot be made in the background, or copies everything at the call (all ranks).

        Rank 0 says why.
        """
        coordinator, why = self._work.coordinator, ""
        if plan.has_single_writer:
            why = "rank 0 writes what all ranks hold, and copies of all of it would be too large"
        mine = plan.parameters.is_swapped, copies, plan.plan.bytes_written
        swapped, reasons, of_ranks = zip(*coordinator.all_gather(mine), strict=True)
        if not why and any(swapped):
            why = "values are in swap files, and host memory is not to hold them"
        reason = next(filter(None, (*reasons, self._place.why_copies)), "")
        if not why and reason:
            ranks = [0] if coordinator.is_alone else coordinator.topology.ranks_of_host
            needed, room = sum(of_ranks[rank] for rank in ranks), free_memory() + Room.kept_bytes(self.model)
            lacks = f"copies of all would take {bytes_text(needed)} of host memory, and {bytes_text(room)} are free"
            why = next(filter(None, coordinator.all_gather(lacks if needed > room else "")), "")
        if why and coordinator.is_main:
            logger.warning_once(f"This save is not made in the background: {why}.")
        elif reason not in ("", ALL) and coordinator.is_main:
            logger.warning_once(f"This save copies all that it writes in host memory at the call: {reason}.")
        return bool(why), bool(reason)

    def _begun_in_background(self, publication: Publishing, staged: Staged) -> PendingSave:
        """Have a thread of each rank go on with what is `staged` (all ranks)."""
        beside: BackgroundCoordinator | None = None
        try:
            beside = BackgroundCoordinator(self._work.coordinator, exchanges=staged.exchanges)
            finish = partial(self._finish, publication, staged, beside)
            pending = PendingSave(finish, staged.secure, self._place.location)
            pending.start()
        except BaseException as error:
            staged.abandon()
            staged.end()
            if beside is not None:
                beside.close(error)
            raise
        return pending

    def _finish(self, publication: Publishing, staged: Staged, coordinator: BackgroundCoordinator) -> SaveReport:
        """Write in the background, wait for the other ranks, and publish.

        No tensor of the training is changed, and no collective made in its process group.
        """
        began, error = time.perf_counter(), None
        try:
            staged.finish(coordinator)
            self._work.clock.add("total", time.perf_counter() - began)
            ranks = [SavingRank(**each) for each in coordinator.all_gather(asdict(staged.figures()))]
        except BaseException as caught:
            error = caught
            staged.abandon()
            if coordinator.is_main:
                publication.abandon()
            raise
        finally:
            staged.end()
            coordinator.close(error)
        return self._report(staged.plan, Written(ranks, staged.names), asynchronous=True)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Inside, all ranks are here, and watch each other."""
        coordinator, to_url = self._work.coordinator, isinstance(self._place.location, str)
        kind = kind_of_save(self.model, coordinator, to_url=to_url)
        with meeting(kind, "a model", coordinator):
            self._place.meet(self._work)
            yield

    @contextmanager
    def _measured(self) -> Iterator[None]:
        work = self._work
        with work.memory, work.clock("total"), torch.no_grad(), torch.inference_mode(False):
            yield

    @contextmanager
    def _prepared(self, items: Sequence[SaveItem]) -> Iterator[tuple[Publishing, WritePlan]]:
        """Plan `items`; inside, files of their final sizes wait for their bytes, and an error removes them."""
        work, coordinator = self._work, self._work.coordinator
        publication: Publishing | None = None
        try:
            if not self.has_one_place:
                refuse_other_places(coordinator.all_gather(self._place.location))
            write_from, work.verifies, publication = coordinator.broadcast(self._begun)
            folder = publication.temporary
            with work.clock("plan"):
                plan = self._planner(write_from).plan(folder, items)
                coordinator.run_on_main(partial(self._place.reserve, folder, plan))
            yield publication, plan
        except BaseException:
            if publication is not None and coordinator.is_main:
                publication.abandon()
            raise

    def _planner(self, write_from: str) -> SavePlanner:
        keeps = self._is_of_training and not getattr(self.model, "_hf_peft_config_loaded", False)
        return SavePlanner(
            model=self.model,
            coordinator=self._work.coordinator,
            write_from="all" if self._place.all_write else write_from,
            threads=self._work.threads,
            settings=sorted(self._kwargs.items()) if keeps else None,
            is_state=self._is_of_training,
        )

    def _begun(self) -> tuple[str, bool, Publishing]:
        """Decide, on rank 0, who writes, whether the files are read again, and where they are."""
        settings = self._work.settings
        return settings.write_from, settings.verify == "full", self._place.begin()

    def _report(self, plan: WritePlan, written: Written, *, asynchronous: bool = False) -> SaveReport:
        report = SaveReport(
            folder=str(self._place.location),
            files=tuple(written.names),
            ranks=tuple(written.ranks),
            verified=self._work.verifies,
            materialised={each.name: each.reason for each in plan.plan.computations},
            what=self._work.what,
            asynchronous=asynchronous,
        )
        if self._work.coordinator.is_main:
            tell("save", report.summary(), report.to_dict)
        return report
