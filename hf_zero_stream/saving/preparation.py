"""What a save is going to write: contents, and for each the shards and the plan.

The plans are made anew, or are those of the last save of the same training if nothing but values has changed.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers.utils import logging

from ..checkpoint.safetensors import NotedShard, ShardToWrite, lay_out_shard
from ..errors import SaveError
from ..holdings.kinds import persistent_buffers
from ..ranks.coordinator import Coordinator
from .count import LeftOut, nothing, packed_padding, refuse_cut, refuse_too_few
from .files import Publication, ShardWriter
from .lazy_parameters import Held, holdings_of_model
from .parameters import Layout, NewParameters, Parameters
from .plan import SavePlan, make_save_plan


class _Kept(NamedTuple):
    """The plan of a content of a model's last save, without what would keep the model or its optimizer alive.

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
"""By the file name of the content's index."""


@dataclass(frozen=True, kw_only=True)
class Preparation:
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

    def plan(self, folder: Path, content: Content) -> list[Planned]:
        """The plans of `content`, and of what is beside it; the `folder` is that of rank 0."""
        place = folder / content.folder
        if self.coordinator.is_main:
            place.mkdir(exist_ok=True)
        if self.settings is None:
            return self._planned(place, content)
        kept = _kept.setdefault(self.model, {})
        found = self._planned_as_before(place, content, kept.get(content.index_name))
        if found is not None:
            return found
        kept.pop(content.index_name, None)
        before = self._files(place)
        first, *others = self._planned(place, content)
        files = {str(path.relative_to(place)): path.read_bytes() for path in self._files(place) - before}
        # The circumstances are looked at again: transformers completes a model's config when it writes it.
        new = _Kept(self._circumstances(content), first.parameters.layout, first.shards, first.plan, files)
        kept[content.index_name] = new
        return [first, *others]

    @property
    def _compares(self) -> bool:
        return not self.coordinator.is_alone

    def _circumstances(self, content: Content) -> Any:
        """What plans depend on beside what is held: names, ties, buffers, the configs that are written."""
        settings = (self.single_writer, self.coordinator.world_size, self.settings)
        return (
            circumstances(content.model or self.model),
            content.dtype,
            len(content.beside),
            content.buffers,
            settings,
        )

    def _planned_as_before(self, place: Path, content: Content, kept: _Kept | None) -> list[Planned] | None:
        """By the plan of the last save; None if anything but values is another on any rank."""
        is_same = kept is not None and kept.circumstances == self._circumstances(content)
        if not all(self.coordinator.all_gather(is_same)) or kept is None:
            return None
        wanted = [
            (
                kept.layout,
                partial(holdings_of_model, content.model or self.model, self.coordinator, content.dtype, held),
            )
            for held in (content.held, *(each.held for each in content.beside))
        ]
        found = Parameters.following(wanted, self.coordinator, self._compares, self.threads)
        parameters = [each for each in found if each is not None]
        if len(parameters) < len(wanted):
            return None
        for name, data in kept.files.items():  # none but on rank 0
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(data)
        return content.planned(parameters, kept.shards, kept.plan)

    def _files(self, folder: Path) -> set[Path]:
        """On rank 0, all files in `folder`."""
        return {path for path in folder.rglob("*") if path.is_file()} if self.coordinator.is_main else set()

    def _planned(self, place: Path, content: Content) -> list[Planned]:
        """What to write; on rank 0 everything but the shards gets into the folder `place`."""
        coordinator = self.coordinator
        parameters = NewParameters(
            content.model or self.model,
            coordinator,
            content.dtype,
            compares=self._compares,
            threads=self.threads,
            held=content.held,
            beside=[each.held for each in content.beside],
            is_state=self.is_state,
            shares=not self.single_writer,
        )
        with coordinator.reporting():
            with tempfile.TemporaryDirectory() as elsewhere, quiet(coordinator.is_main):
                noted = content.lay_out(place if coordinator.is_main else Path(elsewhere), parameters)
            shards = [*map(lay_out_shard, noted)]
            plan = make_save_plan(
                shards,
                parameters.sources,
                rank=coordinator.rank,
                world_size=coordinator.world_size,
                single_writer=self.single_writer,
            )
            padding = packed_padding(self.model)
            refuse_too_few(plan, parameters.sources, parameters.expected, content.left_out, padding)
            mine = hashlib.sha256(b"".join(shard.header for shard in shards)).hexdigest()
        refuse_other_tensors(coordinator, mine, "save")
        if content.held is None:
            refuse_cut(self.model, parameters, coordinator)
        return content.planned([parameters, *parameters.beside], shards, plan)


