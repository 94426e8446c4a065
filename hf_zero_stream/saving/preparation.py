"""The steps of a save: a :class:`SavePlanner` plans :class:`SaveItem` objects, and a :class:`Finalizer` publishes.

Plans are made anew, or are those of the last save of the same training if nothing but values has changed.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import nn
from transformers.utils import logging

from ..checkpoint.digests import WORD, digest_of_bytes
from ..checkpoint.safetensors import NotedShard, ShardToWrite, lay_out_shard
from ..errors import SaveError, system_errors_as
from ..holdings.holding import Holding, persistent_buffers
from ..holdings.own_names import named_buffers, named_parameters
from ..ranks.coordinator import Coordinator
from .count import LeftOut, Smaller, nothing, packed_padding, refuse_cut, refuse_empty, refuse_too_few, smaller_ones
from .lazy_parameters import LazyParameters, Selection
from .parameters import Layout, NewParameters, Parameters, refuse_differing
from .plan import SavePlan, make_save_plan


logger = logging.get_logger(__name__)


class _Kept(NamedTuple):
    """The plan of a model's last save, without what would keep the model or its optimizer alive.

    Attributes:
        circumstances: what else it depends on.
        files: on rank 0 what was laid out beside the shards of each item, by name.
        has_single_writer: rank 0 writes everything.
    """

    circumstances: Any
    layout: Layout
    shards: list[list[ShardToWrite]]
    plan: SavePlan
    files: list[dict[str, bytes]]
    has_single_writer: bool


_kept: WeakKeyDictionary[nn.Module, dict[tuple[str, ...], _Kept]] = WeakKeyDictionary()
"""By the file names of the items' indexes."""


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
        write_from: "rank0" writes everything, or "all" ranks what they hold; "auto": rank 0, if any rank cannot write
            where it does.
        settings: what else the plans depend on, which are kept for the next save; None: they are not kept.
        is_state: it is the state of a training, with its weights.
    """

    model: nn.Module
    coordinator: Coordinator
    write_from: str
    threads: int
    settings: Any = None
    is_state: bool = False

    def plan(self, folder: Path, items: Sequence[SaveItem]) -> WritePlan:
        """The plan of all `items`; the `folder` is that of rank 0."""
        places = [folder / item.folder for item in items]
        with as_save_error(folder):
            for place in places if self.coordinator.is_main else ():
                place.mkdir(exist_ok=True)
            key, of_model = tuple(item.index_name for item in items), _kept.setdefault(self.model, {})
            kept = None if self.settings is None else of_model.pop(key, None)
            parameters, has_single_writer = self._as_before(folder, items, kept)
            if kept is not None and parameters is not None and kept.has_single_writer == has_single_writer:
                for place, files in zip(places, kept.files, strict=True):
                    for name, data in files.items():  # none but on rank 0
                        (place / name).parent.mkdir(parents=True, exist_ok=True)
                        (place / name).write_bytes(data)
                plan = WritePlan.of(items, parameters, kept.shards, kept.plan, has_single_writer=has_single_writer)
            else:
                plan, of_places = self._planned(places, items, single_writer=has_single_writer)
                if self.settings is not None:
                    # The circumstances are looked at again: transformers completes a model's config when it writes it.
                    kept = _Kept(
                        self._circumstances(items),
                        plan.parameters.layout,
                        [[*plan.shards[each.first : each.stop]] for each in plan.items],
                        plan.plan,
                        of_places,
                        has_single_writer,
                    )
            if kept is not None:
                of_model[key] = kept
            return plan

    @property
    def _compares(self) -> bool:
        return not self.coordinator.is_alone

    def _circumstances(self, items: Sequence[SaveItem]) -> Any:
        """All that a plan depends on beside what is held: names, ties, buffers, configs that are written."""
        of_items = [(item.dtype, item.buffers) for item in items]
        return circumstances(self.model), of_items, self.coordinator.world_size, self.settings

    def _as_before(
        self, folder: Path, items: Sequence[SaveItem], kept: _Kept | None
    ) -> tuple[Parameters | None, bool]:
        """What is held now, if nothing but values is another than at the last save; and whether rank 0 writes it all.

        Ranks that cannot write into the temporary folder, whose name no other has, see another disk.
        """
        if self.settings is None and self.write_from != "auto":
            return None, self.write_from == "rank0"

        def held() -> dict[str, Holding]:
            of_items = (item.holdings(self.model, self.coordinator).items() for item in items)
            return dict(chain.from_iterable(of_items))

        layout = kept.layout if kept is not None and kept.circumstances == self._circumstances(items) else None
        sees = self.write_from != "auto" or os.access(folder, os.W_OK | os.X_OK)
        parameters, of_ranks = Parameters.following(
            layout, held, self.coordinator, self._compares, self.threads, beside=sees
        )
        blind = [rank for rank, sees in enumerate(of_ranks) if not sees]
        if blind and self.coordinator.is_main:
            logger.info(f"{folder.parent}: rank(s) {blind} cannot write there, so rank 0 writes what they hold too.")
        return parameters, bool(blind) or self.write_from == "rank0"

    def _files(self, folder: Path) -> set[Path]:
        """On rank 0, all files in `folder`, if plans are kept."""
        is_asked = self.coordinator.is_main and self.settings is not None
        return {path for path in folder.rglob("*") if path.is_file()} if is_asked else set()

    def _planned(
        self, places: Sequence[Path], items: Sequence[SaveItem], *, single_writer: bool
    ) -> tuple[WritePlan, list[dict[str, bytes]]]:
        """The plan, made anew; on rank 0 everything but the shards gets into `places`, and is returned for each."""
        coordinator = self.coordinator
        parameters = NewParameters(
            self.model,
            coordinator,
            items,
            compares=self._compares,
            threads=self.threads,
            is_state=self.is_state,
            shares=not single_writer,
        )
        shards: list[list[ShardToWrite]] = []
        files: list[dict[str, bytes]] = []
        smaller: list[Smaller] = []
        with coordinator.reporting():
            refuse_empty(self.model)
            for place, item, lazy in zip(places, items, parameters.lazy, strict=True):
                with as_save_error(place):
                    before = self._files(place)
                    with tempfile.TemporaryDirectory() as elsewhere, quiet(coordinator.is_main):
                        noted = item.lay_out(place if coordinator.is_main else Path(elsewhere), lazy)
                    files.append(
                        {str(path.relative_to(place)): path.read_bytes() for path in self._files(place) - before}
                    )
                shards.append([*map(lay_out_shard, noted)])
            flat = [*chain.from_iterable(shards)]
            plan = make_save_plan(
                flat,
                parameters.sources,
                rank=coordinator.rank,
                world_size=coordinator.world_size,
                single_writer=single_writer,
            )
            padding = packed_padding(self.model)
            for item, lazy in zip(items, parameters.lazy, strict=True):
                expected = lazy.expected - parameters.gathered
                refuse_too_few(plan, parameters.sources, expected, item.left_out, padding)
                if item.held is None and not coordinator.is_alone:
                    smaller += smaller_ones(self.model, parameters, lazy.holdings)
            headers = hashlib.sha256(b"".join(shard.header for shard in flat)).digest()
        digests, of_ranks = zip(*coordinator.all_gather((headers, smaller)), strict=True)
        refuse_differing(digests, "would save other tensors")
        refuse_cut(self.model, of_ranks)
        return WritePlan.of(items, parameters, shards, plan, has_single_writer=single_writer), files


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


LayOut = Callable[[Path, LazyParameters], list[NotedShard]]
"""Writes everything but the weights of a checkpoint into a folder, and says which file they belong in."""


@dataclass(frozen=True, kw_only=True)
class SaveItem(Selection):
    """Something that is saved in files of its own: weights, or the state of a training.

    Attributes:
        lay_out: lays it out.
        index_name: the file name of its index.
        folder: the folder of its files, inside the one that is saved to; empty for that one itself.
        buffers: the names of those that are saved with what is held.
        left_out: which parameters may be missing in what is laid out.
        changes_with: the steps that change it, by names in the plan (:class:`..holdings.steps.Steps`).
    """

    lay_out: LayOut
    index_name: str
    folder: str = ""
    buffers: frozenset[str] = frozenset()
    left_out: LeftOut = nothing
    changes_with: Mapping[str, int] = field(default_factory=dict)


class PlacedItem(NamedTuple):
    """An item in a plan: the shards from number `first` to `stop` are its own, in this `folder`."""

    folder: str
    index_name: str
    first: int
    stop: int


class WritePlan(NamedTuple):
    """The plan by which the bytes of `parameters` get into `shards`, of these `names` in the folder of the save.

    Attributes:
        changes_with: the steps that change what is saved, by names in the plan.
        has_single_writer: rank 0 writes everything.
    """

    parameters: Parameters
    plan: SavePlan
    shards: list[ShardToWrite]
    names: list[str]
    items: list[PlacedItem]
    changes_with: Mapping[str, int]
    has_single_writer: bool

    @classmethod
    def of(
        cls,
        items: Sequence[SaveItem],
        parameters: Parameters,
        shards: Sequence[Sequence[ShardToWrite]],
        plan: SavePlan,
        *,
        has_single_writer: bool,
    ) -> WritePlan:
        """The plan of `items`, of which each has its own of these `shards`."""
        stops = [*accumulate(map(len, shards))]
        return cls(
            parameters,
            plan,
            [*chain.from_iterable(shards)],
            [str(Path(item.folder, it.name)) for item, own in zip(items, shards, strict=True) for it in own],
            [
                PlacedItem(item.folder, item.index_name, stop - len(own), stop)
                for item, own, stop in zip(items, shards, stops, strict=True)
            ],
            {name: step for item in items for name, step in item.changes_with.items()},
            has_single_writer,
        )

    def paths(self, folder: Path) -> list[Path]:
        """The files, if `folder` is the one that is saved to."""
        return [folder / name for name in self.names]

    def named(self, digests: Mapping[int, int]) -> dict[str, int]:
        """The digests of what a rank has written, by the names of files."""
        return {self.names[shard]: digest for shard, digest in digests.items()}


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

    write_rest: Callable[[Any, Mapping[str, int]], None] | None = None
    last_name: str = ""
    replaced: Sequence[str] = ()

    @property
    def needs_digests(self) -> bool:
        return self.write_rest is not None

    def publish(self, publication: Any, plan: WritePlan, digests: Sequence[Mapping[str, int]]) -> None:
        """Give the files of the `plan`, and all others of this save, their final names.

        `digests` are, from each rank, those of what it wrote, as :meth:`WritePlan.named` gives them; none if they are
        not known.
        """
        if self.write_rest is not None:
            named = zip(plan.names, plan.shards, strict=True)
            headers = Counter({name: digest_of_bytes(0, [shard.header]) for name, shard in named})
            total = sum(map(Counter, digests), headers if digests else Counter())
            with as_save_error(publication.temporary):
                self.write_rest(publication, {name: digest % WORD for name, digest in total.items()})
        weights = next((item for item in plan.items if not item.folder), None)
        name = "" if weights is None else _SUFFIX.sub("", plan.names[weights.first])
        publication.commit(name, "" if weights is None else weights.index_name, self.last_name, self.replaced)
