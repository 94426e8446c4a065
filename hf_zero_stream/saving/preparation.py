"""The steps of a save: a :class:`SaveItem` is planned by a :class:`SavePlanner`, and a :class:`Finalizer` publishes.

Plans are made anew, or are those of the last save of the same training if nothing but values has changed.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers.utils import logging

from ..checkpoint.file_digests import WORD, digest_of_bytes
from ..checkpoint.safetensors import NotedShard, ShardToWrite, lay_out_shard
from ..errors import SaveError, system_errors_as
from ..holdings.holding import Holding
from ..holdings.kinds import persistent_buffers
from ..holdings.own_names import named_buffers, named_parameters
from ..ranks.coordinator import Coordinator
from .count import LeftOut, nothing, packed_padding, refuse_cut, refuse_too_few, smaller_ones
from .files import ShardWriter
from .lazy_parameters import Held, holdings_of_model
from .parameters import Layout, NewParameters, Parameters
from .plan import SavePlan, make_save_plan
from .shares import refuse_differing
from .targets import AnyPublication


class _Kept(NamedTuple):
    """The plan of an item of a model's last save, without what would keep the model or its optimizer alive.

    Attributes:
        circumstances: what else it depends on.
        files: on rank 0 what was laid out beside the shards, by name.
    """

    circumstances: Any
    layout: Layout
    shards: list[ShardToWrite]
    plan: SavePlan
    files: dict[str, bytes]


_kept: WeakKeyDictionary[nn.Module, dict[str, _Kept]] = WeakKeyDictionary()
"""By the file name of the item's index."""


@contextmanager
def as_save_error(place: Path) -> Iterator[None]:
    """Turn an error of the system inside, where a save is prepared in the folder `place`, into a SaveError."""
    with system_errors_as(SaveError, place, "cannot prepare a save", "What was there before has not been touched."):
        yield


