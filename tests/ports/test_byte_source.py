"""The ports for sources and formats: a checkpoint in memory, or in a format of our own, is read like any other."""

import time
from collections.abc import Callable
from contextlib import closing

import pytest
import torch
from safetensors.torch import save

from hf_zero_stream import StreamingConfig
from hf_zero_stream.checkpoint.format import Shard, ShardHeader, TensorEntry
from hf_zero_stream.checkpoint.formats import Format
from hf_zero_stream.checkpoint.map import CheckpointMap
from hf_zero_stream.engine.load import Load
from hf_zero_stream.engine.opened import OpenCheckpoint
from hf_zero_stream.errors import CheckpointError, ReadError
from hf_zero_stream.loading.dry_load import _NoDestination
from hf_zero_stream.ranks.coordinator import Coordinator
from hf_zero_stream.sources.base import ByteSource, Hints, Retries
from tests.support.memory_files import Busy, MemoryFiles


PATHS = ["bucket/1.safetensors", "bucket/2.safetensors"]
TENSORS = {"a": torch.arange(300.0).view(20, 15), "b": torch.randn(50).bfloat16(), "c": torch.arange(7)}


@pytest.fixture
def source() -> MemoryFiles:
    contents = [save({name: TENSORS[name] for name in names}) for names in ("ab", "c")]
    return MemoryFiles(dict(zip(PATHS, contents, strict=True)), Retries(2))


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between attempts, which are not made."""
    made: list[float] = []
    monkeypatch.setattr(time, "sleep", made.append)
    return made


def open_checkpoint(source: ByteSource, **settings: int) -> tuple[OpenCheckpoint, dict[str, torch.Tensor]]:
    """The checkpoint, and a lazy tensor for each of its tensors."""
    checkpoint = OpenCheckpoint(StreamingConfig(**settings), Coordinator(0, 1, alone=True), lambda: source)
    index = checkpoint.map_from_headers(PATHS, checkpoint.read_headers(PATHS))
    checkpoint.add(index.shards)
    return checkpoint, {name: item[...] for name, item in index.slices(checkpoint.materialise).items()}


def test_a_checkpoint_in_memory(source: MemoryFiles) -> None:
    checkpoint, tensors = open_checkpoint(source)
    checkpoint.open([0, 1])
    with checkpoint.reading():
        for name, expected in TENSORS.items():
            assert torch.equal(tensors[name].materialise(), expected)
        assert torch.equal(tensors["a"].T[3:5].contiguous().materialise(), TENSORS["a"].T[3:5])
        source.check_unchanged()
    assert source.bytes_read > sum(tensor.nbytes for tensor in TENSORS.values())
    checkpoint.close()


def test_the_source_says_how_it_is_read(source: MemoryFiles) -> None:
    source._hints = Hints(100, is_remote=True, streams_per_host=64, streams_per_rank=48)
    checkpoint, tensors = open_checkpoint(source)
    assert (checkpoint.request_bytes, checkpoint.threads()) == (100, 48)
    tensors["a"].materialise()
    assert source.reads == 12, "1200 bytes"
    checkpoint, _ = open_checkpoint(source, staging_bytes=320, reader_threads=3)
    assert (checkpoint.request_bytes, checkpoint.threads()) == (40, 3), "settings come first"


def test_faults_that_pass_are_those_that_the_source_names(source: MemoryFiles, pauses: list[float]) -> None:
    source.failures = [Busy(), Busy()]
    checkpoint, tensors = open_checkpoint(source)
    assert (checkpoint.retries.count, len(pauses)) == (2, 2), "of headers"
    source.failures = [Busy(), Busy()]
    assert torch.equal(tensors["c"].materialise(), TENSORS["c"])
    assert len(pauses) == 4
    source.failures = [OSError(5, "Input/output error")]
    with pytest.raises(ReadError, match="2.safetensors: cannot open: .*Input/output error"):
        tensors["c"].materialise()
    assert len(pauses) == 4


def test_what_changed_since_its_header_was_read(source: MemoryFiles) -> None:
    checkpoint, tensors = open_checkpoint(source)
    source.contents[PATHS[1]] = save({"c": TENSORS["c"] + 1})
    with pytest.raises(CheckpointError, match="2.safetensors: was replaced"):
        checkpoint.open([0, 1])
    with pytest.raises(CheckpointError, match="2.safetensors: was replaced"):
        tensors["c"].materialise()


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda contents: contents.pop(PATHS[0]), "cannot read the safetensors header: no such file"),
        (lambda contents: contents.update({PATHS[0]: contents[PATHS[0]][:-1]}), "is truncated"),
        (lambda contents: contents.update({PATHS[0]: b"short"}), "at least 8 bytes"),
    ],
    ids=["missing", "truncated", "no header"],
)
def test_headers_are_checked_wherever_they_lie(
    source: MemoryFiles, spoil: Callable[[dict[str, bytes]], object], error: str
) -> None:
    spoil(source.contents)
    with pytest.raises((ReadError, CheckpointError), match=error):
        open_checkpoint(source)


class Raw:
    """A format without any header: each file is one tensor of bytes, named after the file."""

    def read_header(self, source: ByteSource, path: str) -> ShardHeader:
        with source.open_file(path) as file:
            return ShardHeader(file.size_bytes, b"")

    def parse_header(self, path: str, number: int, header: ShardHeader) -> CheckpointMap:
        size = header.size_bytes
        entry = TensorEntry(path, number, torch.uint8, (size,), 0, size)
        return CheckpointMap.of_entries(Shard(path, size, {}), [entry])


def test_another_format() -> None:
    """A load reads and parses by it, from another source, as does a load that goes on with the same checkpoint."""
    source: ByteSource = MemoryFiles({"x": b"abc", "y": b"defg"})
    raw: Format = Raw()
    config, alone = StreamingConfig(progress=False), Coordinator(0, 1, alone=True)
    checkpoint = OpenCheckpoint(config, alone, lambda: source, raw)
    for opened in (checkpoint, checkpoint.reopened(alone, torch.device("cpu"))):
        with closing(Load(config, {}, alone, _NoDestination(), opened)) as load:
            slices = load.open(["x", "y"], None)
            joined = torch.cat([slices["y"][...], slices["x"][1:]]).materialise()  # type: ignore[union-attr]
            assert bytes(joined.tolist()) == b"defgbc" and load.map_file("x").views["x"].sizes == (3,)
