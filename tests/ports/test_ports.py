"""What every source of bytes and every format must do, asked of all of them, the examples among the tests included."""

import hashlib
import os
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from hf_zero_stream import StreamingConfig
from hf_zero_stream.checkpoint import formats
from hf_zero_stream.checkpoint.format import NotAMap, ShardHeader
from hf_zero_stream.checkpoint.formats import Format
from hf_zero_stream.checkpoint.nodes import entries_of
from hf_zero_stream.checkpoint.urls import checkpoints_at
from hf_zero_stream.engine.opened import OpenCheckpoint
from hf_zero_stream.errors import CheckpointError, HfZeroStreamError, ReadError
from hf_zero_stream.ranks.coordinator import Coordinator
from hf_zero_stream.registry import plugins
from hf_zero_stream.sources.base import ByteSource, Retries, SourceFile
from hf_zero_stream.sources.by_path import FilesByPath
from hf_zero_stream.sources.local import LocalFiles
from tests.ports.test_byte_source import Raw
from tests.support.cluster import run_ranks
from tests.support.http_files import http_files
from tests.support.memory_files import MemoryFiles


CONTENTS = {"a": bytes(range(251)) * 40, "b": b"four"}


# ------------------------------------------------------------------------------------------------------------ sources


@dataclass
class Opened:
    """A source of the files in :data:`CONTENTS`, what they are called there, and how one gets other contents."""

    source: ByteSource
    path: Callable[[str], str]
    write: Callable[[str, bytes], object]


@contextmanager
def in_folder(folder: Path, make: Callable[[], ByteSource]) -> Iterator[Opened]:
    def write(name: str, content: bytes) -> None:
        (folder / "new").write_bytes(content)
        os.replace(folder / "new", folder / name)

    for name, content in CONTENTS.items():
        write(name, content)
    with closing(make()) as source:
        yield Opened(source, lambda name: str(folder / name), write)


@contextmanager
def on_server(folder: Path, make: Callable[[], ByteSource]) -> Iterator[Opened]:
    with in_folder(folder, make) as opened, http_files(folder) as how:
        how.tag = lambda path: hashlib.sha256((folder / path.lstrip("/")).read_bytes()).hexdigest()
        yield Opened(opened.source, lambda name: f"{how.address}/{name}", opened.write)


@contextmanager
def in_memory(folder: Path) -> Iterator[Opened]:
    contents = dict(CONTENTS)
    yield Opened(MemoryFiles(contents), lambda name: name, contents.__setitem__)


def remote() -> ByteSource:
    from hf_zero_stream.plugins.remote.files import RemoteFiles

    return RemoteFiles(Retries())


def by_path() -> ByteSource:
    return FilesByPath(LocalFiles(), Retries(), lambda url: checkpoints_at(url).source)


SOURCES: dict[str, Callable[[Path], AbstractContextManager[Opened]]] = {
    "local": lambda folder: in_folder(folder, LocalFiles),
    "local, not cached": lambda folder: in_folder(folder, lambda: LocalFiles(cache_bytes=0)),
    "remote": lambda folder: on_server(folder, remote),
    "by path, local": lambda folder: in_folder(folder, by_path),
    "by path, remote": lambda folder: on_server(folder, by_path),
    "in memory": in_memory,
}


@pytest.fixture(
    params=[
        pytest.param(name, marks=[pytest.mark.plugin("remote")] if name.endswith("remote") else []) for name in SOURCES
    ]
)
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opened]:
    with SOURCES[request.param](tmp_path) as opened:
        yield opened


def add_all(opened: Opened) -> None:
    """Open each file as for its header, and add it."""
    for name, content in CONTENTS.items():
        with opened.source.open_file(opened.path(name)) as file:
            assert (file.size_bytes, file.read(2, 5)) == (len(content), content[2:7])
            assert file.read(len(content) - 1, 9) == content[-1:], "fewer where the file ends"
            opened.source.add([SourceFile(opened.path(name), file.size_bytes, tag=file.tag)])


