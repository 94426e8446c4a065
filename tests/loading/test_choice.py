"""What becomes of a load is decided before it begins, as data: the way, the settings, and why it is left to stock."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from hf_zero_stream.errors import MissingPluginError
from hf_zero_stream.holdings.holder import holdings
from hf_zero_stream.holdings.introspection import CUT
from hf_zero_stream.loading import choice
from hf_zero_stream.loading.choice import Choice, Way, choose, for_one_rank, make_load
from hf_zero_stream.ranks.coordinator import Coordinator
from hf_zero_stream.settings.config import StreamingConfig
from hf_zero_stream.settings.scope import enter, leave
from tests.support.plugins import without_plugin


def chosen(ds_config: dict[str, Any] | None = None, strict: bool | None = None, **kwargs: Any) -> Choice:
    return choose(transformers.LlamaForCausalLM, "folder", kwargs, ds_config or {}, strict, is_zero3=False)


@pytest.fixture
def several(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this were one of several ranks."""
    monkeypatch.setattr(choice, "is_one_of_several", lambda: True)


def test_one_process_alone() -> None:
    found = chosen(strict=True)
    assert (found.way, found.is_joint, found.settings) == (Way.STOCK, False, StreamingConfig(strict=True))
    assert "for one process" in found.reason


def test_ranks_that_have_all_of_the_model(several: None) -> None:
    assert chosen().way is Way.STOCK and "share_reads=True" in chosen().reason
    blocks = [enter(StreamingConfig(share_reads=True))]
    try:
        found = chosen({"zero_optimization": {"stage": 2}})
    finally:
        leave(blocks)
    assert (found.way, found.is_joint, found.subject) == (Way.WHOLE, True, "LlamaForCausalLM from folder")
    assert found.ds_config == {"zero_optimization": {"stage": 2}}
    assert "device_map=" in chosen(device_map="cpu").reason


@pytest.mark.parametrize(("read_from", "is_joint"), [("all", False), ("rank0", True)])
def test_what_will_be_sharded(several: None, monkeypatch: pytest.MonkeyPatch, read_from: str, is_joint: bool) -> None:
    """Ranks meet for it only where one reads for others."""
    config = {"tensor_parallel": {"autotp_size": 2}, "hf_zero_stream": {"read_from": read_from}}
    found = chosen(config)
    assert (found.way, found.is_joint, found.settings.read_from) == (Way.AUTOTP, is_joint, read_from)
    monkeypatch.setattr(choice, "shards_by_fsdp2", lambda: True)
    assert chosen().way is Way.FSDP2 and chosen(device_map="cpu").way is Way.STOCK


def test_what_a_plugin_would_have_cut(several: None) -> None:
    cut = nn.Parameter(torch.ones(2))
    setattr(cut, CUT, {"conversion": {"replicated": False}})
    with without_plugin("autotp"):
        with pytest.raises(MissingPluginError, match=r"tensor_parallel.autotp_size needs the plug-in 'autotp'"):
            make_load(chosen({"tensor_parallel": {"autotp_size": 2}}), Coordinator.of_this_rank())
        with pytest.raises(MissingPluginError, match=r"AutoTP has cut needs the plug-in 'autotp'"):
            holdings(nn.ParameterList([cut]), masters=False, rank=0, world_size=1)


def test_a_destination_of_a_plugin_comes_first(several: None) -> None:
    found = chosen({"hf_zero_stream": {"destination": "columns"}}, tp_size=2)
    assert (found.way, found.is_joint, found.settings.destination) == (Way.PLUGIN, True, "columns")


def test_what_stock_cannot_read(tmp_path: Path) -> None:
    """A URL, or files of hosts' own: whole, by this rank alone."""
    found = for_one_rank(chosen(), "s3://bucket", {})
    assert (found.way, found.is_joint, found.device) == (Way.WHOLE, False, torch.device("cpu"))
