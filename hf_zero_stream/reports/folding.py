"""Many names that differ only in their numbers, written as one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import chain
from math import prod
from typing import Any, NamedTuple


__all__ = ["fold", "folded_names"]

_NUMBER = re.compile(r"(?:^|(?<=\.))(0|[1-9]\d*)(?=\.|$)")

Row = tuple[str, ...]
"""The numbers of one name."""
Choice = tuple[str, ...]
"""The values that one number takes."""


class Family(NamedTuple):
    """Things of one kind whose names differ only in numbers, of which every combination is there.

    Attributes:
        name: such as ``layers.{0...47}.mlp.experts.{0...127}.up_proj.weight``.
        kind: what they have in common, such as dtype and shape; hashable.
    """

    name: str
    kind: tuple[Any, ...]
    size: int


def fold(named: Iterable[tuple[str, tuple[Any, ...]]]) -> list[Family]:
    """Fold (name, kind) pairs into families, in the order of their first members.

    Nothing is lost: a family stands for exactly the names that its numbers make.
    """
    rows: dict[tuple[tuple[Any, ...], tuple[str, ...]], list[Row]] = {}
    for name, kind in named:
        pieces = _NUMBER.split(name)
        rows.setdefault((kind, tuple(pieces[::2])), []).append(tuple(pieces[1::2]))
    families = []
    for (kind, texts), numbers in rows.items():
        for choices in _products(numbers):
            numbered = zip(map(_choice_text, choices), texts[1:], strict=True)
            name = texts[0] + "".join(chain.from_iterable(numbered))
            families.append(Family(name, kind, prod(map(len, choices))))
    return families


def folded_names(names: Iterable[str]) -> list[str]:
    return [family.name for family in fold((name, ()) for name in names)]


def _products(rows: Sequence[Row]) -> list[tuple[Choice, ...]]:
    """Cut a set of rows into products of choices: first values that are followed by the same rows share one."""
    if not rows[0]:
        return [()]
    followers: dict[str, list[Row]] = {}
    for first, *rest in rows:
        followers.setdefault(first, []).append(tuple(rest))
    alike: dict[tuple[Row, ...], list[str]] = {}
    for first, rest_rows in followers.items():
        alike.setdefault(tuple(sorted(rest_rows)), []).append(first)
    return [(tuple(firsts), *others) for rest_rows, firsts in alike.items() for others in _products(rest_rows)]


def _choice_text(choice: Choice) -> str:
    if len(choice) == 1:
        return choice[0]
    numbers = sorted(map(int, choice))
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{{{numbers[0]}...{numbers[-1]}}}"
    return f"{{{', '.join(map(str, numbers))}}}"
