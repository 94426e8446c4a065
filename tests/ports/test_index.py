"""Safetensors headers: what is read from them, and every way in which they are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_zero_stream.checkpoint.format import dtypes
from hf_zero_stream.checkpoint.formats import read_map
from hf_zero_stream.errors import CheckpointError, ReadError


def write(path: Path, header: Any, data: bytes = b"\0" * 16) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(begin: int = 0, end: int = 16, dtype: str = "F32", shape: list[int] | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [4] if shape is None else shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("name", list(dtypes()))
def test_every_dtype_lies_where_the_library_writes_it(tmp_path: Path, name: str) -> None:
    dtype = dtypes()[name]
    tensor = torch.arange(6, dtype=torch.uint8).repeat_interleave(dtype.itemsize)
    if dtype == torch.bool:
        tensor = tensor % 2
    tensor = tensor.view(dtype).view(2, 3)
    save_file({"t": tensor, "other": torch.ones(1)}, tmp_path / "x.safetensors")
    index = read_map([tmp_path / "x.safetensors"])
    found = index.entries["t"]
    assert (found.dtype, found.shape) == (dtype, (2, 3))
    data = (tmp_path / "x.safetensors").read_bytes()[found.start : found.stop]
    assert data == tensor.view(torch.uint8).numpy().tobytes()
    assert load_file(tmp_path / "x.safetensors")["t"].dtype == dtype


@pytest.mark.parametrize(
    ("header", "text"),
    [
        (b"\xff\xfe", "UTF-8"),
        (b"[" * 100_000, "JSON"),
        (b"{", "JSON"),
        ([1], "expected a JSON object"),
        (b'{"a": {"dtype": "F32"}, "a": 1}', "occurs twice"),
        ({"__metadata__": {"a": 1}}, "__metadata__"),
        ({"a": {"dtype": "F32", "shape": [4]}}, "exactly the fields"),
        ({"a": entry(dtype="F12")}, "unknown dtype"),
        ({"a": entry(dtype=["F32"])}, "unknown dtype"),
        ({"a": entry(shape=[-4])}, "shape"),
        ({"a": entry(shape=[True, 4])}, "shape"),
        ({"a": entry(shape=[2**62, 4])}, "need"),
        ({"a": entry(shape=[5])}, "need 20"),
        ({"a": {**entry(), "data_offsets": [0]}}, "data_offsets"),
        ({"a": {**entry(), "data_offsets": [0, 16.0]}}, "data_offsets"),
        ({"a": entry(4, 20)}, "leaves a hole"),
        ({"a": entry(0, 8, shape=[2]), "b": entry(4, 16, shape=[3])}, "overlaps"),
        ({"a": entry(0, 32, shape=[8])}, "truncated"),
        ({"a": entry(0, 8, shape=[2])}, "belong to no tensor"),
        ({}, "belong to no tensor"),
    ],
)
def test_faulty_header(tmp_path: Path, header: Any, text: str) -> None:
    path = write(tmp_path / "x.safetensors", header)
    with pytest.raises(CheckpointError, match=text) as caught:
        read_map([path])
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("size", [0, 7])
def test_short_file(tmp_path: Path, size: int) -> None:
    (tmp_path / "x.safetensors").write_bytes(b"\0" * size)
    with pytest.raises(CheckpointError, match="at least 8 bytes"):
        read_map([tmp_path / "x.safetensors"])


@pytest.mark.parametrize(("length", "text"), [(2**63, "header length"), (1000, "truncated")])
def test_header_longer_than_the_file(tmp_path: Path, length: int, text: str) -> None:
    (tmp_path / "x.safetensors").write_bytes(length.to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match=text):
        read_map([tmp_path / "x.safetensors"])


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ReadError, match="nowhere.safetensors"):
        read_map([tmp_path / "nowhere.safetensors"])


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{name}.safetensors", {"a": entry()}) for name in "xy"]
    with pytest.raises(CheckpointError, match="in two shards"):
        read_map(paths)


def test_weight_map(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", {"a": entry()})
    index = read_map([path], {"a": "x.safetensors"})
    assert not index.notes and not index.absent
    index = read_map([path], {"a": "y.safetensors", "b": "x.safetensors"})
    assert "'a' is in another shard" in index.notes[0] and index.absent == {"b": "x.safetensors"}
    index.refuse_absent(["a"])
    with pytest.raises(CheckpointError, match="promises tensor 'b' in 'x.safetensors', but no shard holds it"):
        index.refuse_absent(["a", "b"])


@pytest.mark.parametrize("promised", ["a/x/m.safetensors", "x/m.safetensors"])
def test_names_are_relative_to_the_folder(tmp_path: Path, promised: str) -> None:
    """One shard's name is the end of the other's path; even the folder is called as one of the shards' is."""
    names = ["a/x/m.safetensors", "x/m.safetensors"]
    paths = []
    for name in names:
        path = tmp_path / "a" / name
        path.parent.mkdir(parents=True)
        paths.append(write(path, {"t": entry()}))
    weight_map = {"t": promised, **{f"in {name}": name for name in names}}
    for given in (paths, paths[::-1]):
        index = read_map(given, weight_map)
        assert index.shards[index.entries["t"].shard].path == str(tmp_path / "a" / promised)
        assert len(index.notes) == 1 and "in two shards" in index.notes[0]
