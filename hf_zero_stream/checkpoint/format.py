"""Dtypes, entries and headers of a checkpoint's files in any format, and the strict parser of their JSON.

Headers are untrusted. Their JSON is parsed so strictly that the result means one thing only. Python's parser is laxer
than the format: it lets the last of two equal keys win, takes ``-0`` for an integer, and reads half a surrogate pair
as a character. The safetensors library (serde_json) does not do the last two, and we accept nothing that it refuses.
"""

from __future__ import annotations

import functools
import json
import re
import reprlib
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import CheckpointError
from ..sources.base import SourceFile


if TYPE_CHECKING:
    import torch

MAX_DIMENSIONS = 64
"""More than torch's kernels take."""

_TORCH_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "C64": "complex64",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
"""The format's names of dtypes, and torch's."""


class NamedDtype(NamedTuple):
    """Stands for torch's dtype where headers are only looked at, and torch, which takes seconds, is not imported."""

    name: str
    itemsize: int


def dtypes() -> Mapping[str, torch.dtype]:
    """The dtypes by the format's names."""
    return _dtypes("torch" in sys.modules)


@functools.cache
def _dtypes(of_torch: bool) -> dict[str, Any]:
    if not of_torch:
        bits = {name: re.search(r"\d+", dtype) for name, dtype in _TORCH_NAMES.items()}
        return {name: NamedDtype(name, int(found[0]) // 8 if found else 1) for name, found in bits.items()}
    import torch

    return {name: getattr(torch, dtype) for name, dtype in _TORCH_NAMES.items()}


@functools.cache
def _names(of_torch: bool) -> dict[Any, str]:
    return {dtype: name for name, dtype in _dtypes(of_torch).items()}


def are_sizes(values: Sequence[Any], most: int = MAX_DIMENSIONS) -> bool:
    """Whether these are at most so many int64 that are not negative: sizes, strides, offsets."""
    return len(values) <= most and all(type(value) is int and 0 <= value < 2**63 for value in values)  # bool is an int


def file_dtype_name(dtype: torch.dtype) -> str:
    """The format's name of a dtype, for instance ``"BF16"``; ``""`` if it has none."""
    return _names("torch" in sys.modules).get(dtype, "")


class TensorEntry(NamedTuple):
    """One tensor of a shard: bytes ``[start, stop)`` of the file, row-major and little-endian.

    `shard` is the position of its shard in :attr:`.map.CheckpointMap.shards`.
    """

    name: str
    shard: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def part(self, first: int, count: int, **more: Any) -> TensorEntry:
        """`count` elements from number `first` on, as a flat tensor, with `more` fields replaced."""
        start = self.start + first * self.dtype.itemsize
        return self._replace(shape=(count,), start=start, stop=start + count * self.dtype.itemsize, **more)


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """The header of a shard, which one rank reads for all; `text` is unchecked, and equal for equal shards.

    For `tag` see :class:`..sources.base.SourceFile`.
    """

    size_bytes: int
    text: bytes
    tag: str = ""


@dataclass(frozen=True, slots=True)
class Shard(SourceFile):
    """A file whose header has been checked; `metadata` is from the header.

    `described_in` is the file that has the header, if it is another one.
    """

    metadata: Mapping[str, str]
    described_in: str = field(default="", kw_only=True)


class NotAMap(Exception):
    """A sound file, as far as was seen, whose tensors are not plain ranges of bytes; the message says why."""


# A minus sign before a zero where a value may stand; one in a string only costs the slower path.
_MINUS_ZERO = re.compile(rb"[\[:,\s]-0")

_HALF_PAIR = re.compile("[\ud800-\udfff]")

_short = reprlib.Repr()
_short.maxlevel = 2
_short.maxstring = _short.maxother = _short.maxlong = 200


def excerpt(value: Any) -> str:
    """``repr(value)``, cut to fit an error message whatever the value is."""
    return _short.repr(value)


def parse_object(text: bytes, where: str) -> dict[str, Any]:
    """Parse `text`, one JSON object in UTF-8, in time and memory linear in its length.

    Whole numbers have at most 4300 digits (the interpreter's own limit). `where` names the file in error messages.

    Raises:
        CheckpointError: it is not one JSON object that begins at the first byte; a key occurs twice in an object; a
            string is not Unicode text; it is nested deeper than the interpreter can go.
    """
    if not text.startswith(b"{"):
        raise CheckpointError(
            f"{where}: expected a JSON object in UTF-8, beginning with '{{'; found {excerpt(text[:16])}. "
            "Download or save the file again."
        )

    # Only an escape can make half a surrogate pair: UTF-8 has none.
    has_escapes = rb"\u" in text

    def checked(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        for string in chain.from_iterable(pairs) if has_escapes else ():
            if isinstance(string, str) and _HALF_PAIR.search(string):
                raise CheckpointError(f"{where}: {excerpt(string)} is not Unicode text: it has half a surrogate pair.")
        found = dict(pairs)
        if len(found) != len(pairs):
            (key, _), *_ = Counter(key for key, _ in pairs).most_common(1)
            raise CheckpointError(f"{where}: the key {excerpt(key)} occurs twice in one object.")
        return found

    try:
        parse_int = _integer if b"-0" in text and _MINUS_ZERO.search(text) else None
        return json.loads(text.decode("utf-8"), object_pairs_hook=checked, parse_int=parse_int)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:  # ValueError: not UTF-8, not JSON, or an integer without end
        raise CheckpointError(
            f"{where}: expected a JSON object in UTF-8: {error}. Download or save the file again."
        ) from error


def _integer(digits: str) -> int | float:
    return -0.0 if digits == "-0" else int(digits)
