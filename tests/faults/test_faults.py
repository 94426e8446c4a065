"""Faults: clear errors on every rank, and what is tried again.

- A fault is the same clear error on every rank, within seconds, and leaves the process able to load again.
- Faults that pass are tried again, a bounded number of times, and counted; others are not.
"""

import errno
import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

import hf_zero_stream
from hf_zero_stream.errors import CheckpointError, ReadError
from hf_zero_stream.sources.base import Retries, SourceFile
from hf_zero_stream.sources.local import LocalFiles
from tests.support.cluster import SOON_S, Outcome, run_ranks, run_ranks_expecting_errors
from tests.support.disk import disk, failing, replace_reads
from tests.support.messages import error_of
from tests.support.parity import ds_config
from tests.support.zoo import Checkpoint


def load(folder: Path, **kwargs: Any) -> Any:
    return hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(folder, ds_config=ds_config(), **kwargs)


def load_bad_then_good(bad: Path, good: Path) -> dict[str, Any]:
    """What a bad checkpoint raises, and whether a good one still loads with nothing left behind."""
    with hf_zero_stream.streaming():  # first contact opens two sockets, once
        pass
    dist.all_gather_object([None] * dist.get_world_size(), "")  # and ranks connect, once
    before = transformers.PreTrainedModel.from_pretrained
    handles = len(os.listdir("/proc/self/fd"))
    caught = error_of(lambda: load(bad))
    assert transformers.PreTrainedModel.from_pretrained == before
    assert len(os.listdir("/proc/self/fd")) <= handles + 1
    model = load(good)
    return {"caught": caught, "report": model.streaming_report.to_dict()}


@pytest.fixture
def bad_checkpoint(zoo_checkpoint: Checkpoint, tmp_path: Path) -> Path:
    return shutil.copytree(zoo_checkpoint("qwen3_moe"), tmp_path / "bad")


def first_shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


def rewrite_header(shard: Path, change: Callable[[dict[str, Any]], None]) -> None:
    data = shard.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def a_tensor(header: dict[str, Any]) -> dict[str, Any]:
    return next(value for name, value in header.items() if name != "__metadata__")


def remove(folder: Path) -> None:
    first_shard(folder).unlink()


def truncate(folder: Path) -> None:
    shard = first_shard(folder)
    os.truncate(shard, shard.stat().st_size - 100)


def truncate_header(folder: Path) -> None:
    os.truncate(first_shard(folder), 50)


def lie_about_offsets(folder: Path) -> None:
    def change(header: dict[str, Any]) -> None:
        field = a_tensor(header)
        field["data_offsets"] = [offset + 64 for offset in field["data_offsets"]]

    rewrite_header(first_shard(folder), change)


def unknown_dtype(folder: Path) -> None:
    rewrite_header(first_shard(folder), lambda header: a_tensor(header).update(dtype="F12"))


def wrong_size(folder: Path) -> None:
    rewrite_header(first_shard(folder), lambda header: a_tensor(header)["shape"].insert(0, 3))


def promised_tensor_missing(folder: Path) -> None:
    """One that the model wants; the shard has it under another name."""

    def rename(header: dict[str, Any]) -> None:
        name = next(name for name in header if name != "__metadata__")
        header["nowhere.weight"] = header.pop(name)

    rewrite_header(first_shard(folder), rename)


FAULTS: dict[Callable[[Path], None], tuple[str, str]] = {
    remove: ("ReadError", "No such file"),
    truncate: ("CheckpointError", "truncated"),
    truncate_header: ("CheckpointError", "truncated"),
    lie_about_offsets: ("CheckpointError", "data_offsets"),
    unknown_dtype: ("CheckpointError", "unknown dtype 'F12'"),
    wrong_size: ("CheckpointError", "need"),
    promised_tensor_missing: ("CheckpointError", "but no shard holds it"),
}


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("fault", list(FAULTS), ids=lambda fault: fault.__name__)
def test_bad_checkpoint(
    cluster: None, zoo_checkpoint: Checkpoint, bad_checkpoint: Path, fault: Callable[[Path], None], world_size: int
) -> None:
    fault(bad_checkpoint)
    expected_type, expected_text = FAULTS[fault]
    for result in run_ranks(world_size, load_bad_then_good, bad_checkpoint, zoo_checkpoint("qwen3_moe"), timeout=90):
        kind, message = result["caught"]
        assert kind == expected_type
        assert expected_text in message
        assert first_shard(zoo_checkpoint("qwen3_moe")).name in message


