"""Python values as JSON has them, and back."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

from ..errors import UnsupportedError
from ..settings.values import dtype_name, dtype_named


_PAIRS, _TUPLE, _ARRAY = "(key, value)", "(tuple)", "(array)"  # JSON has only strings as keys, and no tuples
_MOST_BYTES = 1 << 20
"""A larger tensor belongs into a file of its own, and not into text that one rank writes for all."""


def plain(value: Any, what: str, *, exactly: bool = False, with_tensors: bool = False) -> Any:
    """`value` as JSON has it: numbers, strings, lists and dicts; raises an UnsupportedError for anything else.

    Tuples become lists, and tensors of one element numbers; not so if :func:`restored` is to give the value `exactly`.
    This can be done `with_tensors`, of at most a megabyte, dtypes, arrays and paths too.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not exactly:
        return value.item()
    if exactly and isinstance(value, (np.number, np.bool_)):  # float64 is a float, too
        return {_ARRAY: _bytes_of_array(value, what)}
    if isinstance(value, (bool, int, float, type(None))) or (isinstance(value, str) and _is_text(value)):
        return value
    item_of = partial(plain, what=what, exactly=exactly, with_tensors=with_tensors)
    if isinstance(value, (list, tuple)):
        items = [*map(item_of, value)]
        return {_TUPLE: items} if exactly and isinstance(value, tuple) else items
    if isinstance(value, Mapping) and all(isinstance(key, (str, int, float)) for key in value):
        pairs = [[plain(key, what), item_of(item)] for key, item in value.items()]
        is_object = all(isinstance(key, str) for key in value) and not _is_marked(value)
        return dict(pairs) if is_object else {_PAIRS: pairs}
    for mark, (kind, written, _) in _KINDS.items() if with_tensors else ():
        if isinstance(value, kind):
            return {mark: written(value, what)}
    raise _refusal(value, what)


def restored(value: Any) -> Any:
    """Undo :func:`plain`; raises a TypeError, ValueError or RuntimeError if that has not written `value`."""
    if isinstance(value, list):
        return [restored(item) for item in value]
    if isinstance(value, dict):
        if not _is_marked(value):
            return {key: restored(item) for key, item in value.items()}
        [(mark, content)] = value.items()
        if mark == _PAIRS:
            return {key: restored(item) for key, item in content}
        return tuple(map(restored, content)) if mark == _TUPLE else _KINDS[mark][2](content)
    return value


def is_same(one: Any, other: Any) -> bool:
    """Whether two values are the same, with the types of all that is in them; NaN is the same as NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape and one.device == other.device
        return alike and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    if isinstance(one, (np.ndarray, np.generic)):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, Mapping):
        return len(one) == len(other) and all(map(is_same, one.items(), other.items()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_same, one, other))
    return repr(one) == repr(other) if isinstance(one, float) else bool(one == other)


def _is_marked(value: Mapping[Any, Any]) -> bool:
    """Whether a dict stands for something else than itself."""
    return len(value) == 1 and next(iter(value)) in (_PAIRS, _TUPLE, *_KINDS)


def _is_text(value: str) -> bool:
    """Whether `value` is Unicode, and not half a surrogate pair."""
    return value.isascii() or value.encode("utf-8", "ignore").decode() == value


def _refusal(value: Any, what: str) -> UnsupportedError:
    found = type(value).__name__
    if isinstance(value, Mapping):
        found += f" by {', '.join(sorted({type(key).__name__ for key in value}))}"
    return UnsupportedError(
        f"{what}: expected numbers, strings, lists and dicts, which can be written as JSON; got {found}. Nothing that "
        "must be pickled is saved. Leave it out, and make it anew when you load."
    )


def _bytes_of(tensor: torch.Tensor, what: str) -> list[Any]:
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise _refusal(tensor, what)
    if tensor.nbytes > _MOST_BYTES:
        raise UnsupportedError(
            f"{what}: expected tensors of at most {_MOST_BYTES} bytes; got one of {tensor.nbytes}. Register it as a "
            "buffer of the model, or save it in a file of your own."
        )
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [dtype_name(tensor.dtype), list(tensor.shape), b64encode(data).decode()]


def _tensor_of(content: Any) -> torch.Tensor:
    name, shape, text = content
    dtype, data = dtype_named(name), b64decode(text, validate=True)
    if not all(type(size) is int and size >= 0 for size in shape) or prod(shape) * dtype.itemsize != len(data):
        raise ValueError(f"{len(data)} bytes are no {name} of the shape {shape}")
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)


def _bytes_of_array(array: Any, what: str) -> list[Any]:
    try:
        tensor = torch.from_numpy(np.array(array))
    except TypeError:
        raise _refusal(array, what) from None  # of strings, of objects
    return _bytes_of(tensor, what)


_Kind = tuple[type | tuple[type, ...], Callable[[Any, str], Any], Callable[[Any], Any]]

_KINDS: Mapping[str, _Kind] = {
    "(dtype, shape, base64)": (torch.Tensor, _bytes_of, _tensor_of),
    _ARRAY: ((np.ndarray, np.generic), _bytes_of_array, lambda content: _tensor_of(content).numpy()[()]),
    "(dtype)": (torch.dtype, lambda dtype, what: dtype_name(dtype), dtype_named),
    "(path)": (PurePath, lambda path, what: plain(str(path), what), Path),
}
"""By what marks a value in JSON: its classes, what is written, and what is made of that."""