def read_everywhere(source: ByteSource) -> None:
    """Read ranges by several threads, from files that are those of :data:`CONTENTS`, in this order."""
    faults: list[str] = []

    def read(start: int) -> None:
        parts = [memoryview(bytearray(length)) for length in (0, 1, 4000, 0, 17)]
        source.read_into(0, start, parts)
        if b"".join(parts) != CONTENTS["a"][start : start + 4018]:
            faults.append(f"from {start} on")

    before = source.bytes_read, source.reads
    threads = [threading.Thread(target=read, args=[start]) for start in (0, 1, 4096, 6022)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    last = bytearray(4)
    source.read_into(1, 0, [memoryview(last)])
    assert not faults and last == CONTENTS["b"]
    assert (source.bytes_read - before[0], source.reads - before[1]) == (4 * 4018 + 4, 5)


def test_a_source_reads(opened: Opened) -> None:
    source = opened.source
    add_all(opened)
    assert source.hints([*map(opened.path, CONTENTS)]).request_bytes > 0
    source.open([0, 1])
    read_everywhere(source)
    source.check_unchanged()
    source.finish()
    source.close()
    source.close()


def test_a_source_says_which_file_ends_too_early(opened: Opened) -> None:
    add_all(opened)
    with pytest.raises(ReadError, match=opened.path("b")):
        opened.source.read_into(1, 2, [memoryview(bytearray(3))])


def test_a_source_says_that_a_file_is_missing(opened: Opened) -> None:
    with pytest.raises(OSError) as caught, opened.source.open_file(opened.path("c")) as file:
        file.read(0, 1)
    assert not opened.source.is_transient(caught.value)
    assert not opened.source.is_transient(None) and not opened.source.is_transient(ValueError())


@pytest.mark.parametrize("content", [CONTENTS["b"][::-1], b"longer"], ids=["same size", "another size"])
def test_a_source_notices_that_a_file_is_another_one(opened: Opened, content: bytes) -> None:
    add_all(opened)
    opened.write("b", content)
    with pytest.raises(CheckpointError, match=opened.path("b")):
        opened.source.read_into(1, 0, [memoryview(bytearray(4))])


def read_through_rank_0(folder: Path) -> str:
    """On every rank, the name of the class of source that has read."""
    paths = [str(folder / name) for name in CONTENTS]
    config, coordinator = StreamingConfig(read_from="rank0"), Coordinator.of_default_group()
    with coordinator.watched(), closing(OpenCheckpoint(config, coordinator, format=Raw())) as checkpoint:
        found = checkpoint.map_from_headers(paths, [ShardHeader(len(content), b"") for content in CONTENTS.values()])
        checkpoint.add(found.shards)
        with checkpoint.reading():
            if coordinator.rank:  # what the reader reads for others counts there too
                read_everywhere(checkpoint.source)
        return type(checkpoint.source).__name__


@pytest.mark.plugin("relay")
def test_a_rank_reads_for_another(cluster: None, tmp_path: Path) -> None:
    for name, content in CONTENTS.items():
        (tmp_path / name).write_bytes(content)
    assert run_ranks(2, read_through_rank_0, tmp_path) == ["FilesByPath", "RelayedFiles"]


# ------------------------------------------------------------------------------------------------------------ formats

TENSORS = {
    "matrix": torch.arange(12.0).view(3, 4),
    "small": torch.arange(5).bfloat16(),
    "scalar": torch.tensor(7),
    "empty": torch.empty(0, 2),
}


def saved_by_safetensors(folder: Path) -> dict[str, torch.Tensor]:
    save_file(TENSORS, folder / "x.safetensors")
    return TENSORS


def saved_by_torch(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {**TENSORS, "transposed": TENSORS["matrix"].t()}
    torch.save(tensors, folder / "x.bin")
    return tensors


def saved_by_old_torch(folder: Path) -> dict[str, torch.Tensor]:
    torch.save(TENSORS, folder / "x.bin", _use_new_zipfile_serialization=False)
    return TENSORS


def saved_by_dcp(folder: Path) -> dict[str, torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(dict(TENSORS), checkpoint_id=folder, no_dist=True)
    return TENSORS


def saved_raw(folder: Path) -> dict[str, torch.Tensor]:
    (folder / "x.raw").write_bytes(b"abc")
    return {str(folder / "x.raw"): torch.tensor([*b"abc"], dtype=torch.uint8)}


FORMATS: dict[str, tuple[Format, str, Callable[[Path], dict[str, torch.Tensor]]]] = {
    "safetensors": (formats, "x.safetensors", saved_by_safetensors),
    "torch.save": (formats, "x.bin", saved_by_torch),
    "torch.save, before 1.6": (formats, "x.bin", saved_by_old_torch),
    "torch.distributed.checkpoint": (formats, ".metadata", saved_by_dcp),
    "raw": (Raw(), "x.raw", saved_raw),
}
NAMES = [pytest.param(name, marks=pytest.mark.plugin("pickled")) if "torch." in name else name for name in FORMATS]


def test_every_format_is_here() -> None:
    of_plugins = {row.name for plugin in plugins() for row in plugin.files}
    assert {formats.SAFETENSORS.name, *of_plugins} <= FORMATS.keys()


@pytest.mark.parametrize("name", NAMES)
def test_a_format_gives_a_map(tmp_path: Path, name: str) -> None:
    form, file, save = FORMATS[name]
    expected, path = save(tmp_path), str(tmp_path / file)
    header = form.read_header(LocalFiles(), path)
    assert header == form.read_header(LocalFiles(), path) == pickle.loads(pickle.dumps(header)), "what ranks share"
    third = form.parse_header(path, 3, header)
    assert third.views.keys() == expected.keys()
    for entry in entries_of(third.views.values()):
        shard = third.shards[entry.shard - 3]
        assert 0 <= entry.start <= entry.stop <= shard.size_bytes == os.path.getsize(shard.path)
        assert (shard.described_in or shard.path) == path
    config, alone = StreamingConfig(progress=False), Coordinator(0, 1, alone=True)
    with closing(OpenCheckpoint(config, alone, format=form)) as checkpoint:
        found = checkpoint.map_from_headers([path], checkpoint.read_headers([path]))
        checkpoint.add(found.shards)
        for key, piece in found.slices(checkpoint.materialise).items():
            value = piece[...].materialise()  # type: ignore[attr-defined]
            assert value.dtype == expected[key].dtype and torch.equal(value, expected[key])


@pytest.mark.parametrize("name", NAMES[:-1])
def test_a_format_refuses_what_is_cut(tmp_path: Path, name: str) -> None:
    """Every beginning of a file, and of a header; of no file at all, the source's error is the cause."""
    form, file, save = FORMATS[name]
    save(tmp_path)
    path = tmp_path / file
    header, content = form.read_header(LocalFiles(), str(path)), path.read_bytes()
    for length in range(0, len(header.text), 7):
        with pytest.raises(CheckpointError):
            form.parse_header(str(path), 0, ShardHeader(header.size_bytes, header.text[:length], header.tag))
    for length in range(0, len(content), 13):
        path.write_bytes(content[:length])
        with pytest.raises((HfZeroStreamError, NotAMap)):
            form.parse_header(str(path), 0, form.read_header(LocalFiles(), str(path)))
    path.unlink()
    with pytest.raises(ReadError) as caught:
        form.read_header(LocalFiles(), str(path))
    assert isinstance(caught.value.__cause__, FileNotFoundError)
