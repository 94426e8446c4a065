"""What a server may do wrong: what passes is tried again and counted, all else is an error that says what to check."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from hf_zero_stream import StreamingConfig, streaming
from hf_zero_stream.checkpoint.formats import map_from_headers
from hf_zero_stream.engine.opened import OpenCheckpoint
from hf_zero_stream.errors import CheckpointError, HfZeroStreamError, ReadError
from hf_zero_stream.loading.dry_load import load_of_layouts
from hf_zero_stream.plugins.remote import files
from hf_zero_stream.ranks.coordinator import Coordinator
from hf_zero_stream.sources.base import RETRIES
from tests.support.cluster import SOON_S, run_ranks_expecting_errors
from tests.support.http_files import Behaviour, http_files
from tests.support.parity import ds_config
from tests.support.plugins import without_plugin
from tests.support.zoo import Checkpoint


TENSORS = {"a": torch.arange(60_000.0).view(200, 300), "b": torch.randn(7).bfloat16()}
FIRST = 1
"""Request number 0 reads the header, the next ones the values."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Behaviour]:
    folder = tmp_path_factory.mktemp("served")
    save_file(TENSORS, folder / "x.safetensors")
    save_file({"b2": torch.zeros(3)}, folder / "y.safetensors")
    with http_files(folder) as how:
        yield how


@pytest.fixture(autouse=True)
def well_behaved(server: Behaviour, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = Behaviour()
    server.fault, server.tag, server.requests = fresh.fault, fresh.tag, []
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(files, "STALL_S", 1)


def read_all(server: Behaviour, **settings: Any) -> tuple[OpenCheckpoint, dict[str, torch.Tensor]]:
    """Read the header, then the values, from the file on the server."""
    checkpoint = OpenCheckpoint(StreamingConfig(**settings), Coordinator(0, 1, alone=True))
    paths = [f"{server.address}/x.safetensors"]
    index = map_from_headers(paths, checkpoint.read_headers(paths))
    checkpoint.add(index.shards)
    slices = index.slices(checkpoint.materialise)
    with checkpoint.reading():
        found = {name: slices[name][...].materialise() for name in slices}
    checkpoint.close()
    return checkpoint, found


def at(numbers: range, fault: str) -> Callable[[str, int], str]:
    return lambda path, number: fault if number in numbers else ""


@pytest.mark.parametrize("fault", ["503", "500", "429", "408", "short", "reset", "stall", "garbage"])
def test_what_passes_is_tried_again(server: Behaviour, fault: str) -> None:
    server.fault = at(range(0, 5, 2), fault)
    checkpoint, found = read_all(server)
    assert all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)
    assert checkpoint.retries.count == 3


@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [
        ("503", ReadError, "cannot read bytes .* 503 Service Unavailable"),
        ("429", ReadError, "429 Too Many Requests"),
        ("short", ReadError, "body error|ended at byte"),
        ("404", ReadError, "no such object .404.. Check the bucket or host, and the prefix"),
        ("403", ReadError, "access is denied .403.. Check whether the server wants credentials"),
        ("401", ReadError, "access is denied .401."),
        ("301", ReadError, "redirect without LOCATION"),
        ("no_ranges", ReadError, "does not give ranges of files"),
        ("wrong_range", ReadError, "Requested .*, got "),
        ("less", ReadError, "Requested .*, got "),
        ("no_numbers", ReadError, "cannot read bytes"),
        ("long", ReadError, "sent more bytes than it was asked for"),
        ("compressed", ReadError, "compressed .Content-Encoding: 'gzip'., although this was not asked for"),
        ("to_file", ReadError, "302 Found|cannot read bytes"),
        ("in_circles", ReadError, "cannot read bytes"),
        ("other_size", CheckpointError, "was replaced while it was being loaded"),
    ],
)
def test_what_does_not_pass(server: Behaviour, fault: str, error: type[Exception], text: str) -> None:
    server.fault = at(range(FIRST, 1000), fault)
    began = time.monotonic()
    with pytest.raises(error, match=rf"^{server.address}/x.safetensors: .*{text}") as caught:
        read_all(server)
    assert "Debug source" not in str(caught.value) and time.monotonic() - began < SOON_S
    if fault != "in_circles":
        assert len(server.requests) - FIRST == (1 + RETRIES if fault in ("503", "429", "short") else 1)


