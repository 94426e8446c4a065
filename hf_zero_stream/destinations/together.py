"""Several memories that one load fills: a model in use, and what an optimizer keeps of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from torch import nn

from ..planning.plan import Target
from .base import Batch, Destination


class LazyParts(nn.Module):
    """The lazy models of several memories, as one, each with its missing and its tied names."""

    def __init__(self, parts: Sequence[tuple[nn.Module, set[str], set[str]]]) -> None:
        super().__init__()
        self.parts = parts

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        return chain.from_iterable(lazy.named_parameters(*args, **kwargs) for lazy, _, _ in self.parts)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
        return chain.from_iterable(lazy.named_buffers(*args, **kwargs) for lazy, _, _ in self.parts)


class Together(Destination):
    """These `memories`, of which each is filled by its own part of :class:`LazyParts`."""

    def __init__(self, memories: Sequence[Destination]) -> None:
        self._memories = memories
        self.device, self.into = memories[0].device, memories[0].into
        self.hides_zero3 = any(memory.hides_zero3 for memory in memories)
        self.fills_missing = any(memory.fills_missing for memory in memories)
        self.exchange_settings = [*chain.from_iterable(memory.exchange_settings for memory in memories)]

    def batches(
        self, model: nn.Module, missing: set[str], tied: set[str], *, only_planned: bool = False
    ) -> list[Batch]:
        assert isinstance(model, LazyParts)
        pairs = zip(self._memories, model.parts, strict=True)
        return [*chain.from_iterable(memory.batches(*part, only_planned=only_planned) for memory, part in pairs)]

    def check(self, targets: Sequence[Target]) -> None:
        for memory in self._memories:
            memory.check(targets)

    def allocate(self) -> None:
        for memory in self._memories:
            memory.allocate()

    def finish(self) -> None:
        for memory in self._memories:
            memory.finish()