def load_wrong_shape(folder: Path) -> Any:
    return load(folder, vocab_size=9)  # the checkpoint's embeddings are larger


@pytest.mark.parametrize("world_size", [1, 2])
def test_wrong_shape(cluster: None, zoo_checkpoint: Checkpoint, world_size: int) -> None:
    for outcome in run_ranks_expecting_errors(world_size, load_wrong_shape, zoo_checkpoint("qwen3_moe")):
        assert outcome.error_type == "RuntimeError", "as in plain loading"
        assert "ignore_mismatched_sizes" in str(outcome.error_message)
        assert outcome.seconds < SOON_S


def load_with_fault_on_one_rank(folder: Path, faulty_rank: int, fault: str) -> Any:
    """Load where one rank sees another disk than the others."""
    if torch.distributed.get_rank() == faulty_rank:
        real_open = os.open

        def failing_open(path: Any, *args: Any, **kwargs: Any) -> int:
            if str(path).endswith(".safetensors"):
                raise PermissionError(13, "Permission denied", str(path))
            return real_open(path, *args, **kwargs)

        if fault == "unreadable":
            os.open = failing_open
        else:
            replace_reads(failing(errno.EIO) if fault == "eio" else lambda *args: 0)
    return load(folder)


@pytest.mark.parametrize(
    ("fault", "text"),
    [("unreadable", "Permission denied"), ("eio", "Input/output error"), ("short", "the file ends here")],
)
@pytest.mark.parametrize("faulty_rank", [0, 2])
def test_fault_on_one_rank_is_raised_on_all(
    cluster: None, zoo_checkpoint: Checkpoint, faulty_rank: int, fault: str, text: str
) -> None:
    outcomes: list[Outcome] = run_ranks_expecting_errors(
        3, load_with_fault_on_one_rank, zoo_checkpoint("qwen3_moe"), faulty_rank, fault, timeout=60
    )
    for rank, outcome in enumerate(outcomes):
        message = str(outcome.error_message)
        assert outcome.error_type == "ReadError"
        assert text in message and ".safetensors" in message
        assert outcome.seconds < SOON_S
        if rank != faulty_rank:
            assert f"rank {faulty_rank}" in message


def test_foreign_error_on_one_rank_is_raised_on_all(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """transformers' own error on one rank, before anything is read, must not leave the others waiting."""
    outcomes = run_ranks_expecting_errors(
        2, load_missing_weights_on_one_rank, zoo_checkpoint("qwen3_moe"), tmp_path, timeout=60
    )
    assert outcomes[0].error_type == "PeerError"
    assert "rank 1" in str(outcomes[0].error_message)
    assert outcomes[1].error_type == "OSError"
    assert all(outcome.seconds < SOON_S for outcome in outcomes)


def load_missing_weights_on_one_rank(folder: Path, scratch: Path) -> Any:
    if torch.distributed.get_rank() == 1:
        shutil.copy(folder / "config.json", scratch)
        folder = scratch
    return load(folder)


def refused(section: dict[str, Any], folder: Path) -> Any:
    config = {**ds_config(), **section}
    return hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(folder, ds_config=config)


@pytest.mark.parametrize(
    ("section", "kind", "text"),
    [
        ({"hf_zero_stream": {"stagin_bytes": 1}}, "ConfigError", "staging_bytes"),
        (
            {"zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": True}},
            "UnsupportedError",
            "zero_quantized_nontrainable_weights",
        ),
        (
            {"weight_quantization": {"quantized_initialization": {"num_bits": 4}}},
            "UnsupportedError",
            "quantized_initialization",
        ),
    ],
)
def test_refused_settings(
    cluster: None, zoo_checkpoint: Checkpoint, section: dict[str, Any], kind: str, text: str
) -> None:
    for outcome in run_ranks_expecting_errors(2, refused, section, zoo_checkpoint("qwen3_moe")):
        assert (outcome.error_type, outcome.seconds < SOON_S) == (kind, True)
        assert text in str(outcome.error_message)