def test_what_an_upload_was_encoded_in_says_nothing(server: Behaviour) -> None:
    server.fault = at(range(1000), "aws_chunked")
    _, found = read_all(server)
    assert all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)


def test_a_server_without_ranges_sends_no_terabyte(server: Behaviour, tmp_path: Path) -> None:
    with open(tmp_path / "x.safetensors", "wb") as file:
        file.truncate(10**12)  # sparse
    sent = []
    with http_files(tmp_path, Behaviour(fault=lambda path, number: "no_ranges")) as other:
        other.pace = sent.append  # type: ignore[method-assign]
        with pytest.raises(ReadError, match="does not give ranges"):
            read_all(other)
    assert sum(sent) < 10**8


def test_an_object_that_is_replaced(server: Behaviour) -> None:
    server.tag = lambda path: "v1" if len(server.requests) <= FIRST else "v2"
    with pytest.raises(CheckpointError, match="x.safetensors: was replaced while it was being loaded"):
        read_all(server)


def test_a_server_that_does_not_tell_versions(server: Behaviour, caplog: pytest.LogCaptureFixture) -> None:
    """Neither ETag nor Last-Modified: only another size is noticed, and one warning says so."""
    server.tag = lambda path: ""
    assert torch.equal(read_all(server)[1]["a"], TENSORS["a"])
    server.fault = at(range(len(server.requests) + FIRST, 1000), "other_size")
    with pytest.raises(CheckpointError, match="x.safetensors: was replaced while it was being loaded"):
        read_all(server)
    server.fault = lambda path, number: ""
    for tag, warnings in (("", 1), ("v1", 0)):
        caplog.clear()
        server.tag = lambda path, tag=tag: tag
        shards = [f"{server.address}/{name}.safetensors" for name in ("x", "y")]
        with closing(load_of_layouts(StreamingConfig())) as load:
            load.open(shards, None)
        found = [record.getMessage() for record in caplog.records]
        assert len(found) == warnings, found
        assert all(f"{server.address}: the server gives neither ETag nor Last-Modified" in each for each in found)


def test_a_signature_is_not_quoted() -> None:
    text = "Error performing GET https://store/x?X-Amz-Signature=secret&b=c in 3ms - 500"
    explained = files.explained("https://h/x", type("Other", (Exception,), {})(text))
    assert "secret" not in str(explained) and "https://store/x?..." in str(explained)


# ------------------------------------------------------------------------------------------- hostile servers

HEADERS = st.dictionaries(
    st.sampled_from(
        ["Content-Range", "Content-Length", "ETag", "Transfer-Encoding", "Content-Encoding", "Last-Modified"]
    ),
    st.one_of(
        st.integers(-3, 2**70).map(str),
        st.sampled_from(["bytes */*", "bytes 0-0/1", "bytes 5-1/9", "bytes 0-99/*", "chunked", "gzip", '""', "W/"]),
        st.builds("bytes {}-{}/{}".format, *[st.integers(-1, 2**64)] * 3),
    ),
    max_size=3,
)


ANSWERS = {
    "headers": HEADERS,
    "status": st.sampled_from([200, 204, 206, 206, 206, 304, 416]),
    "length": st.integers(0, 300_000),
}
"""Lengths, ranges and headers of any kind, for the header as well as for the values."""

DRAWN = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@settings(DRAWN, derandomize=True)
@given(**ANSWERS)
def test_any_answer_gives_the_values_or_our_error(capfd: Any, server: Behaviour, **answer: Any) -> None:
    check_answer(capfd, server, **answer)


