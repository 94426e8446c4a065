"""What all situations are: a value of each axis, as text, drawn, and made simpler one axis at a time."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, replace
from typing import Any, ClassVar

from typing_extensions import Self


class Drawn:
    """A frozen dataclass with one text for each axis; what is left out has the field's default.

    Attributes:
        AXES: the values of each axis, simplest first.
        NAMED: the axis that the text always has.
    """

    AXES: ClassVar[Mapping[str, tuple[str, ...]]]
    NAMED: ClassVar[str]

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():  # type: ignore[call-overload]
            if value not in self.AXES[name]:
                raise ValueError(f"{name} is one of {self.AXES[name]}, not {value!r}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what `str` has written: ``home=zero3,change=lora``."""
        return cls(**dict(part.split("=") for part in text.split(",") if part))

    def __str__(self) -> str:
        each: Any = fields(self)  # type: ignore[arg-type]
        changed = [field.name for field in each if getattr(self, field.name) != field.default]
        return ",".join(f"{name}={getattr(self, name)}" for name in dict.fromkeys([self.NAMED, *changed]))

    @classmethod
    def draw(cls, source: random.Random) -> Self:
        """A situation without contradiction."""
        while True:
            drawn = cls(**{name: cls.choice(source, name) for name in cls.AXES}).settled()
            if drawn.contradiction() is None:
                return drawn

    @classmethod
    def choice(cls, source: random.Random, name: str) -> str:
        """A value of one axis."""
        return source.choice(cls.AXES[name])

    def settled(self) -> Self:
        """The same, where axes that mean nothing beside the others have their defaults."""
        return self

    def contradiction(self) -> str | None:
        """Why this situation cannot be."""
        return None

    def simpler(self) -> Iterator[Self]:
        """The situations that differ in one axis, by a simpler value."""
        for name, choices in self.AXES.items():
            for value in choices[: choices.index(getattr(self, name))]:
                candidate = replace(self, **{name: value}).settled()  # type: ignore[type-var]
                if candidate.contradiction() is None:
                    yield candidate