@dataclass(frozen=True, kw_only=True)
class SavePlanner:
    """Plans what a save of `model` writes, and writes what is not weights (all ranks).

    An error of one rank is an error of all at the next agreement; the caller is inside :meth:`Coordinator.reporting`.

    Attributes:
        single_writer: rank 0 writes everything.
        settings: what else the plans depend on, which are kept for the next save; None: they are not kept.
        is_state: it is the state of a training, with its weights.
    """

    model: nn.Module
    coordinator: Coordinator
    single_writer: bool
    threads: int
    settings: Any = None
    is_state: bool = False

    def plan(self, folder: Path, items: Sequence[SaveItem]) -> list[WritePlan]:
        """The plans of all `items` and of their siblings; the `folder` is that of rank 0."""
        places = [folder / item.folder for item in items]
        with as_save_error(folder):
            for place in places if self.coordinator.is_main else ():
                place.mkdir(exist_ok=True)
            if self.settings is None:
                return [each for place, item in zip(places, items, strict=True) for each in self._planned(place, item)]
            kept = _kept.setdefault(self.model, {})
            as_before = self._planned_as_before(places, items, [kept.get(item.index_name) for item in items])
            found = []
            for place, item, plans in zip(places, items, as_before, strict=True):
                found += self._planned_anew(place, item, kept) if plans is None else plans
            return found

    def _planned_anew(self, place: Path, item: SaveItem, kept: dict[str, _Kept]) -> list[WritePlan]:
        """The plans of `item`, of which the first is kept."""
        kept.pop(item.index_name, None)
        before = self._files(place)
        first, *others = self._planned(place, item)
        files = {str(path.relative_to(place)): path.read_bytes() for path in self._files(place) - before}
        # The circumstances are looked at again: transformers completes a model's config when it writes it.
        new = _Kept(
            self._circumstances(item, circumstances(self.model)),
            first.parameters.layout,
            first.shards,
            first.plan,
            files,
        )
        kept[item.index_name] = new
        return [first, *others]

    @property
    def _compares(self) -> bool:
        return not self.coordinator.is_alone

    def _circumstances(self, item: SaveItem, of_model: Any) -> Any:
        """All that plans depend on beside what is held: `of_model`, names, ties, buffers, configs that are written."""
        settings = (self.single_writer, self.coordinator.world_size, self.settings)
        of_model = of_model if item.model is None else circumstances(item.model)
        siblings = [renamed(item.index_name) for _, renamed in item.siblings]
        return of_model, item.dtype, siblings, item.buffers, settings

    @cached_property
    def _before(self) -> Any:
        """The circumstances of the model before anything is laid out."""
        return circumstances(self.model)

    def _planned_as_before(
        self, places: Sequence[Path], items: Sequence[SaveItem], kept: Sequence[_Kept | None]
    ) -> list[list[WritePlan] | None]:
        """The plans of each item by that of the last save; None if anything but values is another on any rank."""
        mine = [
            it is not None and it.circumstances == self._circumstances(item, self._before)
            for item, it in zip(items, kept, strict=True)
        ]
        same = [all(of_ranks) for of_ranks in zip(*self.coordinator.all_gather(mine), strict=True)]
        wanted: list[tuple[Layout, Callable[[], Mapping[str, Holding]]]] = []
        for item, it, is_same in zip(items, kept, same, strict=True):
            if is_same and it is not None:
                of_model = partial(holdings_of_model, item.model or self.model, self.coordinator, item.dtype)
                all_held = (item.held, *(held for held, _ in item.siblings))
                wanted += [(it.layout, partial(of_model, held)) for held in all_held]
        follows = Parameters.following(wanted, self.coordinator, self._compares, self.threads) if wanted else []
        following = iter(follows)
        found: list[list[WritePlan] | None] = []
        for place, item, it, is_same in zip(places, items, kept, same, strict=True):
            plans = None
            if is_same and it is not None:
                of_item = [next(following) for _ in (item, *item.siblings)]
                parameters = [each for each in of_item if each is not None]
                if len(parameters) == len(of_item):
                    plans = self._as_before(place, item, it, parameters)
            found.append(plans)
        return found

    def _as_before(
        self, place: Path, item: SaveItem, kept: _Kept, parameters: Sequence[Parameters]
    ) -> list[WritePlan]:
        for name, data in kept.files.items():  # none but on rank 0
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(data)
        return item.write_plans(parameters, kept.shards, kept.plan)

    def _files(self, folder: Path) -> set[Path]:
        """On rank 0, all files in `folder`."""
        return {path for path in folder.rglob("*") if path.is_file()} if self.coordinator.is_main else set()

    def _planned(self, place: Path, item: SaveItem) -> list[WritePlan]:
        """The plans, made anew; on rank 0 everything but the shards gets into the folder `place`."""
        coordinator = self.coordinator
        parameters = NewParameters(
            item.model or self.model,
            coordinator,
            item.dtype,
            compares=self._compares,
            threads=self.threads,
            held=item.held,
            beside=[held for held, _ in item.siblings],
            is_state=self.is_state,
            shares=not self.single_writer,
        )
        with coordinator.reporting(), as_save_error(place):
            with tempfile.TemporaryDirectory() as elsewhere, quiet(coordinator.is_main):
                noted = item.lay_out(place if coordinator.is_main else Path(elsewhere), parameters)
            shards = [*map(lay_out_shard, noted)]
            plan = make_save_plan(
                shards,
                parameters.sources,
                rank=coordinator.rank,
                world_size=coordinator.world_size,
                single_writer=self.single_writer,
            )
            padding = packed_padding(self.model)
            refuse_too_few(plan, parameters.sources, parameters.expected, item.left_out, padding)
            smaller = smaller_ones(self.model, parameters) if item.held is None and not coordinator.is_alone else []
            headers = hashlib.sha256(b"".join(shard.header for shard in shards)).digest()
        digests, of_ranks = zip(*coordinator.all_gather((headers, smaller)), strict=True)
        refuse_differing(digests, "would save other tensors")
        refuse_cut(self.model, of_ranks)
        return item.write_plans([parameters, *parameters.beside], shards, plan)


def circumstances(model: nn.Module) -> Any:
    """All that the plans of `model` depend on beside what is held of its parameters."""
    first: dict[int, str] = {}
    ties = [
        first.setdefault(id(param), name)
        for name, param in named_parameters(model, remove_duplicate=False, by_own_names=False)
    ]
    saved = {id(buffer) for _, buffer in persistent_buffers(model)}  # others may have no memory that can be named
    buffers = [
        (name, buffer.data_ptr(), buffer.dtype, buffer.shape, buffer.stride())
        for name, buffer in named_buffers(model, remove_duplicate=False, by_own_names=False)
        if id(buffer) in saved
    ]
    configs: list[Any] = [getattr(model, name, None) for name in ("config", "generation_config")]
    texts = [config.to_json_string(use_diff=False) for config in configs if hasattr(config, "to_json_string")]
    return ties, list(first.values()), buffers, texts


@contextmanager
def quiet(is_main: bool) -> Iterator[None]:
    """Inside, transformers shows no bar for shards that it only lays out, and warns on rank 0 only.

    It says no names of files at level INFO: they are those of a temporary folder.
    """
    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    logging.set_verbosity(max(verbosity, logging.WARNING if is_main else logging.ERROR))
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()


