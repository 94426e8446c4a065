"""A destination in full, as an example: each rank holds some columns of every tensor, in plain CPU tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

import hf_zero_stream
from hf_zero_stream.destinations.base import Batch, Destination, Item, item_of, narrowed, replace_lazy
from hf_zero_stream.engine.load import Load
from hf_zero_stream.holdings import holder
from hf_zero_stream.holdings.holding import Holding, open_flat
from hf_zero_stream.loading.dry_load import lazily_loaded
from hf_zero_stream.planning.boxes import ParameterBox
from hf_zero_stream.planning.plan import Target
from hf_zero_stream.ranks.coordinator import Coordinator
from hf_zero_stream.reports.load import LoadReport
from hf_zero_stream.settings.config import StreamingConfig
from tests.support.cluster import run_ranks
from tests.support.saving import SHARD_SIZE, different, saves_with


class Columns(Destination):
    """The columns ``[width * rank / world_size, width * (rank + 1) / world_size)`` of every parameter."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def batches(
        self, model: nn.Module, missing: set[str], tied: set[str], *, only_planned: bool = False
    ) -> list[Batch]:
        def columns(name: str, param: torch.Tensor) -> nn.Parameter:
            box = self.box(tuple(param.shape))
            mine = nn.Parameter(torch.empty(box.sizes, dtype=param.dtype))
            mine.box = box  # type: ignore[attr-defined]
            return mine

        items: list[Item] = []
        parameters, _, _ = replace_lazy(model, missing, tied, parameter=columns, buffer=lambda buffer: None)
        for name, (mine, view) in parameters.items():
            target = Target.whole(name, mine.dtype, mine.numel(), mine.box)
            items.append(item_of(target, narrowed(view, mine.box), mine.detach().view(-1)))
        return [Batch(items)]

    def box(self, shape: tuple[int, ...]) -> ParameterBox:
        first, end = (shape[-1] * rank // self.world_size for rank in (self.rank, self.rank + 1))
        return ParameterBox(shape, (*ParameterBox.whole(shape[:-1]).intervals, ((first, end),)))


def held_columns(model: Any, params: Mapping[str, Any], **ranks: Any) -> dict[str, Holding]:
    def holding(mine: Any) -> Holding:
        return Holding(mine.box, mine.dtype, 0, mine.numel(), partial(open_flat, mine))

    return {name: holding(param) for name, param in params.items() if hasattr(param, "box")}


def loaded(folder: Path, rank: int, world_size: int) -> tuple[Any, LoadReport]:
    """A model that has its columns, by the path of any load, each element verified; what was done."""
    alone = Coordinator(rank, world_size, alone=True)
    load = Load(StreamingConfig(verify="full"), {}, alone, Columns(rank, world_size))
    with closing(load):
        model, missing, tied = lazily_loaded(str(folder), load)
        load.place(model, missing, tied)
    model.tie_weights()
    return model, load.finish(nn.Module(), logging.getLogger(__name__))


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_loading(zoo_checkpoint: Callable[..., Path], name: str) -> None:
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
    holder.HOLDERS.insert(0, held_columns)
    model, _ = loaded(folder, dist.get_rank(), dist.get_world_size())
    with saves_with(write_from=write_from):
        hf_zero_stream.save_pretrained(model, target, max_shard_size=SHARD_SIZE)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_saving(cluster: None, zoo_checkpoint: Callable[..., Path], tmp_path: Path, name: str) -> None:
    folder = zoo_checkpoint(name)
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder)
    whole.save_pretrained(tmp_path / "whole", max_shard_size=SHARD_SIZE)
    for write_from in ("all", "rank0"):
        run_ranks(3, save, folder, tmp_path / write_from, write_from)
        assert different(tmp_path / write_from, tmp_path / "whole") == []
