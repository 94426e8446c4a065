"""In place of the package of this name, whose metrics come from the Hub: GLUE's accuracy and F1."""

from typing import Any


class _Glue:
    def __init__(self) -> None:
        self._pairs: list[tuple[int, int]] = []

    def add_batch(self, *, predictions: Any, references: Any) -> None:
        self._pairs += zip(predictions.tolist(), references.tolist(), strict=True)

    def compute(self) -> dict[str, float]:
        right = sum(mine == true for mine, true in self._pairs)
        both = sum(mine == true == 1 for mine, true in self._pairs)
        ones = sum(mine + true for mine, true in self._pairs)
        found = {"accuracy": right / len(self._pairs), "f1": 2 * both / ones if ones else 0.0}
        self._pairs = []
        return found


def load(*_: Any, **__: Any) -> _Glue:
    return _Glue()
