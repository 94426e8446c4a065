"""A URL needs the plug-in that reads from URLs: where it is not there, each entry says so, and no rank goes on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import hf_zero_stream
from hf_zero_stream.engine.places import place_of
from hf_zero_stream.errors import MissingPluginError
from tests.support.cli import run
from tests.support.cluster import SOON_S, run_ranks_expecting_errors
from tests.support.parity import ds_config
from tests.support.plugins import without_plugin


SAYS = r"needs the plug-in 'remote' of hf_zero_stream \(checkpoints at .*\), which is not installed"


def plan(url: Any) -> None:
    hf_zero_stream.plan(url, world_size=2)


def place(url: Any) -> None:
    with place_of(str(url), None):
        pass


def tensors(url: Any) -> None:
    hf_zero_stream.load_tensors(nn.Linear(2, 2), [str(url)])


def in_a_block(name: str) -> Callable[[Any], None]:
    def load(url: Any) -> None:
        with hf_zero_stream.streaming():
            getattr(transformers, name).from_pretrained(url)

    return load


LOADERS = ("AutoModelForCausalLM", "LlamaForCausalLM", "AutoTokenizer", "PreTrainedTokenizerFast", "AutoProcessor")
ENTRIES = {"plan": plan, "place": place, "tensors": tensors, **{name: in_a_block(name) for name in LOADERS}}
URLS = ("s3://bucket/x", "hf://org/name", "https://me:secret@host/x?sig=secret", Path("gs://bucket/x"))


@pytest.mark.parametrize("url", URLS, ids=str)
@pytest.mark.parametrize("entry", ENTRIES)
def test_each_entry_names_the_plugin(entry: str, url: str | Path) -> None:
    with without_plugin("remote"), pytest.raises(MissingPluginError, match=SAYS) as caught:
        ENTRIES[entry](url)
    assert str(caught.value).startswith(f"'{str(url)[:4]}") and "secret" not in str(caught.value)


@pytest.mark.parametrize("command", ["inspect", "verify", "plan"])
def test_commands_name_the_plugin(command: str) -> None:
    more = ["--world-size", "2"] if command == "plan" else []
    with without_plugin("remote"):
        assert "needs the plug-in 'remote'" in run(command, "s3://bucket/x", *more, code=1).stderr
        if command != "verify":  # a repository that is in no cache would be read where it is
            assert "'hf://nobody/nothing' needs" in run(command, "nobody/nothing", *more, code=1).stderr


def load_without(how: str) -> None:
    with without_plugin("remote"), hf_zero_stream.streaming(hf_zero_stream.StreamingConfig(progress=False)):
        cls = transformers.AutoModelForCausalLM if how == "auto" else transformers.LlamaForCausalLM
        kwargs = {"ds_config": ds_config(torch.bfloat16)} if how != "replicas" else {}
        cls.from_pretrained("s3://bucket/x", **kwargs)


@pytest.mark.parametrize("how", ["auto", "class", "replicas"])
def test_all_ranks_raise(cluster: None, how: str) -> None:
    for outcome in run_ranks_expecting_errors(2, load_without, how):
        assert outcome.error_type == "MissingPluginError", outcome.traceback
        assert "'s3://bucket/x' needs the plug-in 'remote'" in str(outcome.error_message)
        assert outcome.seconds < SOON_S
