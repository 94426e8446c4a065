"""The values that fields of settings allow, and how they are read from text."""

from __future__ import annotations

import functools
import re
from fractions import Fraction
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from ..dtypes import dtype_name, dtype_named, is_dtype_name
from ..errors import ConfigError


if TYPE_CHECKING:
    import torch

SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""Names that launchers and DeepSpeed use, and torch's."""

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 1000**_power, f"{_letter}b": 1000**_power, f"{_letter}ib": 1024**_power}
_SIZE = re.compile(r"(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*([a-z]*)")

_OR_AUTO = ("keep_quantized",)
"""Booleans that may also be "auto"."""

_OR_ALL = ("snapshot_bytes",)
"""Sizes in bytes that may also be "all"."""

_BOOLEANS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


def expected_instead(settings: type, name: str, value: Any, default: Any) -> str:
    """The values that the field `name` of the class `settings` allows, if `value` is none of them; else ""."""
    if name in _OR_AUTO:
        return "" if isinstance(value, bool) or value == "auto" else "True, False or 'auto'"
    if name in _OR_ALL and value == "all":
        return ""
    # A bool is an int to isinstance(), but `staging_bytes=True` is a mistake.
    if type(value) is not type(default):
        return type(default).__name__ + (" or 'all'" if name in _OR_ALL else "")
    if isinstance(value, str):
        choices = _choices(settings, name)  # none: any string
        return "" if not choices or value in choices else f"one of {', '.join(choices)}"
    return "at least 0" if value < 0 else ""


@functools.cache  # looking up all annotations takes longer than the rest of `StreamingConfig()`
def _choices(settings: type, name: str) -> tuple[str, ...]:
    return get_args(get_type_hints(settings)[name])


def parse(settings: type, name: str, value: Any, default: Any, origin: str) -> Any:
    """Convert a value of a JSON file or an environment variable to the type of the field `name` of `settings`."""
    is_boolean = isinstance(default, bool) or (name in _OR_AUTO and value != "auto")
    parsed: Any
    if isinstance(default, str) and not is_boolean:
        parsed, expected = value, ""
    elif is_boolean:
        parsed, expected = _BOOLEANS.get(str(value).strip().lower()), "a boolean (1, 0, true, false, yes, no)"
        expected += ' or "auto"' if name in _OR_AUTO else ""
    elif name in _OR_ALL and str(value).strip().lower() == "all":
        parsed, expected = "all", ""
    elif name.endswith("_bytes"):
        parsed, expected = parse_size(value), 'a whole number of bytes, or a size such as "64MiB" or "64MB"'
    else:
        parsed, expected = parse_size(value, units=False), "a whole number"
    if parsed is None:
        raise ConfigError(f"{origin}: expected {expected}; got {value!r}")
    if allowed := expected_instead(settings, name, parsed, default):
        raise ConfigError(f"{origin}: expected {allowed}; got {value!r}")
    return parsed


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
