"""The destination of the third party's plug-in, without the plug-in: given to a load, and its holder to the list."""

import logging
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

import hf_zero_stream
from hf_zero_stream.engine.load import Load
from hf_zero_stream.holdings import holder
from hf_zero_stream.loading.dry_load import lazily_loaded
from hf_zero_stream.ranks.coordinator import Coordinator
from hf_zero_stream.reports.load import LoadReport
from hf_zero_stream.settings.config import StreamingConfig
from tests.plugins.distribution.odd_things.columns import Columns, held
from tests.support.cluster import run_ranks
from tests.support.saving import SHARD_SIZE, different, saves_with
from tests.support.zoo import Checkpoint


def loaded(folder: Path, rank: int, world_size: int) -> tuple[Any, LoadReport]:
    """A model that has its columns, by the path of any load, each element verified; what was done."""
    alone = Coordinator(rank, world_size, alone=True)
    load = Load(StreamingConfig(verify="full"), {}, alone, Columns(alone))
    with closing(load):
        model, missing, tied = lazily_loaded(str(folder), load)
        load.fill(model, missing, tied)
    model.tie_weights()
    return model, load.finish(nn.Module(), logging.getLogger(__name__))


@pytest.mark.plugin("verify")
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_loading(zoo_checkpoint: Checkpoint, name: str) -> None:
    folder = zoo_checkpoint(name)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    models, reports = zip(*(loaded(folder, rank, 3) for rank in range(3)), strict=True)
    for key, whole in plain.items():
        assert torch.equal(torch.cat([model.state_dict()[key] for model in models], dim=-1), whole)
    # Together they say what one rank says that has everything.
    (alone,) = loaded(folder, 0, 1)[1].ranks
    assert sum(int(report.digest, 16) for report in reports) % 2**64 == int(alone.verification.digest, 16)
    assert sum(report.ranks[0].bytes_needed for report in reports) == alone.bytes_needed


def save(folder: Path, target: Path, write_from: str) -> None:
    holder.HOLDERS.insert(0, held)
    model, _ = loaded(folder, dist.get_rank(), dist.get_world_size())
    with saves_with(write_from=write_from):
        hf_zero_stream.save_pretrained(model, target, max_shard_size=SHARD_SIZE)


@pytest.mark.plugin("verify")
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_saving(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, name: str) -> None:
    folder = zoo_checkpoint(name)
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder)
    whole.save_pretrained(tmp_path / "whole", max_shard_size=SHARD_SIZE)
    for write_from in ("all", "rank0"):
        run_ranks(3, save, folder, tmp_path / write_from, write_from)
        assert different(tmp_path / write_from, tmp_path / "whole") == []
