"""The index of a sharded checkpoint, and where its files may lie, when somebody else packed the folder."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.hub import get_checkpoint_shard_files

from fuzz.seeds import indexes
from fuzz.targets import read_index
from hf_zero_stream.checkpoint import index
from hf_zero_stream.checkpoint.formats import read_map
from hf_zero_stream.checkpoint.index import check_files, parse_index, read_index_file
from hf_zero_stream.errors import CheckpointError, ReadError
from tests.sampling import examples as examples_of


INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00002.safetensors"

examples = settings(derandomize=True, database=None, deadline=None, max_examples=examples_of(400))


def written(folder: Path, content: Any) -> Path:
    path = folder / INDEX
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


# ------------------------------------------------------------------------------------------------------ the file


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("list", "expected a JSON object"),
        ("not-utf-8", "UTF-8"),
        ("key-twice", "the key 'a' occurs twice"),
        ("no-metadata", "metadata: expected an object"),
        ("null-metadata", "metadata: expected an object"),
        ("no-dtype", "metadata: dtype"),
        ("no-names", "weight_map: expected a map"),
        ("list-of-names", "weight_map: expected a map"),
        ("number-as-name", "weight_map: tensor 't0': expected a file's name, found 1"),
        ("list-as-name", "weight_map: tensor 't0'"),
        ("parent", "'..'"),
        ("parent-inside", "'..'"),
        ("dot", "'.'"),
        ("absolute", "absolute path"),
        ("backslash", "backslash"),
        ("nul", "cannot be printed"),
        ("escape-of-a-terminal", "cannot be printed"),
        ("half-a-pair", "half a surrogate pair"),
        ("pickle", "does not end in .safetensors"),
    ],
)
def test_faulty_index(tmp_path: Path, name: str, text: str) -> None:
    path = written(tmp_path, indexes()[name])
    with pytest.raises(CheckpointError) as caught:
        read_index_file(path)
    assert text in str(caught.value) and str(path) in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", ["sound", "subfolder", "float"])
def test_sound_index(tmp_path: Path, name: str) -> None:
    path = written(tmp_path, indexes()[name])
    weight_map = read_index_file(path)["weight_map"]
    files, metadata = get_checkpoint_shard_files(str(tmp_path), str(path))
    assert files == [os.path.join(tmp_path, file) for file in sorted(set(weight_map.values()))]
    assert metadata["weight_map"] == weight_map


def test_index_of_a_pickled_checkpoint(tmp_path: Path) -> None:
    """Its files may have any ending, and must lie in the folder all the same."""
    path = tmp_path / "pytorch_model.bin.index.json"
    path.write_bytes(indexes()["pickle"])
    assert set(read_index_file(path)["weight_map"].values()) == {"pytorch_model.bin"}
    path.write_bytes(indexes()["parent"])
    with pytest.raises(CheckpointError, match="'..'"):
        read_index_file(path)


def test_index_that_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MAX_INDEX_BYTES", 100)
    with pytest.raises(CheckpointError, match="at most 100 bytes"):
        read_index_file(written(tmp_path, {"metadata": {}, "weight_map": {"a" * 100: SHARD}}))


def test_index_that_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ReadError, match=INDEX):
        read_index_file(tmp_path / INDEX)
    os.mkfifo(tmp_path / INDEX)
    with pytest.raises(CheckpointError, match="regular file"):
        read_index_file(tmp_path / INDEX)


def test_name_that_is_too_long() -> None:
    text = json.dumps({"metadata": {}, "weight_map": {"a": "x" * 1_000_000 + ".safetensors"}}).encode()
    with pytest.raises(CheckpointError, match="more than 1024 characters") as caught:
        parse_index(INDEX, text)
    assert len(str(caught.value)) < 1000


parts = st.sampled_from(["..", ".", "", "a", "model", "/", "\\", "\n", "\0", "\ud800", "é", "~", "C:", "a b"])
file_names = st.builds(
    lambda names, end: "/".join(names) + end,
    st.lists(parts, max_size=4),
    st.sampled_from([".safetensors", "/x.safetensors", "", ".bin", "/"]),
)
values = st.recursive(
    file_names | st.none() | st.booleans() | st.integers() | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
maps = st.dictionaries(st.text(max_size=5), st.just(SHARD) | file_names, max_size=4) | values
metadatas = st.just({}) | st.dictionaries(st.sampled_from(["dtype", "total_size", "x"]), values, max_size=2) | values


@given(st.fixed_dictionaries({"weight_map": maps, "metadata": metadatas}), st.booleans())
@settings(examples, max_examples=examples_of(1000))
def test_generated_indexes(fields: Any, ascii_only: bool) -> None:
    read_index(json.dumps(fields, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass"))


@given(st.lists(file_names.filter(lambda name: "\0" not in name), min_size=1, max_size=3))
@examples
def test_what_is_accepted_stays_in_the_folder(tmp_path_factory: pytest.TempPathFactory, names: list[str]) -> None:
    """As transformers itself resolves it."""
    folder = tmp_path_factory.getbasetemp()
    weight_map = {str(number): name for number, name in enumerate(names)}
    path = written(folder, {"metadata": {}, "weight_map": weight_map})
    try:
        read_index_file(path)
    except CheckpointError:
        return
    for file in get_checkpoint_shard_files(str(folder), str(path))[0]:
        assert Path(os.path.normpath(file)).is_relative_to(folder) and Path(os.path.normpath(file)) != folder


# --------------------------------------------------------------------------------------------------------- links


@pytest.mark.parametrize("kind", ["absolute", "relative", "of a folder", "of a link"])
def test_links_to_regular_files_are_followed(tmp_path: Path, kind: str) -> None:
    folder, other = tmp_path / "checkpoint", tmp_path / "elsewhere"
    folder.mkdir()
    other.mkdir()
    (other / SHARD).write_bytes(b"")
    file = folder / SHARD
    if kind == "of a folder":
        (folder / "part").symlink_to(other)
        file = folder / "part" / SHARD
    elif kind == "of a link":
        (folder / "link").symlink_to(other / SHARD)
        file.symlink_to("link")
    else:
        file.symlink_to(other / SHARD if kind == "absolute" else os.path.relpath(other / SHARD, folder))
    check_files([str(file), str(folder / "not there")])


@pytest.mark.parametrize("kind", ["a folder", "a pipe", "a device", "a pipe behind a link"])
def test_links_to_anything_else_are_refused(tmp_path: Path, kind: str) -> None:
    target, file = tmp_path / "target", tmp_path / SHARD
    if kind == "a folder":
        target.mkdir()
    elif kind == "a device":
        target = Path(os.devnull)
    else:
        os.mkfifo(target)
    file.symlink_to(target)
    if "behind" in kind:
        (tmp_path / "more.safetensors").symlink_to(file)
        file = tmp_path / "more.safetensors"
    with pytest.raises(CheckpointError, match="regular file") as caught:
        check_files([str(file)])
    assert str(file) in str(caught.value) and f"to which it is a link: {target}" in str(caught.value)


def test_links_that_lead_nowhere_are_left_to_who_reads_them(tmp_path: Path) -> None:
    """The error is that of reading: no such file, or too many links."""
    (tmp_path / "nowhere.safetensors").symlink_to("nothing")
    (tmp_path / "circle.safetensors").symlink_to("circle.safetensors")
    for name, text in (("nowhere", "No such file"), ("circle", "Too many levels of symbolic links")):
        check_files([str(tmp_path / f"{name}.safetensors")])
        with pytest.raises(ReadError, match=text):
            read_map([tmp_path / f"{name}.safetensors"])
