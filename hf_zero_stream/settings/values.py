"""Values as text: the names of dtypes, and what the annotations of settings allow."""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from ..errors import ConfigError


if TYPE_CHECKING:
    import torch

SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""Names that launchers and DeepSpeed use, and torch's."""

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 1000**_power, f"{_letter}b": 1000**_power, f"{_letter}ib": 1024**_power}
_SIZE = re.compile(r"(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*([a-z]*)")

_BOOLEANS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}

Size = Annotated[int | str, "bytes"]
"""The annotation of a size: a number of bytes, or a text such as `"64MiB"`, which becomes one."""

_EXPECTED: Mapping[Any, str] = {
    bool: "a boolean (1, 0, true, false, yes, no)",
    int: "a whole number",
    str: "a text",
    Size: 'a whole number of bytes, or a size such as "64MiB" or "64MB"',
}


def value_of(annotation: Any, value: Any, origin: str, *, is_written: bool = True) -> Any:
    """The value of a field with this `annotation`, of one that is given; a ConfigError names the `origin` of another.

    What `is_written` in a file or the environment may be text in place of a boolean or a number. Sizes may be text
    everywhere.
    """
    choices = [choice for kind in _kinds(annotation) for choice in get_args(kind) if get_origin(kind) is Literal]
    for kind in (kind for kind in _kinds(annotation) if kind in _EXPECTED):
        if (found := _read(kind, value, is_written)) is not None:
            return found
    text = value.strip().lower() if is_written and isinstance(value, str) else value
    if isinstance(text, str) and text in choices:
        return text
    texts = _EXPECTED if is_written else {**_EXPECTED, bool: "True or False"}
    expected = [texts[kind] for kind in _kinds(annotation) if kind in texts]
    if choices:
        expected.append(f"one of {', '.join(choices)}" if not expected else " or ".join(f'"{it}"' for it in choices))
    raise ConfigError(f"{origin}: expected {' or '.join(expected)}; got {value!r}")


def _kinds(annotation: Any) -> tuple[Any, ...]:
    """The annotations of a union, or the one that is no union."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _read(kind: Any, value: Any, is_written: bool) -> Any:
    """What `value` is as one of this kind; None if it is none."""
    if kind is str:
        return value if isinstance(value, str) else None
    if kind is bool:
        written = _BOOLEANS.get(str(value).strip().lower()) if is_written else None
        return value if isinstance(value, bool) else written
    if is_written or (kind is Size and isinstance(value, str)):
        return parse_size(value, units=kind is Size)
    return value if type(value) is int and value >= 0 else None  # a bool is an int, but `staging_bytes=True` a mistake


def dtype_name(dtype: Any) -> str:
    """The name of a dtype, or of what is given by one."""
    return str(dtype).removeprefix("torch.")


def is_dtype_name(name: Any) -> bool:
    """Whether a dtype has this name."""
    import torch  # settings and headers do without

    return isinstance(name, str) and isinstance(vars(torch).get(name), torch.dtype)


def dtype_named(name: Any) -> torch.dtype:
    """The dtype of this name; a ValueError if there is none."""
    import torch

    if not is_dtype_name(name):
        raise ValueError(f"{name!r} is the name of no dtype")
    return vars(torch)[name]


def torch_name(dtype: Any) -> str:
    """torch's name of a dtype, which is given as such or by a name of it: ``"bf16"`` is ``"bfloat16"``."""
    name = dtype_name(dtype)
    return SHORT_DTYPES.get(name, name)


def floating_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """The dtype that `dtype` is or names, if there is any; a ConfigError if it is none of floating-point numbers."""
    if dtype is None:
        return None
    name = torch_name(dtype)
    found = dtype_named(name) if is_dtype_name(name) else None
    if found is None or not found.is_floating_point:
        raise ConfigError(
            f'dtype: expected a floating-point dtype, such as "bfloat16", "float16" or "float32"; got {dtype!r}'
        )
    return found


def parse_size(value: Any, units: bool = True) -> int | None:
    """The number, or None if it is none. `5e8` counts: JSON reads it as a float, and DeepSpeed accepts it."""
    if isinstance(value, bool):
        return None
    match = _SIZE.fullmatch(str(value).strip().lower().replace("e+", "e"))
    if match is None or match[2] not in _UNITS or (match[2] and not units):
        return None
    number = Fraction(match[1]) * _UNITS[match[2]]
    return int(number) if number.denominator == 1 else None
