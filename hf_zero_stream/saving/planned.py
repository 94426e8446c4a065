"""What a save is going to write, and what is saved beside it in the same way: a training's masters and moments.

Planning a save takes as long as writing some hundred MB: transformers' conversions run over thousands of lazy tensors.
So what lies in memory as something else does is written by the other's plan.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from ..checkpoint.safetensors import NotedShard, ShardToWrite
from .lazy_parameters import Held
from .parameters import Parameters
from .plan import SavePlan


__all__ = ["Alike", "LayOut", "Planned"]

LayOut = Callable[[Path, Parameters], list[NotedShard]]
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


class Planned(NamedTuple):
    """What is written into which `shards`, and from what."""

    parameters: Parameters
    shards: list[ShardToWrite]
    plan: SavePlan

    def paths(self, folder: Path) -> list[Path]:
        return [folder / shard.name for shard in self.shards]

    def like(self, alike: Alike, parameters: Parameters) -> Planned:
        """The same of what is `alike`, from `parameters` that lie in memory as these do."""
        shards = [replace(shard, name=alike.renamed(shard.name)) for shard in self.shards]
        return Planned(parameters, shards, self.plan)