SIZE = 20_000


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between attempts, which are not made."""
    made: list[float] = []
    monkeypatch.setattr(time, "sleep", made.append)
    return made


@pytest.fixture
def shard(tmp_path: Path) -> SourceFile:
    path = tmp_path / "x.safetensors"
    path.write_bytes(bytes(number % 251 for number in range(SIZE)))
    return SourceFile(str(path), SIZE)


def read(files: LocalFiles, start: int = 3, length: int = 100) -> bytes:
    buffer = bytearray(length)
    files.read_into(0, start, [memoryview(buffer)])
    return bytes(buffer)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN])
def test_a_fault_that_passes(
    shard: SourceFile, pauses: list[float], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "open", partial(failing(number, 1), os.open))
    before = len(os.listdir("/proc/self/fd"))
    retries = Retries(4)
    with closing(LocalFiles([shard], retries=retries)) as files, disk(failing(number, 3)):
        assert read(files) == Path(shard.path).read_bytes()[3:103]
        assert retries.count == 4
        assert pauses == [0.1, 0.1, 0.2, 0.4], "each call begins anew, and waits twice as long each time"
        files.check_unchanged()
    assert len(os.listdir("/proc/self/fd")) == before, "stale handles are closed too"


def test_the_number_is_bounded(shard: SourceFile, pauses: list[float]) -> None:
    for limit in (2, 0):
        with closing(LocalFiles([shard], retries=Retries(limit))) as files, disk(failing(errno.EIO)):
            with pytest.raises(ReadError, match="Input/output error"):
                read(files)
        assert len(pauses) == limit
        pauses.clear()


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.EINVAL])
def test_a_fault_that_stays(
    shard: SourceFile, pauses: list[float], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "open", partial(failing(number, 1), os.open))
    with closing(LocalFiles([shard], retries=Retries(4))) as files, pytest.raises(ReadError, match="cannot open"):
        read(files)
    assert pauses == []


def test_a_short_file_is_not_read_again(shard: SourceFile, pauses: list[float]) -> None:
    with (
        closing(LocalFiles([shard], retries=Retries(4))) as files,
        pytest.raises(ReadError, match="the file ends here"),
    ):
        read(files, SIZE - 5)
    assert pauses == []


# --------------------------------------------------------------------------------------------------- changed files


def replace(path: Path) -> None:
    shutil.copy2(path, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def overwrite(path: Path) -> None:
    path.write_bytes(path.read_bytes())
    os.utime(path, ns=(0, 1))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (replace, "replaced"),
        (overwrite, "written to"),
        (append, "written to"),
        (lambda path: os.truncate(path, SIZE - 1), "truncated"),
        (Path.unlink, "removed"),
    ],
    ids=["replaced", "overwritten", "appended", "truncated", "removed"],
)
def test_a_file_that_changes_while_it_is_read(shard: SourceFile, change: Callable[[Path], None], what: str) -> None:
    with closing(LocalFiles([shard])) as files:
        read(files)
        files.check_unchanged()
        change(Path(shard.path))
        with pytest.raises(CheckpointError, match=f"was {what} while it was being loaded"):
            files.check_unchanged()


def test_a_file_that_changed_since_its_header_was_read(shard: SourceFile) -> None:
    with closing(LocalFiles()) as files:
        with files.open_file(shard.path) as file:
            assert (file.size_bytes, file.read(3, 2)) == (SIZE, bytes([3, 4]))
        replace(Path(shard.path))
        files.add([shard])
        with pytest.raises(CheckpointError, match="was replaced"):
            read(files)


def test_a_stale_handle_to_a_replaced_file(shard: SourceFile, pauses: list[float]) -> None:
    with closing(LocalFiles([shard], retries=Retries(4))) as files:
        read(files)
        replace(Path(shard.path))
        with disk(failing(errno.ESTALE, 1)), pytest.raises(CheckpointError, match="was replaced"):
            read(files)


# --------------------------------------------------------------------------------------------------------- loads


def load_through_faults(folder: Path) -> dict[str, Any]:
    """Rank 1 has a file system with hiccups; rank 0's first open, of a header, fails once."""
    real_open = os.open
    if dist.get_rank() == 1:
        replace_reads(failing(errno.EIO, 2))
    else:
        failing_open = partial(failing(errno.ESTALE, 3), real_open)  # reading ahead leaves what fails to the reads
        os.open = lambda path, *args, **kwargs: (failing_open if str(path).endswith(".safetensors") else real_open)(
            path, *args, **kwargs
        )
    config = ds_config()
    model = hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(folder, ds_config=config)
    os.open = real_open
    report = model.streaming_report
    return {"retries": [rank.retries for rank in report.ranks], "table": report.table()}


def test_loads_count_what_they_tried_again(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    for result in run_ranks(2, load_through_faults, zoo_checkpoint("qwen3_moe")):
        assert result["retries"][1] == 2 and result["retries"][0] >= 1
        assert "Tried again after passing faults of the file system" in result["table"]
        assert "rank 1: 2" in " ".join(result["table"].split())  # lines are wrapped
