"""Untrusted JSON, parsed so strictly that the result means one thing only.

Python's parser is laxer than the format: it lets the last of two equal keys win, takes ``-0`` for an integer, and
reads half a surrogate pair as a character. The safetensors library (serde_json) does not do the last two, and we
accept nothing that it refuses.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections import Counter
from itertools import chain
from typing import Any

from ..errors import CheckpointError


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
