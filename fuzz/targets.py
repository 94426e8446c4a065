"""What is called with every input that the fuzzer makes: it returns, or raises an error that is a finding.

A target raises whatever our code raises, except the errors that it is to raise, and :class:`Disagreement` where our
reading is not the reference's. For headers that is the safetensors library, which reads the same bytes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from safetensors import SafetensorError, deserialize, safe_open

from hf_zero_stream.checkpoint.format import file_dtype_name
from hf_zero_stream.checkpoint.formats import read_map
from hf_zero_stream.checkpoint.index import parse_index
from hf_zero_stream.errors import CheckpointError


__all__ = [
    "STRICTER",
    "TARGETS",
    "Disagreement",
    "build_file",
    "build_index",
    "frame",
    "in_memory",
    "read_file",
    "read_index",
]

STRICTER = {
    "white space before the object": r"header: expected a JSON object in UTF-8, beginning with",
    "a key twice": r"occurs twice in one object",
    "other fields of a tensor, or a list of them": r"expected exactly the fields dtype, shape and data_offsets",
    "a dtype as an object": r"unknown dtype \{",
    "a dtype of less than a byte": r"packs several values into a byte",
    "a size of 2**63 or more, of an empty tensor": r"shape: expected a list of sizes >= 0, found \[.*(\d{19}|\.\.\.)",
    "sizes whose product overflows, of an empty tensor": r"shape: the sizes of .* overflow 64 bits",
    "more than 64 dimensions": r"shape: at most \d+ dimensions are allowed",
    "a name of more than 1024 characters": r"name: at most \d+ characters are allowed",
}
"""What the safetensors library accepts and we do not -> our error. docs/sources.md says why."""

_STRICTER = re.compile("|".join(f"(?:{pattern})" for pattern in STRICTER.values()), re.DOTALL)


class Disagreement(AssertionError):
    """Our reading is not the reference's."""


@contextmanager
def in_memory(content: bytes) -> Iterator[str]:
    """The path of a file with this content, which is on no disk."""
    handle = os.memfd_create("fuzz")
    try:
        with open(handle, "wb", closefd=False) as file:
            file.write(content)
        yield f"/proc/self/fd/{handle}"
    finally:
        os.close(handle)


# ------------------------------------------------------------------------------------------------------ headers


def read_file(content: bytes) -> str:
    """Read a safetensors file with both; "same", "both refuse" or "stricter".

    Raises:
        Disagreement: we accept what the library refuses or read it otherwise; or we refuse what it accepts for a
            reason that is not in :data:`STRICTER`.
    """
    with in_memory(content) as path:
        try:
            index, refusal = read_map([path]), ""
        except CheckpointError as error:
            index, refusal = None, str(error)
        try:
            theirs: dict[str, Any] | None = dict(deserialize(content))
        except SafetensorError:
            theirs = None
        if index is None:
            if theirs is None:
                return "both refuse"
            if not _STRICTER.search(refusal):
                raise Disagreement(f"the library reads it, we do not: {refusal}")
            return "stricter"
        if theirs is None:
            raise Disagreement("we read what the library refuses")
        ours = {
            name: {
                "dtype": file_dtype_name(entry.dtype),
                "shape": list(entry.shape),
                "data": content[entry.start : entry.stop],
            }
            for name, entry in index.entries.items()
        }
        if ours != theirs:
            raise Disagreement(f"we read {ours}, the library {theirs}")
        with safe_open(path, "np") as opened:  # from here on the library reads the file itself
            if (opened.metadata() or {}) != index.shards[0].metadata:
                raise Disagreement(f"we read {index.shards[0].metadata}, the library {opened.metadata()}")
        return "same"


def frame(text: bytes) -> bytes:
    """A safetensors file with the header ``text[2:]``, and as many bytes of data as its first two bytes say.

    Mutations of a whole file mostly break the length in front, which is the first thing to be checked.
    """
    count = int.from_bytes(text[:2], "little") % 4096
    header = text[2:]
    return len(header).to_bytes(8, "little") + header + bytes(position % 251 for position in range(count))


