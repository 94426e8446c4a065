"""Saves to buckets: the objects are the files of a local save, and the earlier checkpoint stays until all is there."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig
from safetensors.torch import load as load_file_of
from torch.distributed.fsdp import fully_shard

import hf_zero_stream
from hf_zero_stream import StreamingConfig
from hf_zero_stream.errors import CheckpointError, HfZeroStreamError
from hf_zero_stream.plugins.remote import objects
from hf_zero_stream.plugins.remote.lists import LIST, SaveList, Version, parse_list
from hf_zero_stream.plugins.remote.objects import RemoteFolder, StreamedObject
from tests.support.buckets import (
    ACCOUNT,
    BUCKET,
    Requests,
    azure_container,
    s3_bucket,
    s3_client,
    writable_gcs_bucket,
)
from tests.support.cluster import ROOT, SOON_S, run_ranks, run_ranks_expecting_errors
from tests.support.parity import ds_config
from tests.support.saving import SHARD_SIZE, contents
from tests.support.training_state import all_in_one_group, engine_of, state_config, train
from tests.support.zoo import ZOO


Checkpoint = Callable[..., Path]
URL = f"s3://{BUCKET}/a/b"
NAME = "qwen3_moe"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def requests() -> Requests:
    return Requests()


@pytest.fixture
def bucket(requests: Requests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """An empty bucket; also this process can read from it."""
    (tmp_path / "nothing").mkdir()
    with s3_bucket(tmp_path / "nothing", requests) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        objects._store.cache_clear()
        yield environment
    objects._store.cache_clear()


def found_in(url: str) -> dict[str, bytes]:
    """All objects below `url`, by name, but for the list of the last save, which is done."""
    place = RemoteFolder(url)
    found = {name: place.read(name) for name in place.below("")}
    lists = [name for name in found if name.rpartition("/")[2] == LIST]
    assert all(parse_list(found.pop(name), name).stage == "done" for name in lists)
    return found


def model_on(how: str, checkpoint: Path) -> Any:
    model_class = getattr(transformers, ZOO[NAME].auto_class)
    if how == "zero3":
        return model_class.from_pretrained(checkpoint, ds_config=ds_config(torch.bfloat16), dtype=torch.bfloat16)
    model = model_class.from_pretrained(checkpoint, dtype=torch.bfloat16)
    if how == "fsdp2":
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    return model


def save_twice(how: str, checkpoint: Path, folder: Path, url: str, environment: dict[str, str]) -> Any:
    """Into a folder, and twice to `url`, by two calls; what is left on this host, and the reports."""
    os.environ.update(environment)
    temporary = folder / f"temporary-{dist.get_rank()}"
    temporary.mkdir(parents=True)
    tempfile.tempdir = str(temporary)
    with hf_zero_stream.streaming():
        model = model_on(how, checkpoint)
    with hf_zero_stream.streaming(StreamingConfig(verify="full")):
        hf_zero_stream.save_pretrained(model, folder / "local", max_shard_size=SHARD_SIZE)
        first = hf_zero_stream.save_pretrained(model, url, max_shard_size=SHARD_SIZE)
        dist.barrier()
        between = found_in(url) if dist.get_rank() == 0 else None
        model.save_pretrained(url, max_shard_size=SHARD_SIZE)
        assert first.verified
    return between, first, [path.name for path in temporary.rglob("*") if path.is_file()]


def assert_same_checkpoint(found: dict[str, bytes], local: Path) -> None:
    """The shards by other names, which the index names; all else as in the folder."""
    expected = contents(local)
    index, theirs = json.loads(found.pop(INDEX)), json.loads(expected.pop(INDEX))
    names = dict(zip(theirs["weight_map"].values(), index["weight_map"].values(), strict=True))
    assert index["metadata"] == theirs["metadata"]
    assert list(index["weight_map"]) == list(theirs["weight_map"])
    assert found == {names.get(name, name): data for name, data in expected.items()}
    assert not names.keys() & {*names.values()}


@pytest.mark.parametrize(("how", "world_size"), [("zero3", 3), ("fsdp2", 2), ("whole", 2), ("whole", 1)])
def test_objects_are_the_files(
    cluster: None,
    zoo_checkpoint: Checkpoint,
    bucket: dict[str, str],
    requests: Requests,
    tmp_path: Path,
    how: str,
    world_size: int,
) -> None:
    checkpoint = zoo_checkpoint(NAME, torch.bfloat16)
    ranks = run_ranks(world_size, save_twice, how, checkpoint, tmp_path, URL, bucket)
    between, report, _ = ranks[0]
    assert [left for _, _, left in ranks] == [[]] * world_size
    shards = [name for name in between if name.endswith(".safetensors")]
    assert sorted(report.files) == sorted(shards) and len(shards) > 2
    assert sorted(rank.bytes_written > 0 for rank in report.ranks) == [True] * world_size
    for name in shards:  # each byte is sent once
        assert sum(size for method, path, size in requests.seen if path.endswith(name) and method == "PUT") == len(
            between[name]
        )
    found = found_in(URL)
    assert not {*shards} & found.keys()
    for each in (between, found):
        assert_same_checkpoint(each, tmp_path / "local")
    assert not s3_client(bucket).list_multipart_uploads(Bucket=BUCKET).get("Uploads")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "local").state_dict()
    with hf_zero_stream.streaming():
        loaded = transformers.AutoModelForCausalLM.from_pretrained(URL).state_dict()
    assert plain.keys() == loaded.keys() and all(torch.equal(plain[name], loaded[name]) for name in plain)


def test_in_one_shard_and_more(
    cluster: None, zoo_checkpoint: Checkpoint, bucket: dict[str, str], tmp_path: Path
) -> None:
    """One shard has an index too, which names it; one that somebody else has put there goes."""
    s3_client(bucket).put_object(Bucket=BUCKET, Key="a/b/model.safetensors", Body=b"theirs")
    checkpoint = zoo_checkpoint(NAME)
    with hf_zero_stream.streaming():
        model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
        hf_zero_stream.save_pretrained(model, tmp_path / "local")
        for size in ("5GB", "5GB", SHARD_SIZE, "5GB"):
            shards = hf_zero_stream.save_pretrained(model, URL, max_shard_size=size).files
            found = found_in(URL)
            assert {name for name in found if "safetensors" in name} == {*shards, INDEX}
            if size == "5GB":
                assert found[shards[0]] == (tmp_path / "local" / "model.safetensors").read_bytes()
            loaded = transformers.AutoModelForCausalLM.from_pretrained(URL).state_dict()
            assert all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items())


def save_adapter_twice(checkpoint: Path, folder: Path, url: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    with hf_zero_stream.streaming():
        model = model_on("zero3", checkpoint)
        model.add_adapter(LoraConfig(target_modules=["q_proj", "v_proj"], r=4))
        for place in (folder, url, url):
            hf_zero_stream.save_pretrained(model, place)


def test_an_adapter_keeps_its_name(
    cluster: None, zoo_checkpoint: Checkpoint, bucket: dict[str, str], tmp_path: Path
) -> None:
    """At a URL where there are other checkpoints, whose names begin or go on like its own."""
    for name in ("a/bc/adapter_model.safetensors", "a/model.safetensors"):
        s3_client(bucket).put_object(Bucket=BUCKET, Key=name, Body=b"theirs")
    run_ranks(2, save_adapter_twice, zoo_checkpoint(NAME), tmp_path / "local", f"{URL}/", bucket)
    assert found_in(URL) == contents(tmp_path / "local")
    assert found_in(f"s3://{BUCKET}/a/bc") == {"adapter_model.safetensors": b"theirs"}
    assert RemoteFolder(f"s3://{BUCKET}/a").read("model.safetensors") == b"theirs"


def test_letters_of_a_prefix(cluster: None, zoo_checkpoint: Checkpoint, bucket: dict[str, str]) -> None:
    url = f"s3://{BUCKET}/my model+\u00fc %20&=;,'(1)~"
    run_ranks(2, save_values, zoo_checkpoint(NAME, torch.bfloat16), f"{url}//", bucket, [1.0, 2.0])
    assert INDEX in found_in(url)
    assert_loads(2.0, url)


# ------------------------------------------------------------------------------------------- what goes wrong


def save_values(checkpoint: Path, url: str, environment: dict[str, str], factors: list[float], dies: str = "") -> None:
    """Save the model with its values multiplied by each of `factors`; at the last of them, rank 1 `dies`."""
    os.environ.update(environment)
    with hf_zero_stream.streaming():
        model = model_on("zero3", checkpoint)
        with torch.no_grad():
            for number, factor in enumerate(factors, 1):
                for param in model.parameters():
                    param.ds_tensor.fill_(factor)
                if number == len(factors) and dist.get_rank() == 1 and dies:
                    original = getattr(StreamedObject, dies)
                    count = iter(range(100))

                    def dying(self: Any, *args: Any, original: Any = original, count: Any = count) -> Any:
                        if next(count) == 1:
                            os.kill(os.getpid(), signal.SIGKILL)
                        return original(self, *args)

                    setattr(StreamedObject, dies, dying)
                hf_zero_stream.save_pretrained(model, url, max_shard_size=SHARD_SIZE)


def assert_loads(value: float, url: str = URL) -> None:
    """The checkpoint in the bucket is whole, and is the one that was saved with this value everywhere."""
    with hf_zero_stream.streaming():
        loaded = transformers.AutoModelForCausalLM.from_pretrained(url)
    assert {float(each) for param in loaded.parameters() for each in param.detach().unique()} == {value}


def test_errors_that_pass(
    cluster: None, zoo_checkpoint: Checkpoint, bucket: dict[str, str], requests: Requests
) -> None:
    """Every 6th request is answered with 503, whatever it is for."""
    number = iter(range(10**9))
    failed = []

    def fault(method: str, path: str) -> int:
        if next(number) % 6 == 5:
            failed.append(path)
            return 503
        return 0

    requests.fault = fault
    run_ranks(2, save_values, zoo_checkpoint(NAME, torch.bfloat16), URL, bucket, [1.0, 2.0])
    assert len(failed) > 3
    requests.fault = lambda method, path: 0
    assert_loads(2.0)


def refusing(*parts: str) -> Callable[[str, str], int]:
    """Nobody may write, or list uploads, where one of these is in the path."""
    return lambda method, path: 403 if method != "DELETE" and any(part in path for part in parts) else 0


@pytest.mark.plugin("watch")
def test_an_error_is_one_of_all_ranks(
    cluster: None, zoo_checkpoint: Checkpoint, bucket: dict[str, str], requests: Requests
) -> None:
    checkpoint = zoo_checkpoint(NAME, torch.bfloat16)
    run_ranks(2, save_values, checkpoint, URL, bucket, [1.0])
    before = found_in(URL)
    requests.fault = refusing("-00002-of-", "uploads")
    for outcome in run_ranks_expecting_errors(2, save_values, checkpoint, URL, bucket, [2.0]):
        assert outcome.error_type in ("SaveError", "PeerError"), outcome.traceback
        assert "-00002-of" in str(outcome.error_message) and outcome.seconds < SOON_S
        assert "access is denied (403)" in str(outcome.error_message)
    requests.fault = lambda method, path: 0
    assert found_in(URL) == before
    assert_loads(1.0)


@pytest.mark.plugin("watch")
def test_a_server_that_is_away(
    cluster: None, zoo_checkpoint: Checkpoint, bucket: dict[str, str], requests: Requests
) -> None:
    checkpoint = zoo_checkpoint(NAME, torch.bfloat16)
    run_ranks(2, save_values, checkpoint, URL, bucket, [1.0])
    before = found_in(URL)
    requests.fault = lambda method, path: 503 if "-00002-of-" in path else 0
    for outcome in run_ranks_expecting_errors(2, save_values, checkpoint, URL, bucket, [2.0]):
        assert outcome.error_type in ("SaveError", "PeerError"), outcome.traceback
        assert outcome.seconds < 30 + SOON_S, "20 s of them are for trying again, the rest for loading"
    requests.fault = lambda method, path: 0
    run_ranks(2, save_values, checkpoint, URL, bucket, [3.0])
    assert_loads(3.0)
    assert len(found_in(URL)) == len(before)


def test_a_bucket_that_is_not_there(
    cluster: None, zoo_checkpoint: Checkpoint, bucket: dict[str, str], requests: Requests
) -> None:
    url = "s3://nowhere/a"
    for outcome in run_ranks_expecting_errors(2, save_values, zoo_checkpoint(NAME), url, bucket, [1.0]):
        assert outcome.error_type == "SaveError" and outcome.seconds < SOON_S
        assert f"{url}/{LIST}: cannot write it: there is no such bucket or container (404)" in str(
            outcome.error_message
        )


@pytest.mark.plugin("watch")
@pytest.mark.parametrize("dies", ["write", "finish"])
def test_a_rank_that_is_killed(
    cluster: None,
    zoo_checkpoint: Checkpoint,
    bucket: dict[str, str],
    dies: str,
) -> None:
    checkpoint = zoo_checkpoint(NAME, torch.bfloat16)
    outcomes = run_ranks_expecting_errors(2, save_values, checkpoint, URL, bucket, [1.0, 2.0], dies)
    assert outcomes[1].error_type == "Died"
    assert outcomes[0].error_type == "PeerError" and outcomes[0].seconds < 30, outcomes[0].traceback
    assert_loads(1.0)
    run_ranks(2, save_values, checkpoint, URL, bucket, [3.0])
    assert_loads(3.0)
    assert not s3_client(bucket).list_multipart_uploads(Bucket=BUCKET).get("Uploads")


# ------------------------------------------------------------------------------------------- large objects

SIZES = [2**21] * 14
"""Elements of the parameters of a module with 112 MiB."""


def save_large(url: str, environment: dict[str, str], dies: bool) -> Any:
    """Save a module that FSDP2 shards, in shards of several parts; rank 1 dies when it has sent four."""
    os.environ.update(environment)
    module = torch.nn.Module()
    module.layers = torch.nn.ParameterList(torch.arange(size, dtype=torch.float32) for size in SIZES)
    fully_shard(module)
    if dies and dist.get_rank() == 1:
        original, sent = StreamedObject.write, 0

        def dying(self: StreamedObject, data: memoryview) -> None:
            nonlocal sent
            sent += len(data)
            if sent > 4 * objects.PART_BYTES:
                time.sleep(2)  # the parts are on their way
                os.kill(os.getpid(), signal.SIGKILL)
            original(self, data)

        StreamedObject.write = dying  # type: ignore[method-assign]
    with hf_zero_stream.streaming(StreamingConfig(progress=False)):
        report = hf_zero_stream.save_tensors(module, url, max_shard_size="60MB")
    return report.files, report.ranks


def uploads_in(environment: dict[str, str]) -> list[str]:
    found = s3_client(environment).list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
    return sorted(upload["Key"] for upload in found)


def test_memory_and_parts(cluster: None, bucket: dict[str, str], requests: Requests) -> None:
    """A rank has two parts and 64 MiB at most, and each byte is sent once, in parts that S3 takes."""
    files, ranks = run_ranks(2, save_large, URL, bucket, False)[0]
    assert len(files) == 2
    for rank in ranks:
        assert rank.bytes_written == sum(SIZES) * 2
        assert rank.anonymous_growth_peak <= 2 * objects.PART_BYTES + 64 * 2**20
    for name in files:
        parts = [size for method, path, size in requests.seen if method == "PUT" and name in path and "?" in path]
        size = len(RemoteFolder(URL).read(name))
        assert sum(parts) == size and len(parts) == -(-size // objects.PART_BYTES) > 6
    assert_large(URL)


def assert_large(url: str) -> None:
    """What :func:`save_large` saved is there."""
    shards = [data for name, data in found_in(url).items() if name.endswith(".safetensors")]
    tensors = [values for data in shards for values in load_file_of(data).values()]
    assert len(tensors) == len(SIZES)
    assert all(torch.equal(it, torch.arange(len(it), dtype=torch.float32)) for it in tensors)


@pytest.mark.plugin("watch")
def test_parts_of_a_dead_save_are_aborted(cluster: None, bucket: dict[str, str]) -> None:
    outcomes = run_ranks_expecting_errors(2, save_large, URL, bucket, True)
    assert outcomes[1].error_type == "Died" and outcomes[0].error_type == "PeerError", outcomes
    assert uploads_in(bucket) == [], "rank 0 lives, and removes what it can"
    RemoteFolder(URL).put(LIST, SaveList(id="dead", created=["x.safetensors"]).to_json())
    for name in ("x", "z"):
        s3_client(bucket).create_multipart_upload(Bucket=BUCKET, Key=f"a/b/{name}.safetensors")
    assert len(uploads_in(bucket)) == 2
    run_ranks(1, save_large, URL, bucket, False)
    assert uploads_in(bucket) == ["a/b/z.safetensors"], "somebody else's"


# ------------------------------------------------------------------------------------------- what is refused


def save_otherwise(checkpoint: Path, url: str, environment: dict[str, str], folder: Path) -> list[str]:
    os.environ.update(environment)
    found = []
    with contextlib.chdir(folder), hf_zero_stream.streaming():
        model = model_on("whole", checkpoint)

        class Own(type(model)):  # type: ignore[misc]
            def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
                super().save_pretrained(*args, **kwargs)

        own = model_on("whole", checkpoint)
        own.__class__ = Own
        for save in (
            lambda: hf_zero_stream.save_pretrained(model, url if dist.get_rank() else "folder"),
            lambda: hf_zero_stream.save_pretrained(model, f"{url}-{dist.get_rank()}"),
            lambda: hf_zero_stream.save_pretrained(model, "hf://a/b"),
            lambda: hf_zero_stream.save_pretrained(own, url),
            lambda: own.save_pretrained(url),
            lambda: model.save_pretrained(url, state_dict=model.state_dict()),
            lambda: model.save_pretrained(url, push_to_hub=True),
            lambda: model.save_pretrained(f"{url}/model.safetensors"),
        ):
            try:
                save()
            except HfZeroStreamError as error:
                found.append(f"{type(error).__name__}: {error}")
            else:
                found.append("saved")
        dist.barrier()
        assert os.listdir() == []
    return found


def test_refused(
    cluster: None, zoo_checkpoint: Checkpoint, bucket: dict[str, str], requests: Requests, tmp_path: Path
) -> None:
    (tmp_path / "here").mkdir()
    ranks = run_ranks(2, save_otherwise, zoo_checkpoint(NAME), URL, bucket, tmp_path / "here")
    expected = [
        "Expected one place to save to on all ranks; rank 1 saves to",
        "Expected one place to save to on all ranks; rank 1 saves to",
        "'hf://a/b': checkpoints are read from hf:// and not written there",
        "Own.save_pretrained: expected a local folder; got a URL",
        "Own.save_pretrained: expected a local folder; got a URL",
        "save_pretrained with these arguments: expected a local folder",
        "push_to_hub=True: save first",
        "expected the prefix of a checkpoint; found the name of a file",
    ]
    for found in ranks:
        for message, text in zip(found, expected, strict=True):
            assert text in message, message
    assert [seen for seen in requests.seen if seen[0] == "PUT" and "/a/b" in seen[1]] == []


@pytest.mark.parametrize(
    "data",
    [
        b"[]",
        b"{}",
        b"<html>Log in</html>",
        *(
            json.dumps({**json.loads(SaveList(id="x", stage="happened").to_json()), **changed}).encode()
            for changed in (
                {"files": {"../x": ""}, "over": {"../x": None}},
                {"removes": ["a//b"]},
                {"removes": [1]},
                {"stage": "x"},
                {"id": 1},
                {"files": {"a": "?"}, "over": {"a": None}},
                {"files": {"a": ""}},
                {"copies": {"a": "../b"}},
                {"unknown": []},
            )
        ),
    ],
)
def test_a_list_of_somebody_else(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="s3://a/b: "):
        parse_list(data, "s3://a/b")


def test_the_list_is_read_as_it_was_written() -> None:
    for order in (
        SaveList(id="1", created=["a", "b/c"]),
        SaveList(
            id="2",
            stage="happened",
            files={"x/y.json": b"\0\xff", "latest": b"x"},
            over={"x/y.json": None, "latest": Version("e", None)},
            copies={"c-2": "c"},
            removes=["z"],
        ),
    ):
        assert parse_list(order.to_json(), "here").to_json() == order.to_json()


def run_block(source: str, environment: dict[str, str], checkpoint: Path) -> float:
    os.environ.update(environment)
    engine = engine_of(checkpoint, state_config(3), all_in_one_group)
    train(engine, range(2))
    exec(compile(source, "saving.md", "exec"), {"engine": engine, "model": engine.module})
    return float(engine.global_steps)


def test_the_example_of_the_page(cluster: None, zoo_checkpoint: Checkpoint, bucket: dict[str, str]) -> None:
    page = (ROOT / "docs" / "saving.md").read_text(encoding="utf-8").partition("## Into buckets")[2]
    source = page.partition("```python\n")[2].partition("```")[0]
    assert run_ranks(2, run_block, source, bucket, zoo_checkpoint("llama")) == [2.0, 2.0]
    assert INDEX in found_in(f"s3://{BUCKET}/trained")
    assert found_in(f"s3://{BUCKET}/run")["latest"] == b"global_step2"


@pytest.mark.parametrize(
    ("url", "server"),
    [
        pytest.param(f"az://{ACCOUNT}/{BUCKET}/x", azure_container, marks=pytest.mark.slow),
        (f"gs://{BUCKET}/x", writable_gcs_bucket),
    ],
)
def test_other_stores(
    cluster: None,
    zoo_checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    url: str,
    server: Callable[[Path], AbstractContextManager[dict[str, str]]],
) -> None:
    (tmp_path / "nothing").mkdir()
    with server(tmp_path / "nothing") as environment:
        checkpoint = zoo_checkpoint(NAME, torch.bfloat16)
        between, _, _ = run_ranks(2, save_twice, "zero3", checkpoint, tmp_path, url, environment)[0]
        assert_same_checkpoint(between, tmp_path / "local")
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        objects._store.cache_clear()
        assert_same_checkpoint(found_in(url), tmp_path / "local")
        run_ranks(2, save_large, f"{url}/large", environment, False)  # in several parts
        assert_large(f"{url}/large")


def test_sizes_of_parts() -> None:
    for size in (0, 5 * 10**9, 83 * 10**9, 5 * 2**40):
        part = objects.part_bytes(size)
        assert part >= 5 * 2**20 and part * objects.MOST_PARTS >= size
        in_memory = max(1, objects.PARTS_BYTES // part) * part
        assert 2 * in_memory <= 2 * part + 48 * 2**20, "those of the object before, too"