@pytest.mark.slow
@settings(DRAWN)
@given(**ANSWERS)
def test_any_other_answer_does(capfd: Any, server: Behaviour, **answer: Any) -> None:
    check_answer(capfd, server, **answer)


def check_answer(capfd: Any, server: Behaviour, headers: dict[str, str], status: int, length: int) -> None:
    server.requests.clear()
    if status >= 400:  # obstore takes as much memory as an error's body is said to have, and aborts if there is less
        headers.pop("Content-Length", None)

    def answer(self: Any, file: Path, start: int, stop: int, size: int) -> None:
        usual = {"Content-Range": f"bytes {start}-{stop - 1}/{size}", "Content-Length": str(stop - start)}
        self.answer(status, usual | headers)
        self.wfile.write(file.read_bytes()[start : start + length])
        self.close_connection = True

    server.hostile = answer
    server.fault = lambda path, number: "hostile" if number >= length % 2 else ""
    try:
        with capfd.disabled():  # should obstore end this process, what it says then is not lost
            found = read_all(server)[1]
    except HfZeroStreamError as error:
        assert "x.safetensors" in str(error)
    else:
        assert all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)


def test_a_panic_of_obstore_is_our_error(server: Behaviour) -> None:
    """An error's body that is said to have more bytes than there are addresses."""

    def answer(self: Any, file: Path, start: int, stop: int, size: int) -> None:
        self.answer(416, {"Content-Length": str(2**63)})
        self.wfile.write(bytes(10**6))
        self.close_connection = True

    server.hostile, server.fault = answer, lambda path, number: "hostile"
    with pytest.raises(ReadError, match="x.safetensors: .*obstore cannot take in .*capacity overflow"):
        read_all(server)


# ------------------------------------------------------------------------------------------- several ranks


def load_remote(url: str) -> tuple[int, int]:
    with streaming(StreamingConfig(staging_bytes=160_000, progress=False)):
        model = AutoModelForCausalLM.from_pretrained(url, ds_config=ds_config(torch.bfloat16), dtype=torch.bfloat16)
    return sum(rank.retries for rank in model.streaming_report.ranks), model.num_parameters()


def test_all_ranks_alike(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    """Faults that pass are counted in the report; of one that does not, all ranks raise, in seconds."""
    with http_files(zoo_checkpoint("qwen3_moe", torch.bfloat16)) as how:
        how.fault = lambda path, number: "503" if "safetensors" in path and number % 10 == 9 else ""
        for outcome in run_ranks_expecting_errors(2, load_remote, how.address):
            assert outcome.error_type is None, outcome.traceback
            assert outcome.value[0] >= 3
        how.requests.clear()
        values = lambda path, number: path.endswith("-00002-of-00002.safetensors") and number > 12  # noqa: E731
        how.fault = lambda path, number: "403" if values(path, number) else ""
        for outcome in run_ranks_expecting_errors(2, load_remote, how.address):
            assert outcome.error_type in ("ReadError", "PeerError"), outcome.error_message
            assert "access is denied (403)" in str(outcome.error_message) and outcome.seconds < SOON_S


def load_where_one_lacks_the_plugin(url: str) -> None:
    with without_plugin("remote") if dist.get_rank() else nullcontext():
        load_remote(url)


def test_one_rank_without_the_plugin(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    with http_files(zoo_checkpoint("qwen3_moe", torch.bfloat16)) as how:
        outcomes = run_ranks_expecting_errors(2, load_where_one_lacks_the_plugin, how.address)
    assert [outcome.error_type for outcome in outcomes] == ["MissingPluginError"] * 2, outcomes
    assert all("needs the plug-in 'remote'" in str(outcome.error_message) for outcome in outcomes)
    assert max(outcome.seconds for outcome in outcomes) < SOON_S
