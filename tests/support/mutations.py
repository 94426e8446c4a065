"""Rows of the table that are mutated: what becomes of us if a release renames a function, or calls another one."""

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest

from hf_zero_stream.bindings.table import TABLE
from hf_zero_stream.registry import PatchScope, Row
from tests.support.messages import outcome_of


def renamed(row: Row, patch: pytest.MonkeyPatch) -> Row:
    return row._replace(of=f"{row.of}_")


def uncalled(row: Row, patch: pytest.MonkeyPatch) -> Row:
    """It is there, and nobody calls it: what transformers calls has another name."""
    importlib.import_module(row.module)
    for owner, name in row.places():
        patch.setattr(owner, f"{name}_", inspect.getattr_static(owner, name), raising=False)
    return renamed(row, patch)


MUTATIONS = (renamed, uncalled)


@contextmanager
def mutation_of(row: Row, scope: PatchScope, mutate: Callable[[Row, pytest.MonkeyPatch], Row]) -> Iterator[None]:
    """Inside, the table has a row mutated."""
    with pytest.MonkeyPatch.context() as patch:
        new = mutate(row, patch)
        rows = [new if each is row else each for each in TABLE[scope]]
        patch.setitem(TABLE, scope, rows)  # type: ignore[arg-type]
        yield


Mutation = tuple[str, int, Callable[[Row, pytest.MonkeyPatch], Row]]


def mutations(begin: tuple[str, ...], *scopes: str) -> list[Any]:
    """Of each row of these scopes whose place begins so, both."""
    return [
        pytest.param((scope.name, number, mutate), id=f"{mutate.__name__} {row.name}", marks=pytest.mark.slow)
        for scope in TABLE
        if scope.name in scopes
        for number, row in enumerate(TABLE[scope])
        if row.of.startswith(begin)
        for mutate in (MUTATIONS if row.leads_to else MUTATIONS[:1])
    ]


def mutated(mutation: Mutation | None, work: Callable[..., Any], *args: Any) -> Any:
    """What `work` returns, or the error that it raises."""
    changed: AbstractContextManager[None] = nullcontext()
    if mutation is not None:
        name, number, mutate = mutation
        scope = next(scope for scope in TABLE if scope.name == name)
        changed = mutation_of(TABLE[scope][number], scope, mutate)
    with changed:
        return outcome_of(lambda: work(*args))
