"""transformers' loop over checkpoint keys: made fast, and able to work on lazy tensors.

transformers renames key by key. Here keys that differ only in their digits are matched once: a checkpoint of a hundred
thousand tensors has some dozens of such kinds. Results are those of transformers' functions.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from transformers import core_model_loading
from transformers.core_model_loading import WeightTransform

from ..checkpoint.lazy import LazyTensor
from .session import Original, Session, in_session


_GROUP_NAME = re.compile(r"\?P<\w+>")
_RANGE_OF_DIGITS = re.compile(r"\[[^\]]*\d")


class RenamingChain:
    """Finds which of transformers' ``WeightTransform`` objects match a key, by the key's *template*.

    A template is the key with one digit in place of all others, and so has the same length. A pattern that names no
    digit matches all keys of a template or none. Digits that some pattern names are not replaced; none are if one
    names a range of digits, or refers back to a group. The `transforms` are tried in their order.
    """

    def __init__(self, transforms: Sequence[Any]) -> None:
        self._transforms = transforms
        self._table = _template_table(transforms)
        self._steps: dict[tuple[int, bytes], tuple[int, _Renaming | None]] = {}
        """(where the search begins, template) -> the first transform that may rename such keys, and what it does."""

    def apply_all(self, key: str) -> str:
        """`key` renamed by each transform that matches, in turn."""
        for renamed, _ in self._renamings_of(key):
            key = renamed
        return key

    def apply_first(self, key: str) -> tuple[str, str | None]:
        """`key` renamed by the first transform that matches, and which of its source patterns did."""
        for key, pattern in self._renamings_of(key):
            if pattern is not None:  # some match and still leave the key alone, depending on the keys before it
                return key, pattern
        return key, None

    def _renamings_of(self, key: str) -> Iterator[tuple[str, str | None]]:
        """The key after each transform that matches, in turn, and which of the transform's source patterns did."""
        begin = 0
        while True:
            kind = begin, key.encode().translate(self._table)
            if kind not in self._steps:
                later = range(begin, len(self._transforms))
                matching = (number for number in later if _may_rename(self._transforms[number], key))
                self._steps[kind] = next(matching, len(self._transforms)), None
            position, known = self._steps[kind]
            if position == len(self._transforms):
                return
            if known is not None and key.find(key[known.start : known.stop]) == known.start:
                key, pattern = known.apply(key), known.pattern
            else:
                renamed, pattern = self._transforms[position].rename_source_key(key)
                self._steps[kind] = position, _learn(self._transforms[position], key, renamed, pattern) or known
                key = renamed
            yield key, pattern
            begin = position + 1


class _Renaming(NamedTuple):
    """The effect of a transform on all keys of a template: it replaces ``key[start:stop]``.

    transformers replaces the first occurrence of the text that matched. In another key of the template that may be an
    earlier one, so each key is searched.
    """

    start: int
    stop: int
    replacement: str
    pattern: str

    def apply(self, key: str) -> str:
        return key[: self.start] + self.replacement + key[self.stop :]


def _learn(transform: Any, key: str, renamed: str, pattern: str | None) -> _Renaming | None:
    """Learn how `transform`, which has `renamed` the key, renames such keys; None if that depends on the key."""
    if pattern is None or type(transform).rename_source_key is not WeightTransform.rename_source_key:
        return None
    prefix, _, match = transform._scoped_match(key)
    start, stop = (len(prefix or "") + end for end in match.span())
    learned = _Renaming(start, stop, transform.target_patterns[0], pattern)
    # A replacement with a backslash puts in a group of what matched.
    return learned if "\\" not in learned.replacement and learned.apply(key) == renamed else None


def _may_rename(transform: Any, key: str) -> bool:
    """Whether `transform` matches `key`; always true for one that is not transformers' own."""
    return type(transform).__module__ != core_model_loading.__name__ or transform._scoped_match(key) is not None


