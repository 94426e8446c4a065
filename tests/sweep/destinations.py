"""Where a sweep loads to: ZeRO-3 partitions, or the shards of ``from_pretrained(distributed_config=...)``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any


FAMILIES = ("zero3", "files", "fsdp", "tp", "ep", "drawn", "accelerate")
"""Of the last two, random numbers are compared (:mod:`tests.sweep.drawn`): of ZeRO-3, and of accelerate's FSDP2."""

_ARGUMENTS = {"fsdp": "fsdp_size", "tp": "tp_size", "ep": "ep_size", "replicate": "dp_replicate_size"}
_BY_RANKS = re.compile(r"(zero3|files|drawn|accelerate)x(\d+)")
_NAME = re.compile(rf"{_BY_RANKS.pattern}|(fsdp|tp|ep|replicate)\d+(-(fsdp|tp|ep|replicate)\d+)*")


@dataclass(frozen=True)
class Destination:
    """A way to shard a model.

    Attributes:
        name: ``zero3x2`` is ZeRO-3 on two ranks, ``filesx2`` the same with weights that stay in files; else ways and
            sizes, such as ``fsdp2`` or ``replicate2-fsdp2``.
        every: only every such model is loaded.
    """

    name: str
    every: int = 1

    @classmethod
    def parse(cls, text: str) -> Destination:
        """A name, and after a slash which part of the models: ``zero3x3/5`` takes every fifth."""
        name, _, every = text.partition("/")
        if not _NAME.fullmatch(name):
            raise ValueError(
                "destination: expected zero3xN, filesxN, drawnxN, acceleratexN, or fsdpN, tpN, epN, replicateN joined "
                f"by -; got {text!r}"
            )
        return cls(name, int(every or 1))

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes in a DistributedConfig; none of what a number of ranks says all of."""
        if _BY_RANKS.fullmatch(self.name):
            return {}
        parts = [re.fullmatch(r"([a-z]+)(\d+)", part) for part in self.name.split("-")]
        return {_ARGUMENTS[part[1]]: int(part[2]) for part in parts if part}

    @property
    def world_size(self) -> int:
        """The number of ranks; experts are spread over those of the other ways."""
        if by_ranks := _BY_RANKS.fullmatch(self.name):
            return int(by_ranks[2])
        return prod(size for argument, size in self.sizes.items() if argument != "ep_size")

    @property
    def family(self) -> str:
        """One of `FAMILIES`: the last of them that has a part in it."""
        if by_ranks := _BY_RANKS.fullmatch(self.name):
            return by_ranks[1]
        ways = {part.rstrip("0123456789") for part in self.name.split("-")}
        return next(family for family in ("ep", "tp", "fsdp") if family in ways)

    def takes(self, case: Mapping[str, Any]) -> bool:
        """Whether the model's class has the plans that this needs; every class has one for FSDP."""
        return all(case["plans"][way] for way in ("tp", "ep") if _ARGUMENTS[way] in self.sizes)
