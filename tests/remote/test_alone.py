"""Loads from URLs outside of sharded trainings: one process, ranks that load alone, and what lies beside a model."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

import hf_zero_stream
from hf_zero_stream.errors import ReadError, UnsupportedError
from hf_zero_stream.plugins.remote.files import RemoteFiles
from tests.support.cluster import ROOT, run_ranks
from tests.support.http_files import Behaviour, http_files
from tests.support.quantised_checkpoints import bitsandbytes
from tests.support.zoo import make_checkpoint


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer; a tokenizer, and what processes images and sounds, without a model."""
    root = tmp_path_factory.mktemp("served")
    make_checkpoint("qwen3_moe", root / "model", torch.bfloat16)
    words = tokenizers.models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]")
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="[UNK]", chat_template="{{ messages[0].content }} a"
    )
    for name in ("model", "tokenizer"):
        tokenizer.save_pretrained(root / name)
    assert (root / "tokenizer" / "chat_template.jinja").exists()
    assert not (root / "tokenizer" / "config.json").exists()
    transformers.GenerationConfig(max_length=77).save_pretrained(root / "model")
    transformers.CLIPImageProcessor(size={"shortest_edge": 9}).save_pretrained(root / "image")
    transformers.WhisperFeatureExtractor(feature_size=7).save_pretrained(root / "sound")
    return root


@pytest.fixture(scope="module")
def web(root: Path) -> Iterator[Behaviour]:
    with http_files(root) as how:
        yield how


@pytest.fixture
def plain(root: Path) -> dict[str, torch.Tensor]:
    return dict(transformers.AutoModelForCausalLM.from_pretrained(root / "model").state_dict())


def assert_equal(values: dict[str, Any], plain: dict[str, torch.Tensor]) -> None:
    assert values.keys() == plain.keys() and all(torch.equal(values[name], plain[name]) for name in plain)


def test_one_process(web: Behaviour, plain: dict[str, torch.Tensor]) -> None:
    """A whole model, without a process group: stock, which reads faster from a disk, cannot read from a URL."""
    with hf_zero_stream.streaming():
        model = transformers.AutoModelForCausalLM.from_pretrained(f"{web.address}/model")
        assert_equal(model.state_dict(), plain)
        assert model.streaming_report.ranks[0].bytes_read
        with pytest.raises(
            UnsupportedError, match=r"with device_map= this load is left to transformers, which cannot"
        ):
            transformers.AutoModelForCausalLM.from_pretrained(f"{web.address}/model", device_map="cpu")
    streamed = hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(f"{web.address}/model")
    assert_equal(streamed.state_dict(), plain)


@pytest.mark.plugin("packed")
def test_what_stays_quantised(tmp_path: Path) -> None:
    """In one process that is stock's load, which would take the URL for the path of a file."""
    bitsandbytes(tmp_path, "nf4")
    with http_files(tmp_path) as how, hf_zero_stream.streaming():
        with pytest.raises(UnsupportedError, match="cannot be loaded from a URL, because the model stays quantised"):
            transformers.AutoModelForCausalLM.from_pretrained(how.address)


def load_alone(url: str) -> dict[str, torch.Tensor]:
    with hf_zero_stream.streaming(hf_zero_stream.StreamingConfig(share_reads=False)):
        model = transformers.AutoModelForCausalLM.from_pretrained(url)
    assert len(model.streaming_report.ranks) == 1
    return dict(model.state_dict())


def test_ranks_that_share_no_reads(cluster: None, web: Behaviour, plain: dict[str, torch.Tensor]) -> None:
    for values in run_ranks(2, load_alone, f"{web.address}/model"):
        assert_equal(values, plain)


@pytest.mark.parametrize(
    ("loader", "name"),
    [
        ("AutoTokenizer", "model"),
        ("AutoTokenizer", "tokenizer"),
        ("AutoProcessor", "tokenizer"),
        ("AutoConfig", "model"),
        ("GenerationConfig", "model"),
        ("AutoImageProcessor", "image"),
        ("AutoFeatureExtractor", "sound"),
    ],
)
def test_what_lies_beside_a_model(root: Path, web: Behaviour, loader: str, name: str) -> None:
    """Also in a folder without a model, and so without a config."""
    load = getattr(transformers, loader).from_pretrained
    local = load(root / name)
    with hf_zero_stream.streaming():
        found = load(f"{web.address}/{name}")
    assert type(found) is type(local)
    if "tokenizer" in name or loader == "AutoTokenizer":
        chat = [{"role": "user", "content": "b"}]
        assert found.apply_chat_template(chat).input_ids == local.apply_chat_template(chat).input_ids == [2, 1]
    else:
        without = ("_name_or_path", "image_processor_type", "feature_extractor_type", "transformers_version")
        values = [{key: it for key, it in each.to_dict().items() if key not in without} for each in (found, local)]
        assert values[0] == values[1]


def test_a_prefix_with_nothing_below_is_named(web: Behaviour) -> None:
    with pytest.raises(ReadError, match="nothing/config.json: there is no such object"), hf_zero_stream.streaming():
        transformers.AutoTokenizer.from_pretrained(f"{web.address}/nothing")


# ------------------------------------------------------------------------------------------- what a process lacks

SCRIPT = """
import sys, transformers, hf_zero_stream
with hf_zero_stream.streaming():
    transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
    print(transformers.AutoTokenizer.from_pretrained(sys.argv[1])("b a").input_ids)
"""


@pytest.mark.slow
@pytest.mark.parametrize("offline", ["0", "1"])
def test_the_hub_is_not_asked_and_nothing_is_stored(web: Behaviour, tmp_path: Path, offline: str) -> None:
    """Neither the user's folder nor the Hub's cache can be written to."""
    with http_files(tmp_path) as hub:
        environment = {**os.environ, "HF_HUB_OFFLINE": offline, "HF_ENDPOINT": hub.address, "NO_PROXY": "127.0.0.1"}
        environment |= dict.fromkeys(("HOME", "HF_HOME", "XDG_CACHE_HOME"), "/proc/nowhere")
        environment |= {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
        command = [sys.executable, "-c", SCRIPT, f"{web.address}/model"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
        assert done.stdout.splitlines()[-1:] == ["[2, 1]"], done.stderr
        assert hub.requests == []


def test_a_process_that_is_forked_after_requests(web: Behaviour) -> None:
    """A worker of a DataLoader, for instance: obstore's threads are not there, and it would wait for them."""
    url = f"{web.address}/tokenizer/tokenizer_config.json"
    RemoteFiles().read_whole(url, 10**6)
    child = os.fork()
    if not child:
        signal.alarm(30)
        try:
            RemoteFiles().read_whole(url, 10**6)
        except ReadError as error:
            os._exit(7 if "was forked from process" in str(error) and "spawn" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