def _template_table(transforms: Sequence[Any]) -> bytes | None:
    """For ``bytes.translate``: maps the digits that no transform can tell apart to one of them."""
    named = ""
    for transform in transforms:
        pattern = _GROUP_NAME.sub("", transform.compiled_sources.pattern)
        if "(?P=" in pattern or re.search(r"\\[1-9]", pattern) or _RANGE_OF_DIGITS.search(pattern):
            return None
        named += pattern.replace(r"\d", "") + (transform.scope_prefix or "") + (transform.base_model_prefix or "")
    alike = "".join(digit for digit in string.digits if digit not in named).encode()
    return bytes.maketrans(alike, alike[:1] * len(alike))


@in_session
def apply_renamings(session: Session, original: Original, source_key: str, transforms: list[Any]) -> str:
    return _chain(session, transforms).apply_all(source_key)


@in_session
def apply_converters(session: Session, original: Original, source_key: str, transforms: list[Any]) -> Any:
    return _chain(session, transforms).apply_first(source_key)


def _chain(session: Session, transforms: list[Any]) -> RenamingChain:
    if id(transforms) not in session.chains:
        # The chain keeps the list alive, so no other list gets its id.
        session.chains[id(transforms)] = RenamingChain(transforms)
    return session.chains[id(transforms)]


@in_session
def dot_natural_key(session: Session, original: Original, key: str) -> Any:
    """Make the sort key part by part: there are far fewer different parts than keys."""
    return [_part_key(original, part) for part in key.split(".")]


@lru_cache(maxsize=65536)
def _part_key(original: Callable[[str], list[Any]], part: str) -> Any:
    (key,) = original(part)
    return key


@in_session
def get_device(session: Session, original: Original, device_map: Any, *args: Any, **kwargs: Any) -> Any:
    """All of a streamed model is on one device; to find that, transformers compiles a pattern for each parameter."""
    if device_map is None or list(device_map) != [""]:
        return original(device_map, *args, **kwargs)
    return device_map[""]


@in_session
def copy_converter(session: Session, original: Original, value: Any, *args: Any) -> Any:
    """transformers copies a converter for each checkpoint key, and throws away all copies but a target's first.

    So the same copy is returned until it has collected a tensor. For the 45,000 tensors of DeepSeek-V3, the copies
    would take more than half of the planning time.
    """
    if not isinstance(value, core_model_loading.WeightConverter):
        return original(value, *args)
    template, spare = session.spares.get(id(value), (value, None))
    if spare is None or spare.collected_tensors:
        spare = original(value, *args)
        session.spares[id(value)] = (template, spare)
    return spare


@in_session
def spawn_materialize(session: Session, original: Original, thread_pool: Any, *args: Any, **kwargs: Any) -> Any:
    """Use no thread: a lazy tensor is made in microseconds."""
    return original(None, *args, **kwargs)


@in_session
def no_bar(session: Session, original: Original, *args: Any, **kwargs: Any) -> Any:
    """Show no bar: this loop loads nothing, and our own bar counts bytes."""
    return args[0] if args else original(**kwargs)


@in_session
def convert(session: Session, original: Original, self: Any, layer_name: str, *args: Any, **kwargs: Any) -> Any:
    """Run a converter again on real tensors if one of its ops (``numpy()``) cannot work on lazy ones."""
    collected = {pattern: list(tensors) for pattern, tensors in self.collected_tensors.items()}
    try:
        return original(self, layer_name, *args, **kwargs)
    except core_model_loading.SkipParameters:
        for pattern, tensors in collected.items():
            # A converter collects functions that return tensors, or tensors.
            values = (tensor() if callable(tensor) else tensor for tensor in tensors)
            self.collected_tensors[pattern] = [it.materialise() if isinstance(it, LazyTensor) else it for it in values]
        kwargs["loading_info"].conversion_errors.pop(layer_name, None)
        return original(self, layer_name, *args, **kwargs)
