"""Safetensors headers that somebody else wrote: read as the safetensors library reads them, or refused as our error.

What is compared is in fuzz/targets.py: a :class:`fuzz.targets.Disagreement` or any error but a CheckpointError fails.
"""

import importlib
import json
import os
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz.corpus import inputs_of
from fuzz.seeds import files
from fuzz.targets import STRICTER, read_file
from hf_zero_stream.checkpoint.format import ShardHeader, dtypes
from hf_zero_stream.checkpoint.formats import map_from_headers, read_map
from hf_zero_stream.checkpoint.index import parse_index
from hf_zero_stream.errors import CheckpointError
from tests.sampling import examples as examples_of


# The same examples in every run.
examples = settings(derandomize=True, database=None, deadline=None, max_examples=examples_of(400))

Fields = dict[str, Any]


# ------------------------------------------------------------------------------------------------ generated files

names = st.text(max_size=8) | st.sampled_from(
    ["model.layers.0.mlp.experts.7.up_proj.weight", "\U0001f600", "-0", "a,-0"]
)
shapes = st.lists(st.integers(0, 3), max_size=4)


@st.composite
def headers(draw: st.DrawFn) -> tuple[Fields, int]:
    """A sound header in any order, and how many bytes of data it is for."""
    fields: Fields = {}
    stop = 0
    for name in draw(st.lists(names.filter(lambda name: name != "__metadata__"), unique=True, max_size=4)):
        dtype, shape, begin = draw(st.sampled_from(sorted(dtypes()))), draw(shapes), stop
        if 0 in shape:  # then the others may be large, as long as their product is no more than 64 bits
            shape = [extent and draw(st.sampled_from([extent, 2**14])) for extent in shape]
        size = dtypes()[dtype].itemsize
        for extent in shape:
            size *= extent
        stop += size
        fields[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, stop]}
    if draw(st.booleans()):
        fields["__metadata__"] = draw(st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=3))
    return {name: fields[name] for name in draw(st.permutations(sorted(fields)))}, stop


@st.composite
def texts(draw: st.DrawFn, fields: Any) -> bytes:
    """One of the ways to write `fields` as JSON."""
    ascii_only, indent = draw(st.booleans()), draw(st.sampled_from([None, 0, 1]))
    text = json.dumps(fields, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "surrogatepass")
    return text + b" " * draw(st.integers(0, 9))


def whole(text: bytes, data_bytes: int) -> bytes:
    return len(text).to_bytes(8, "little") + text + bytes(position % 251 for position in range(data_bytes))


@given(st.data())
@examples
def test_sound_files_are_read_as_the_library_reads_them(data: st.DataObject) -> None:
    fields, data_bytes = data.draw(headers())
    assert read_file(whole(data.draw(texts(fields)), data_bytes)) == "same"


odd_numbers = st.sampled_from([-1, 1, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**400])
odd_floats = st.sampled_from([0.0, -0.0, 1.0, 4.0, 1e300, float("nan"), float("inf")])
odd_text = st.text(max_size=3) | st.sampled_from([*dtypes(), "F4", "F6_E2M3", "\ud800", "\udfff\ud800", "x" * 1100])
scalars = odd_numbers | odd_floats | st.integers(-3, 9) | odd_text | st.booleans() | st.none()
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(odd_text, inner, max_size=3), max_leaves=6
)


def places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything in a JSON value."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in [(value, key), *places(value[key])]]


@given(st.data())
@settings(examples, max_examples=examples_of(1000))
def test_changed_headers(data: st.DataObject) -> None:
    """Values replaced, added, taken away or copied to elsewhere; keys renamed."""
    fields, data_bytes = data.draw(headers())
    for _ in range(data.draw(st.integers(1, 3))):
        found = places(fields)
        if not found:
            fields[data.draw(odd_text)] = data.draw(anything)
            continue
        container, key = data.draw(st.sampled_from(found))
        change = data.draw(st.sampled_from(["replace", "add", "rename", "remove", "copy"]))
        if change == "replace":
            container[key] = data.draw(anything)
        elif change == "add" and isinstance(container, dict):
            container[data.draw(odd_text)] = data.draw(anything)
        elif change == "add":
            container.insert(key, data.draw(anything))
        elif change == "rename" and isinstance(container, dict):
            container[data.draw(odd_text)] = container.pop(key)
        elif change == "remove":
            del container[key]
        else:
            other, other_key = data.draw(st.sampled_from(found))
            container[key] = json.loads(json.dumps(other[other_key]))
    data_bytes = max(0, data_bytes + data.draw(st.sampled_from([0, 0, 0, -1, 1])))
    read_file(whole(data.draw(texts(fields)), data_bytes))