LayOut = Callable[[Path, NewParameters], list[NotedShard]]
"""Writes everything but the weights of a checkpoint into a folder, and says which file they belong in."""


Sibling = tuple[Held, Callable[[str], str]]
"""Another state that lies as an item does, and the names of its shards and index, from those of the item's."""


@dataclass(frozen=True, kw_only=True)
class SaveItem:
    """Something that is saved: weights, or the states of an optimizer.

    Attributes:
        lay_out: lays it out.
        index_name: the file name of its index.
        folder: the folder of its files, inside the one that is saved to; empty for that one itself.
        dtype: of what is of floating point; None: as it is held.
        held: what is saved under the names of parameters in place of their values; None: the values.
        siblings: are saved by the same plan.
        buffers: the names of those that are saved with what is held.
        model: has parameters by whose names that is held, if it is no part of the model that is saved.
        left_out: which parameters may be missing in what is laid out.
        changes_with: the steps that change it, by the names of parameters (:class:`..holdings.steps.Steps`).
    """

    lay_out: LayOut
    index_name: str
    folder: str = ""
    dtype: torch.dtype | None = None
    held: Held | None = None
    siblings: Sequence[Sibling] = ()
    buffers: frozenset[str] = frozenset()
    left_out: LeftOut = nothing
    model: nn.Module | None = None
    changes_with: Mapping[str, int] = field(default_factory=dict)

    def write_plans(
        self, parameters: Sequence[Parameters], shards: list[ShardToWrite], plan: SavePlan
    ) -> list[WritePlan]:
        """The plans of this and of its siblings, each with its own of these `parameters`; all are the one `plan`."""
        first, *others = parameters
        found = [WritePlan(first, shards, plan, self.folder, self.index_name, self.changes_with)]
        for (_, renamed), of_sibling in zip(self.siblings, others, strict=True):
            theirs = [replace(shard, name=renamed(shard.name)) for shard in shards]
            index_name = renamed(self.index_name)
            found.append(WritePlan(of_sibling, theirs, plan, self.folder, index_name, self.changes_with))
        return found


class WritePlan(NamedTuple):
    """The plan by which the bytes of `parameters` get into the `shards` of a `folder`, inside the one of the save."""

    parameters: Parameters
    shards: list[ShardToWrite]
    plan: SavePlan
    folder: str
    index_name: str
    changes_with: Mapping[str, int]

    @property
    def names(self) -> list[str]:
        """The files, relative to the folder that is saved to."""
        return [str(Path(self.folder, shard.name)) for shard in self.shards]

    def paths(self, folder: Path) -> list[Path]:
        """The files, if `folder` is the one that is saved to."""
        return [folder / name for name in self.names]


def digests_of(plans: Sequence[WritePlan], writers: Sequence[ShardWriter]) -> dict[str, int]:
    """The digests of what this rank has written by `plans`, by the names of files."""
    return {
        each.names[shard]: digest
        for each, writer in zip(plans, writers, strict=True)
        for shard, digest in writer.digests.items()
    }


_SUFFIX = re.compile(r"-\d{5}-of-\d{5}(?=\.safetensors$)")


@dataclass(frozen=True)
class Finalizer:
    """Publishes a save when all its shards are complete, on rank 0.

    Attributes:
        write_rest: writes what is neither weights nor laid out with them into the temporary folder; also gets the
            digests of shards, by their names in there, if they are known. None: they are not needed.
        last_name: the file that gets its name after all others; may be empty.
        replaced: files and folders that are removed then.
    """

    write_rest: Callable[[AnyPublication, Mapping[str, int]], None] | None = None
    last_name: str = ""
    replaced: Sequence[str] = ()

    @property
    def needs_digests(self) -> bool:
        return self.write_rest is not None

    def publish(
        self, publication: AnyPublication, plans: Sequence[WritePlan], digests: Sequence[Mapping[str, int]]
    ) -> None:
        """Give the files of `plans`, and all others of this save, their final names.

        `digests` are, from each rank, those of what it wrote, as :func:`digests_of` gives them; none if they are not
        known.
        """
        if self.write_rest is not None:
            headers = Counter(
                {
                    name: digest_of_bytes(0, [shard.header])
                    for each in plans
                    for name, shard in zip(each.names, each.shards, strict=True)
                }
            )
            total = sum(map(Counter, digests), headers if digests else Counter())
            with as_save_error(publication.temporary):
                self.write_rest(publication, {name: digest % WORD for name, digest in total.items()})
        weights = next((each for each in plans if not each.folder), None)
        name, index = ("", "") if weights is None else (_SUFFIX.sub("", weights.shards[0].name), weights.index_name)
        publication.commit(name, index, self.last_name, self.replaced)
