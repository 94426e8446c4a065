"""Loads from buckets and web servers equal plain loading of the same files, and leave no weights on disk."""

import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import tokenizers
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import save_file

import hf_zero_stream
from hf_zero_stream.engine.opened import OpenCheckpoint
from hf_zero_stream.engine.places import place_of
from hf_zero_stream.errors import CheckpointError, ConfigError, UnsupportedError, UrlError
from hf_zero_stream.plugins.remote.files import RemoteFiles
from hf_zero_stream.plugins.remote.response_cache import ResponseCache, cached_responses
from hf_zero_stream.plugins.remote.urls import RequestFailed, StoreKey, checkpoint_url, joined, located, repository_of
from hf_zero_stream.ranks.coordinator import Coordinator
from hf_zero_stream.registry import plugins
from hf_zero_stream.settings.config import StreamingConfig
from hf_zero_stream.sources.base import SourceFile, is_url
from tests.support.buckets import ACCOUNT, BUCKET, azure_container, gcs_bucket, s3_bucket
from tests.support.cluster import run_ranks
from tests.support.http_files import Behaviour, http_files
from tests.support.parity import differences, ds_config
from tests.support.remote_code import make_remote_checkpoint
from tests.support.zoo import make_checkpoint


Serve = Callable[[Path], AbstractContextManager[dict[str, str]]]

ODD = "ü b+c%20d&e"
"""A prefix that URLs and requests write otherwise than it is called."""