odd_numerals = st.sampled_from(
    [b"-0", b"0.0", b"1e0", b"00", b"+1", b"NaN", b"-1", b"9" * 5000, b"18446744073709551615"]
)


@given(st.data())
@settings(examples, max_examples=examples_of(1000))
def test_changed_numerals_and_keys(data: st.DataObject) -> None:
    """What no JSON writer writes: numerals in another form, and keys that occur twice."""
    fields, data_bytes = data.draw(headers())
    text = data.draw(texts(fields))
    keys = re.findall(rb'"(?:[^"\\]|\\.)*":', text)
    for pattern, instead in (
        (rb"(?<=[\[, ])\d+", odd_numerals),
        (rb'"(?:[^"\\]|\\.)*":', st.sampled_from(keys or [b""])),
    ):
        found = list(re.finditer(pattern, text))
        if found and data.draw(st.booleans()):
            match = data.draw(st.sampled_from(found))
            text = text[: match.start()] + data.draw(instead) + text[match.end() :]
    read_file(whole(text, data_bytes))


@given(st.data())
@settings(examples, max_examples=examples_of(1000))
def test_changed_bytes(data: st.DataObject) -> None:
    fields, data_bytes = data.draw(headers())
    content = bytearray(whole(data.draw(texts(fields)), data_bytes))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(content)))
        taken = data.draw(st.integers(0, 4))
        content[position : position + taken] = data.draw(
            st.binary(max_size=4) | st.sampled_from([b"{", b"]", b"-0", b","])
        )
    read_file(bytes(content))


# ------------------------------------------------------------------------------------------------------ by hand

SOUND = {
    "sound",
    "no-tensors",
    "scalar",
    "empty-tensors",
    "empty-tensor-inside",
    "other-names",
    "white-space",
    "null-metadata",
}
STRICTER_SEEDS = {
    "space-before",
    "key-twice-in-metadata",
    "tensor-twice",
    "field-more",
    "tensor-as-list",
    "dtype-as-object",
    "dtype-of-half-a-byte",
    "more-than-int64",
    "overflow-after-a-zero",
    "many-dimensions",
    "long-name",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(files()))
def test_what_is_read_and_what_is_not(name: str) -> None:
    expected = "same" if name in SOUND else "stricter" if name in STRICTER_SEEDS else "both refuse"
    assert read_file(files()[name]) == expected


def test_every_stricter_rule_is_in_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "sources.md").read_text()
    assert [rule for rule in STRICTER if f"| {rule} |" not in text] == []


AS_THE_LIBRARY, AS_TORCH = {"same", "stricter", "both refuse"}, {"same", "no map", "refused"}
OUTCOMES: dict[str, dict[str, set[str]]] = {
    "targets.TARGETS": {
        **dict.fromkeys(("file", "header", "built"), AS_THE_LIBRARY),
        **dict.fromkeys(("index", "names"), {"read", "refused"}),
    },
    "pickled.OF_PICKLED": {
        **dict.fromkeys(("torch", "pickle"), AS_TORCH),
        "zero": {"read", "refused", "unsupported"},
        "distcp": {"same", "refused"},
    },
    "server.OF_REMOTE": dict.fromkeys(("server", "store"), {"same", "refused"}),
}
"""Those of the inputs of each target, by the module and the name of a table of fuzz/."""
NEEDS = {"pickled.OF_PICKLED": ("pickled",), "server.OF_REMOTE": ("remote",)}


@pytest.mark.parametrize("table", [pytest.param(t, marks=pytest.mark.plugin(*NEEDS.get(t, ()))) for t in OUTCOMES])
def test_corpus(table: str) -> None:
    """What fuzzing found worth keeping, through the function that it called."""
    module, _, name = table.partition(".")
    targets = getattr(importlib.import_module(f"fuzz.{module}"), name)
    assert targets.keys() == OUTCOMES[table].keys()
    for target, expected in OUTCOMES[table].items():
        inputs = inputs_of(target).values()
        assert len(inputs) > 20
        assert {*map(targets[target], inputs)} - {"damaged"} == expected, target
        assert max(map(len, inputs)) <= 4096


# ------------------------------------------------------------------------------------------------- what it costs