def build_file(choices: bytes) -> bytes:
    """A safetensors file whose every feature is chosen by one of `choices`; with all zeros a sound, empty one.

    Byte mutations seldom keep lengths, offsets and sizes in step; choices do, unless one says otherwise.
    """
    take = iter(choices)

    def choose(*options: Any) -> Any:
        return options[next(take, 0) % len(options)]

    text, offset = "", 0
    for number in range(choose(0, 1, 2, 3, 4)):
        name = choose(
            f"t{number}", "t0", "", "\\u00e9", "\\ud83d\\ude00", "\\ud800", "\\udc00x", "__metadata__", "a-0"
        )
        dtype, item_bytes = choose(("F32", 4), ("BF16", 2), ("U8", 1), ("F64", 8), ("F4", 1), ("C64", 8), ("f32", 4))
        shape = [choose(1, 2, 3, 0, 2**31, 2**62, 2**63, 2**64) for _ in range(choose(1, 0, 2, 3, 65))]
        count = 1
        for size in shape:
            count *= size
        stop = offset + min(count * item_bytes, 4096)
        begin, end = offset + choose(0, 0, 0, 1, -1, -offset), stop + choose(0, 0, 0, 1, -1, 2**64)
        offset = stop
        sizes = ",".join(
            choose("{}", "{}", "{}", "-{}", "{}.0", "{}e0", '"{}"', "0{}", "[{}]").format(s) for s in shape
        )
        offsets = choose(f"[{begin},{end}]", f"[{begin}]", f"[{end},{begin}]", "NaN", f"[-{begin},{end}]")
        fields = [
            f'"dtype":{choose(f"{chr(34)}{dtype}{chr(34)}", "null", "{}", "[]")}',
            f'"shape":{choose(f"[{sizes}]", "null", "{}", "true")}',
            f'"data_offsets":{offsets}',
        ]
        fields = choose(fields, fields[::-1], fields[1:], [*fields, fields[0]], [*fields, '"more":1'])
        value = "{" + choose(",", " ,\n", ",,").join(fields) + "}"
        text += choose(",", ",", " , ", "") * bool(text) + f'"{name}":{choose(value, value, value, "1", "null")}'
    metadata = choose("", '"format":"pt"', '"a":1', '"a":"1","a":"2"', '"a":null', '"\\ud800":"x"', '"a":"\x01"')
    if metadata:
        text += "," * bool(text) + f'"__metadata__":{choose("{" + metadata + "}", "null", "[]")}'
    text = choose("", "", " ", "\ufeff", "[") + "{" + text + "}" + choose("", "", "  ", "\n", "\0", "x")
    header = text.encode() + choose(b"", b"", b"\xff")
    length = len(header) + choose(0, 0, 0, 1, -1, 2**40)
    data = bytes(position % 251 for position in range(max(0, offset + choose(0, 0, 0, 1, -1))))
    return length.to_bytes(8, "little") + header + data


# -------------------------------------------------------------------------------------------------------- index

_FOLDER = "/checkpoint"


def read_index(text: bytes) -> str:
    """Check an index; "read" or "refused".

    Raises:
        Disagreement: transformers would read another map, could not use it, or would open a file elsewhere.
    """
    try:
        index = parse_index(f"{_FOLDER}/model.safetensors.index.json", text)
    except CheckpointError:
        return "refused"
    theirs = json.loads(text.decode("utf-8"))  # what transformers does with it
    if any(index[field] != theirs[field] for field in ("weight_map", "metadata")):
        raise Disagreement("transformers reads another index")
    for file in sorted(set(theirs["weight_map"].values())):
        path = os.path.join(_FOLDER, file)
        if os.path.normpath(path) != path or not path.startswith(f"{_FOLDER}/") or not path.endswith(".safetensors"):
            raise Disagreement(f"it leads to {path}")
        os.fsencode(path)
    return "read"


def build_index(lines: bytes) -> bytes:
    """An index whose shards' names are `lines`."""
    names = lines.decode("utf-8", "surrogateescape").split("\n")
    return json.dumps(
        {"metadata": {}, "weight_map": {str(number): name for number, name in enumerate(names)}}
    ).encode()


TARGETS: dict[str, Callable[[bytes], str]] = {
    "file": read_file,
    "header": lambda text: read_file(frame(text)),
    "built": lambda choices: read_file(build_file(choices)),
    "index": read_index,
    "names": lambda lines: read_index(build_index(lines)),
}
"""A name, of inputs in corpus.zip too -> what reads one input, and says in a word what became of it."""
