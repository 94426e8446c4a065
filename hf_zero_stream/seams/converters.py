"""transformers' converters on lazy tensors: copied as seldom as possible, run again for ops that need real values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, ClassVar

from transformers.core_model_loading import SkipParameters, WeightConverter

from ..checkpoint.lazy import LazyTensor


class _LazyConverter:
    """What a converter does differently while a load streams: the first base of a class of its own kind.

    Attributes:
        stock: that class of transformers'.
        spares: by the ``id`` of a converter, a copy of it.
    """

    __slots__ = ()
    stock: ClassVar[type]
    spares: ClassVar[dict[int, Any]]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """transformers copies a converter for each checkpoint key, and throws away all copies but a target's first.

        So the same copy is returned until it has collected a tensor. For the 45,000 tensors of DeepSeek-V3, the copies
        would take more than half of the planning time.
        """
        spare = self.spares.get(id(self))
        if spare is None or spare.collected_tensors:
            own = type(self)
            self.__class__ = self.stock
            try:
                spare = deepcopy(self, memo)
            finally:
                self.__class__ = own
            spare.__class__ = own
            self.spares[id(self)] = spare
        return spare

    def convert(self, layer_name: str, *args: Any, **kwargs: Any) -> Any:
        """Run the converter again on real tensors if one of its ops (``numpy()``) cannot work on lazy ones."""
        mapped: dict[str, list[Any]] = getattr(self, "collected_tensors")  # noqa: B009 - of the other base
        collected = {pattern: list(tensors) for pattern, tensors in mapped.items()}
        convert = super().convert  # type: ignore[misc]
        try:
            return convert(layer_name, *args, **kwargs)
        except SkipParameters:
            for pattern, tensors in collected.items():
                # A converter collects functions that return tensors, or tensors.
                values = (tensor() if callable(tensor) else tensor for tensor in tensors)
                mapped[pattern] = [it.materialise() if isinstance(it, LazyTensor) else it for it in values]
            kwargs["loading_info"].conversion_errors.pop(layer_name, None)
            return convert(layer_name, *args, **kwargs)


@contextmanager
def lazy_converters(conversions: Iterable[Any]) -> Iterator[None]:
    """Inside, the converters among the `conversions` of a load, and their copies, are :class:`_LazyConverter`."""
    found = [(each, type(each)) for each in conversions if isinstance(each, WeightConverter)]
    spares: dict[int, Any] = {}
    for converter, stock in found:
        own = {"__slots__": (), "stock": stock, "spares": spares}
        converter.__class__ = type(stock.__name__, (_LazyConverter, stock), own)
    try:
        yield
    finally:
        for converter, stock in found:
            converter.__class__ = stock