LENGTH = 400_000
TENSOR = '{"dtype":"F32","shape":[4],"data_offsets":[0,16]}'


def repeated(before: str, unit: str, after: str) -> bytes:
    return (before + unit * (LENGTH // len(unit)) + after).encode()


COSTLY = {
    "lists": repeated('{"a":[', "[],", "[]]}"),
    "objects": repeated('{"a":[', "{},", "{}]}"),
    "nested lists": repeated('{"a":', "[", ""),
    "nested objects": repeated("", '{"a":', "1"),
    "nested objects that end": b'{"a":' * 900 + b"1" + b"}" * 900,
    "dimensions": repeated('{"a":{"dtype":"F32","data_offsets":[0,16],"shape":[', "1,", "4]}}"),
    "large dimensions": repeated(
        '{"a":{"dtype":"F32","data_offsets":[0,16],"shape":[', "9223372036854775807,", "4]}}"
    ),
    "an integer": repeated('{"a":{"dtype":"F32","data_offsets":[0,16],"shape":[', "9", "]}}"),
    "integers": repeated('{"a":{"dtype":"F32","data_offsets":[0,16],"shape":[', "9" * 4000 + ",", "4]}}"),
    "a fraction": repeated('{"a":{"dtype":"F32","data_offsets":[0,16],"shape":[1.', "9", "]}}"),
    "a name": repeated('{"', "\u00e9", f'":{TENSOR}}}'),
    "a name with a wide character": repeated('{"\U0001f600', "a", f'":{TENSOR}}}'),
    "an escaped name": repeated('{"', "\\u0041", f'":{TENSOR}}}'),
    "a dtype": repeated('{"a":{"dtype":"', "x", '","shape":[4],"data_offsets":[0,16]}}'),
    "metadata": repeated('{"__metadata__":{"x":"', "y", f'"}},"a":{TENSOR}}}'),
    "keys": ("{" + ",".join(f'"{number}":0' for number in range(LENGTH // 9)) + "}").encode(),
    "white space": repeated('{"-0":1', " ", "x"),
}


@pytest.mark.parametrize("text", COSTLY.values(), ids=COSTLY)
@pytest.mark.parametrize("kind", ["header", "index"])
def test_cost_is_bounded_by_the_length(text: bytes, kind: str) -> None:
    """At most 30 bytes of memory for each byte of text, and an error that can be read."""

    def read() -> None:
        if kind == "header":
            map_from_headers(["x"], [ShardHeader(8 + len(text) + 16, text)])
        else:
            parse_index("model.safetensors.index.json", text)

    tracemalloc.start()
    try:
        read()
    except CheckpointError as error:
        assert len(str(error)) < 2000
    else:
        assert kind == "header" and b"__metadata__" in text
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 30 * len(text) + 100_000


# -------------------------------------------------------------------------------------------------- odd files


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    """Nobody writes into it: an ordinary open would wait for ever."""
    os.mkfifo(tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="regular file"):
        read_map([tmp_path / "x.safetensors"])
    with pytest.raises(CheckpointError, match="regular file"):
        read_map(["/dev/zero"])


def test_a_file_that_is_cut_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(files()["sound"])
    size = os.stat(path)
    real_stat = os.fstat

    def stat_then_cut(handle: int) -> os.stat_result:
        found = real_stat(handle)
        if found.st_ino == size.st_ino:
            os.truncate(path, 40)
        return found

    monkeypatch.setattr(os, "fstat", stat_then_cut)
    with pytest.raises(CheckpointError, match="was cut while"):
        read_map([path])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda fields: fields.update({"x" * 1_000_000: fields.pop("a")}), "name: at most 1024"),
        (lambda fields: fields["a"].update(dtype="F" * 1_000_000), "unknown dtype"),
        (lambda fields: fields["a"].update(shape=["\x1b[2J" * 1_000_000]), "shape"),
        (lambda fields: fields["a"].update(data_offsets=[[]] * 1_000_000), "data_offsets"),
    ],
    ids=["name", "dtype", "shape", "offsets"],
)
def test_errors_quote_little_and_nothing_that_a_terminal_obeys(change: Callable[[Fields], Any], text: str) -> None:
    fields: Fields = {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}
    change(fields)
    header = json.dumps(fields).encode()
    with pytest.raises(CheckpointError, match=text) as caught:
        map_from_headers(["x"], [ShardHeader(8 + len(header) + 16, header)])
    assert len(str(caught.value)) < 1000 and str(caught.value).isprintable()