MODELS = {"moe": "AutoModelForCausalLM", "single": "AutoModel", "code": "AutoModelForCausalLM", "bin": "AutoModel"}
if "pickled" not in {plugin.name for plugin in plugins()}:
    del MODELS["bin"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of several kinds: in shards, in one file, with code of its own, of ``torch.save``."""
    root = tmp_path_factory.mktemp("served")
    make_checkpoint("qwen3_moe", root / "moe", torch.bfloat16)
    bert = transformers.BertConfig(
        hidden_size=12, num_hidden_layers=2, num_attention_heads=2, intermediate_size=20, vocab_size=31
    )
    transformers.BertModel(bert).save_pretrained(root / "single")
    make_remote_checkpoint(root / "code")
    shutil.copytree(root / "single", root / "bin", ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(transformers.BertModel(bert).state_dict(), root / "bin" / "pytorch_model.bin")
    (root / ODD).mkdir()
    for name in (ODD, ""):
        (root / name / "note.json").write_text(json.dumps(name))
    return root


@pytest.fixture(scope="module")
def bucket(root: Path) -> Iterator[dict[str, str]]:
    with s3_bucket(root) as environment:
        yield environment


@pytest.fixture(scope="module")
def web(root: Path) -> Iterator[Behaviour]:
    with http_files(root) as how:
        yield how


def load_everywhere(root: Path, urls: list[str], environment: dict[str, str], temporary: Path) -> list[str]:
    """What differs from plain loading, for each URL, model and way to load; collective."""
    os.environ.update(environment)
    temporary = temporary / str(dist.get_rank())
    temporary.mkdir()
    tempfile.tempdir = str(temporary)
    found: list[str] = []
    hows = {
        name: {"dtype": torch.bfloat16 if name == "moe" else torch.float32, "trust_remote_code": name == "code"}
        for name in MODELS
    }
    # These first: while a partitioned model lives, its ZeRO-3 counts for all loads.
    plain = {name: getattr(transformers, MODELS[name]).from_pretrained(root / name, **hows[name]) for name in MODELS}
    with hf_zero_stream.streaming():  # data parallelism: each rank reads a part and gets the others'
        whole = transformers.AutoModel.from_pretrained(f"{urls[0]}/single")
        assert transformers.AutoConfig.from_pretrained(f"{urls[0]}/single").hidden_size == 12
        assert [path.name for path in temporary.rglob("*") if path.is_file()].count("config.json")
    values = whole.state_dict()
    read = sum(rank.bytes_read for rank in whole.streaming_report.ranks)
    if read > 1.01 * sum(value.nbytes for value in values.values()):
        found.append(f"{urls[0]}/single: all ranks hold the same, and read {read} bytes")
    found += [name for name, value in plain["single"].state_dict().items() if not torch.equal(value, values[name])]
    for url, name in product(urls, MODELS):
        dtype, streaming_class = hows[name]["dtype"], getattr(hf_zero_stream, f"Streaming{MODELS[name]}")
        streamed = streaming_class.from_pretrained(f"{url}/{name}", ds_config=ds_config(dtype), **hows[name])
        found += [f"{url}/{name}: {difference}" for difference in differences(streamed, plain[name], dtype)]
        read = sum(rank.bytes_read for rank in streamed.streaming_report.ranks)
        size = sum(parameter.numel() * dtype.itemsize for parameter in plain[name].parameters())
        if not size <= read < 1.01 * size:
            found.append(f"{url}/{name}: read {read} bytes for {size}")
        if name == "bin":
            with torch.no_grad():
                for parameter in streamed.parameters():
                    parameter.ds_tensor.zero_()
            hf_zero_stream.load_into(streamed, f"{url}/bin")
            found += [f"load_into {url}: {each}" for each in differences(streamed, plain[name], dtype)]
        del streamed
    found += [f"left on disk: {path}" for path in temporary.rglob("*") if path.is_file()]
    return found


def test_equals_plain_loading(
    cluster: None, root: Path, bucket: dict[str, str], web: Behaviour, tmp_path: Path
) -> None:
    urls = [f"s3://{BUCKET}", web.address]
    for found in run_ranks(2, load_everywhere, root, urls, bucket, tmp_path, timeout=240):
        assert found == []


def test_prefixes(root: Path, bucket: dict[str, str], web: Behaviour, monkeypatch: pytest.MonkeyPatch) -> None:
    """Odd ones, and none at all; in a bucket they are written as they are called, of a web server as in a browser."""
    for name, value in bucket.items():
        monkeypatch.setenv(name, value)
    for prefix in (f"S3://{BUCKET}/{ODD}/", f"{web.address}/{quote(ODD)}"):
        files = RemoteFiles()
        assert json.loads(files.read_whole(joined(prefix, "note.json"), 100)) == ODD
    for prefix in (f"s3://{BUCKET}", f"s3://{BUCKET}/", web.address, f"HTTP{web.address.removeprefix('http')}/"):
        assert json.loads(RemoteFiles().read_whole(joined(prefix, "note.json"), 100)) == ""


@pytest.mark.plugin("forecast")
@pytest.mark.parametrize(
    ("url", "serve"),
    [
        (f"gs://{BUCKET}", gcs_bucket),
        pytest.param(f"az://{ACCOUNT}/{BUCKET}", azure_container, marks=pytest.mark.slow),
    ],
)
def test_other_clouds(cluster: None, root: Path, url: str, serve: Serve, tmp_path: Path) -> None:
    with serve(root) as environment:
        for found in run_ranks(2, load_everywhere, root, [url], environment, tmp_path, timeout=240):
            assert found == []
        # What is missing is named; another version than the one whose header was read is refused.
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            with pytest.raises(OSError, match="nothing"):
                hf_zero_stream.plan(f"{url}/nothing", world_size=2)
            files = RemoteFiles()
            size = (root / "single" / "model.safetensors").stat().st_size
            files.add([SourceFile(f"{url}/single/model.safetensors", size, tag="of another version")])
            with pytest.raises(CheckpointError, match="was replaced"):
                files.read_into(0, 0, [memoryview(bytearray(8))])


@pytest.mark.plugin("forecast")
def test_plan_of_a_url(root: Path, web: Behaviour) -> None:
    arguments: dict[str, Any] = {"world_size": 3, "rank": 1}
    web.requests.clear()
    planned = hf_zero_stream.plan(f"{web.address}/moe", **arguments)
    local = hf_zero_stream.plan(str(root / "moe"), **arguments)
    assert planned.load.cost.target_bytes == local.load.cost.target_bytes
    assert planned.memory == local.memory
    shards = sorted(path.name for path in (root / "moe").glob("*.safetensors"))
    asked = [os.path.basename(path) for path, _, _ in web.requests if path.endswith(".safetensors")]
    assert sorted(set(asked)) == sorted([*shards, "model.safetensors"])
    assert len(asked) == len(shards) + 1, "headers are read once each"


@pytest.mark.plugin("forecast")
def test_small_files_are_asked_for_at_once_and_once(root: Path) -> None:
    """What one call needs; a second call asks anew, because files may change."""
    with http_files(root / "moe", Behaviour(latency_s=0.2)) as slow:
        for asked_before in (0, 1):
            hf_zero_stream.plan(slow.address, world_size=2)
            names = Counter(path for path, _, _ in slow.requests)
            assert set(names.values()) == {asked_before + 1}, names
            assert {"/config.json", "/generation_config.json", "/model.safetensors.index.json"} <= set(names)
        assert slow.most_at_once >= 4, "one after the other would take four times as long"


def test_auto_classes_ask_at_once_too(cluster: None, root: Path) -> None:
    """They look for an adapter and the config before the model's own class comes."""
    with http_files(root / "moe", Behaviour(latency_s=0.2)) as slow:
        assert run_ranks(1, load_by_auto_class, slow.address) == [True]
    first = [path for path, _, _ in slow.requests[:5]]
    names = {"/config.json", "/adapter_config.json", "/generation_config.json", "/model.safetensors"}
    assert set(first) == {*names, "/model.safetensors.index.json"} and slow.most_at_once >= 4
    small = Counter(path for path, _, _ in slow.requests if path.endswith(".json"))
    assert set(small.values()) == {1}, small


def load_by_auto_class(url: str) -> bool:
    how = {"dtype": torch.bfloat16, "ds_config": ds_config(torch.bfloat16)}
    with hf_zero_stream.streaming():
        return transformers.AutoModelForCausalLM.from_pretrained(url, **how).streaming_report is not None


def test_tokenizers_from_a_url(root: Path, tmp_path: Path) -> None:
    vocabulary = {word: number for number, word in enumerate(["[UNK]", "a", "b"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(tmp_path)
    shutil.copy(root / "single" / "config.json", tmp_path)
    auto_class = transformers.AutoTokenizer  # imported before the block, which replaces what is there
    with http_files(tmp_path, Behaviour(latency_s=0.2)) as slow, hf_zero_stream.streaming():
        found = auto_class.from_pretrained(slow.address)
        assert found("b a").input_ids == auto_class.from_pretrained(tmp_path)("b a").input_ids
        assert set(Counter(path for path, _, _ in slow.requests).values()) == {1}
        assert slow.most_at_once >= 4


def test_what_is_asked_for_ahead() -> None:
    """An answer is given to all, an error that may pass to one of them, and nothing is kept beyond the call."""
    asked: list[str] = []

    def ask(key: str, error: Exception | None = None) -> str:
        asked.append(key)
        if error is not None:
            raise error
        return key

    with cached_responses() as answers, cached_responses() as inner:
        assert inner is answers is ResponseCache.current()
        answers.prefetch(("whole", "a"), partial(ask, "a"))
        assert [answers.get(("whole", "a"), partial(ask, "a")) for _ in range(2)] == ["a", "a"]
        for status, times in ((404, 1), (403, 1), (503, 3), (0, 3)):
            asked.clear()
            answers.prefetch(("whole", str(status)), partial(ask, "x", RequestFailed("no", status)))
            for _ in range(3):
                with pytest.raises(RequestFailed):
                    answers.get(("whole", str(status)), partial(ask, "x", RequestFailed("no", status)))
            assert len(asked) == times, status
    assert ResponseCache.current() is None
    asked.clear()
    answers.prefetch(("whole", "a"), partial(ask, "a"))
    assert answers.get(("whole", "a"), partial(ask, "a")) == "a" and asked == ["a"]


@pytest.mark.plugin("forecast")
def test_adapters_and_missing_things(root: Path, web: Behaviour, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="config.json: there is no such object .404.*Check the bucket or host"):
        hf_zero_stream.plan(f"{web.address}/nowhere", world_size=2)
    with http_files(tmp_path) as other:
        for file in (root / "single").iterdir():
            shutil.copy(file, tmp_path)
        (tmp_path / "adapter_config.json").write_text("{}")
        with pytest.raises(UnsupportedError, match="adapters are not loaded from URLs"), hf_zero_stream.streaming():
            transformers.AutoModel.from_pretrained(other.address)


@pytest.mark.parametrize(
    ("url", "store", "key"),
    [
        ("s3://bucket/a/b c.x", "s3://bucket", "a/b c.x"),
        ("s3://bucket", "s3://bucket", ""),
        ("az://account/container/a/b", "az://account/container", "a/b"),
        ("https://host:81/a%20b/c", "https://host:81", "a b/c"),
        ("HTTPS://host/a", "https://host", "a"),
        ("S3://Bucket/A", "s3://Bucket", "A"),
    ],
)
def test_urls(url: str, store: str, key: str) -> None:
    assert located(url) == StoreKey(store, key)


@pytest.mark.parametrize(
    "url",
    [
        *("s3:///x", "az://account", "s3://b/../c", "https://h/%2e%2e/c", "s3://b/x//y", "https://h//x"),
        *("https://host/a?signature=secret", "https://me:secret@host/a", "hf://me:secret@host/a", "hf://a?secret"),
        *("hf://datasets/org/name", "HF://spaces/org/name", "hf://buckets/org/name"),
    ],
)
def test_urls_that_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="expected") as caught:
        repository_of(url) if url.lower().startswith("hf") else located(url)
    assert "secret" not in str(caught.value), "an error ends up in logs"


def plan_of(url: Any) -> None:
    hf_zero_stream.plan(url, world_size=2)


def inspect(url: Any) -> None:
    with place_of(str(url), None):
        pass


def in_a_block(url: Any) -> None:
    with hf_zero_stream.streaming():
        transformers.AutoTokenizer.from_pretrained(url)


@pytest.mark.plugin("forecast")
@pytest.mark.parametrize("url", ["s3://", "s3:///", "hf://", "https://"])
def test_a_scheme_alone_is_refused(url: str) -> None:
    with pytest.raises(UrlError, match="expected"):
        hf_zero_stream.plan(url, world_size=2)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
        ("s3://bucket/a//", "s3://bucket/a"),
        ("hf://org/name@refs/pr/1/", "hf://org/name@refs/pr/1"),
        ("https://huggingface.co/org/name/resolve/main", "https://huggingface.co/org/name/resolve/main"),
    ],
)
def test_urls_of_checkpoints(given: str, expected: str) -> None:
    assert is_url(given) and checkpoint_url(given) == expected


@pytest.mark.plugin("forecast")
@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("file:///data/x", "expected one of s3://bucket/prefix, .*without file://"),
        ("gcs://bucket/x", "expected one of .*gs://bucket/prefix"),
        ("abfss://container@account/x?sig=secret", "expected one of .*az://account/container/prefix"),
        (Path("s3://bucket/x"), "a Path loses one of its slashes"),
        ("s3://bucket/x/model.safetensors", "expected the prefix of a checkpoint; found the name of a file"),
        ("hf://org/name/model.safetensors.index.json", "found the name of a file"),
        ("https://huggingface.co/org/name/tree/main", "expected hf://org/name or hf://org/name@revision"),
        ("https://host/a?X-Amz-Signature=secret", "A presigned address is that of one file: give credentials"),
        ("hf://datasets/org/name", "Only repositories of models are read"),
    ],
)
@pytest.mark.parametrize("entry", [plan_of, inspect, in_a_block])
def test_what_is_no_url_of_a_checkpoint(url: str | Path, text: str, entry: Callable[[Any], None]) -> None:
    assert is_url(url)
    with pytest.raises(UrlError, match=text) as caught:
        entry(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("path", ["hf://org/name", "org/name"])
def test_commands_read_the_revision_that_they_are_given(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "/nowhere")
    for revision, url in ((None, "hf://org/name"), ("v2", "hf://org/name@v2")):
        with place_of(path, revision) as place:
            assert place == url
    with pytest.raises(UrlError, match="expected one revision"), place_of("hf://org/name@v1", "v2"):
        pass


def test_urls_of_the_hub() -> None:
    found = repository_of("hf://org/name@refs%2Fpr%2F1/sub/x.json")
    assert found == ("org/name", "refs/pr/1", "sub/x.json")
    assert found.url == "hf://org/name@refs%2Fpr%2F1/sub/x.json"
    assert repository_of("hf://org/name").url == "hf://org/name"
    assert repository_of("HF://org/name@refs/pr/1/x.json") == ("org/name", "refs/pr/1", "x.json")
    assert repository_of("hf://org/name@refs/convert/parquet") == ("org/name", "refs/convert/parquet", "")
    assert repository_of("hf://org/name@refs/x") == ("org/name", "refs", "x")
    assert repository_of("hf://gpt2").url == "hf://gpt2@main"
    assert repository_of("hf://gpt2@main/x.json") == ("gpt2", "main", "x.json")
    with pytest.raises(ConfigError, match="hf://organisation/name"):
        repository_of("hf://a b")


def test_headers_of_many_shards_at_once(tmp_path: Path) -> None:
    """As many shards as DeepSeek-V3 has, 50 ms away: one request each, many at once."""
    for number in range(163):
        save_file({f"tensor.{number}": torch.zeros(2)}, tmp_path / f"{number}.safetensors")
    with http_files(tmp_path, Behaviour(latency_s=0.05)) as how:
        checkpoint = OpenCheckpoint(StreamingConfig(), Coordinator(0, 1, alone=True))
        headers = checkpoint.read_headers([f"{how.address}/{number}.safetensors" for number in range(163)])
    assert len(headers) == len(how.requests) == 163
    assert how.most_at_once >= 16, "one after the other takes 8 s"
