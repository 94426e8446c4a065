"""Many names that differ only in their numbers, written as one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import chain
from math import prod
from typing import Any, NamedTuple


__all__ = ["fold", "folded_names"]

_NUMBER = re.compile(r"(?:^|(?<=\.))(0|[1-9]\d*)(?=\.|$)")


class Family(NamedTuple):
    """Things of one kind whose names differ only in numbers, of which every combination is there.

    A name is such as ``layers.{0...47}.mlp.experts.{0...127}.up_proj.weight``; a kind is hashable, such as a dtype
    with a shape.
    """

    name: str
    kind: tuple[Any, ...]
    size: int


def fold(named: Iterable[tuple[str, tuple[Any, ...]]]) -> list[Family]:
    """Fold (name, kind) pairs into families, in the order of their first members.

    Nothing is lost: a family stands for exactly the names that its numbers make.
    """
    rows: dict[tuple[tuple[Any, ...], tuple[str, ...]], list[tuple[str, ...]]] = {}
    for name, kind in named:
        pieces = _NUMBER.split(name)
        rows.setdefault((kind, tuple(pieces[::2])), []).append(tuple(pieces[1::2]))
    families = []
    for (kind, texts), numbers in rows.items():
        for choices in _products(numbers):
            name = "".join(chain.from_iterable(zip(texts, [*map(_choice_text, choices), ""], strict=True)))
            families.append(Family(name, kind, prod(map(len, choices))))
    return families


def folded_names(names: Iterable[str]) -> list[str]:
    return [family.name for family in fold((name, ()) for name in names)]


def _products(rows: Sequence[tuple[str, ...]]) -> list[tuple[tuple[str, ...], ...]]:
    """Cut a set of rows of numbers into products of choices: numbers that are followed by the same rows share one."""
    if not rows[0]:
        return [()]
    followers: dict[str, list[tuple[str, ...]]] = {}
    for first, *rest in rows:
        followers.setdefault(first, []).append(tuple(rest))
    alike: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    for first, rest_rows in followers.items():
        alike.setdefault(tuple(sorted(rest_rows)), []).append(first)
    return [(tuple(firsts), *others) for rest_rows, firsts in alike.items() for others in _products(rest_rows)]


def _choice_text(choice: tuple[str, ...]) -> str:
    if len(choice) == 1:
        return choice[0]
    numbers = sorted(map(int, choice))
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{{{numbers[0]}...{numbers[-1]}}}"
    return f"{{{', '.join(map(str, numbers))}}}"