def refuse_other_tensors(coordinator: Coordinator, mine: str, doing: str) -> None:
    """Raise a SaveError, on all ranks, if this digest of what they are `doing` differs between them."""
    digests = coordinator.all_gather(mine)
    if different := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
        raise SaveError(
            f"Rank(s) {different} would {doing} other tensors than rank 0: the model must be the same on every rank."
        )


def circumstances(model: nn.Module) -> Any:
    """What the plans of `model` depend on beside what is held of its parameters."""
    first: dict[int, str] = {}
    ties = [first.setdefault(id(param), name) for name, param in model.named_parameters(remove_duplicate=False)]
    saved = {id(buffer) for _, buffer in persistent_buffers(model)}  # others may have no memory that can be named
    buffers = [
        (name, buffer.data_ptr(), buffer.dtype, buffer.shape, buffer.stride())
        for name, buffer in model.named_buffers(remove_duplicate=False)
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


class Beside(NamedTuple):
    """What is held and saved as something else is, in files of other names: `renamed` gives them."""

    held: Held
    renamed: Callable[[str], str]


@dataclass(frozen=True, kw_only=True)
class Content:
    """Something that is saved: weights, or the states of an optimizer.

    Attributes:
        lay_out: lays it out.
        index_name: the file name of its index.
        folder: the folder of its files, inside the one that is saved to; empty for that one itself.
        dtype: of what is of floating point; None: as it is held.
        held: what is saved under the names of parameters in place of their values; None: the values.
        check: raises if what is laid out cannot be loaded; called on rank 0, with a folder where shards have their
            headers and no values yet.
        beside: what is held as this is, and is saved by the same plan.
        buffers: the names of those that are saved with what is held.
        model: has parameters by whose names that is held, if it is no part of the model that is saved.
        left_out: which parameters may be missing in what is laid out.
    """

    lay_out: LayOut
    index_name: str
    folder: str = ""
    dtype: torch.dtype | None = None
    held: Held | None = None
    check: Callable[[Path], None] | None = None
    beside: Sequence[Beside] = ()
    buffers: frozenset[str] = frozenset()
    left_out: LeftOut = nothing
    model: nn.Module | None = None

    def planned(self, parameters: Sequence[Parameters], shards: list[ShardToWrite], plan: SavePlan) -> list[Planned]:
        """What is written of this by one plan, and of what is beside it, for each from its `parameters`."""
        first, *others = parameters
        found = [Planned(first, shards, plan, self.folder)]
        for each, of_each in zip(self.beside, others, strict=True):
            renamed = [replace(shard, name=each.renamed(shard.name)) for shard in shards]
            found.append(Planned(of_each, renamed, plan, self.folder))
        return found


_SUFFIX = re.compile(r"-\d{5}-of-\d{5}(?=\.safetensors$)")


class Planned(NamedTuple):
    """What is written into which `shards` of a folder, and from what."""

    parameters: Parameters
    shards: list[ShardToWrite]
    plan: SavePlan
    folder: str

    @property
    def names(self) -> list[str]:
        """The files, relative to the folder that is saved to."""
        return [str(Path(self.folder, shard.name)) for shard in self.shards]


@dataclass(frozen=True)
class Ending:
    """What rank 0 does when all shards of a save are complete.

    Attributes:
        beside: writes what is neither weights nor laid out with them into the folder that is going to be published.
        last_name: the file that gets its name after all others; may be empty.
        replaced: files and folders that are removed then.
    """

    beside: Callable[[Path], None] | None = None
    last_name: str = ""
    replaced: Sequence[str] = ()


Writer = TypeVar("Writer", bound=ShardWriter)


@dataclass(frozen=True)
class Prepared:
    """Files that wait for what is `planned`, in a folder that becomes visible at once.

    Attributes:
        index_name: the file name of the weights' index; empty without weights.
        ending: what follows when they are complete.
        single_writer: rank 0 writes everything.
    """

    publication: Publication
    planned: Sequence[Planned]
    index_name: str
    ending: Ending
    single_writer: bool

    def files(self, kind: type[Writer]) -> list[Writer]:
        """For each of what is planned, what writes into its files, or compares with them."""
        return [kind([self.publication.temporary / name for name in each.names]) for each in self.planned]

    def publish(self) -> None:
        """Give the files their final names (rank 0)."""
        if self.ending.beside is not None:
            self.ending.beside(self.publication.temporary)
        first = next((each for each in self.planned if not each.folder), None)
        weights = "" if first is None else _SUFFIX.sub("", first.shards[0].name)
        self.publication.commit(weights, self.index_name, self.ending.last_name, self.ending.replaced)
