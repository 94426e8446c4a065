"""What a save is going to write, as data: contents, and for each the shards and the plan."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from ..checkpoint.safetensors import NotedShard, ShardToWrite
from .files import Publication, ShardWriter
from .lazy_parameters import Held
from .parameters import NewParameters, Parameters
from .plan import SavePlan


LayOut = Callable[[Path, NewParameters], list[NotedShard]]
"""Writes everything but the weights of a checkpoint into a folder, and says which file they belong in."""


@dataclass(frozen=True)
class Alike:
    """What is saved beside something else, under the same names and in the same layout, in files of other names.

    Attributes:
        held: what this rank holds of it.
        lay_out: lays it out by itself, where it is not held as the other is.
        index_name: the file name of its index.
        renamed: what the other's shard of a name is called here.
    """

    held: Held
    lay_out: LayOut
    index_name: str
    renamed: Callable[[str], str]

    def write_index(self, folder: Path, index_name: str) -> None:
        """Write the index after that of the other, of this name, if it has one."""
        if (folder / index_name).exists():
            index = json.loads((folder / index_name).read_text(encoding="utf-8"))
            index["weight_map"] = {name: self.renamed(shard) for name, shard in index["weight_map"].items()}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (folder / self.index_name).write_text(text, encoding="utf-8")


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
        beside: what is held, most likely, as this is: it is saved by the same plan. Planning takes as long as writing
            some hundred MB, because transformers' conversions run over thousands of lazy tensors.
    """

    lay_out: LayOut
    index_name: str
    folder: str = ""
    dtype: torch.dtype | None = None
    held: Held | None = None
    check: Callable[[Path], None] | None = None
    beside: Sequence[Alike] = ()


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

    def paths(self, root: Path) -> list[Path]:
        return [root / name for name in self.names]

    def like(self, alike: Alike, parameters: Parameters) -> Planned:
        """The same of what is `alike`, from `parameters` that lie in memory as these do."""
        shards = [replace(shard, name=alike.renamed(shard.name)) for shard in self.shards]
        return Planned(parameters, shards, self.plan, self.folder)


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
        return [kind(each.paths(self.publication.temporary)) for each in self.planned]

    def publish(self) -> None:
        """Give the files their final names (rank 0)."""
        if self.ending.beside is not None:
            self.ending.beside(self.publication.temporary)
        first = next((each for each in self.planned if not each.folder), None)
        weights = "" if first is None else _SUFFIX.sub("", first.shards[0].name)
        self.publication.commit(weights, self.index_name, self.ending.last_name, self.ending.replaced)
