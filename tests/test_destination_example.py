"""A destination in full, as an example: each rank holds some columns of every tensor, in plain CPU tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from hf_zero_stream.config import StreamingConfig
from hf_zero_stream.destinations.base import Batch, Destination, Item, item_of, narrowed, source_of
from hf_zero_stream.loading.dry_load import lazily_loaded
from hf_zero_stream.loading.load import Load
from hf_zero_stream.planning.plan import ParameterBox, Target
from hf_zero_stream.ranks.coordinator import Coordinator
from hf_zero_stream.reports.load import LoadReport


class Columns(Destination):
    """The columns ``[width * rank / world_size, width * (rank + 1) / world_size)`` of every tensor."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.held: dict[str, torch.Tensor] = {}

    def batches(
        self, model: nn.Module, missing: set[str], tied: set[str], *, only_planned: bool = False
    ) -> list[Batch]:
        items: list[Item] = []
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            view = source_of(tensor)
            if view is not None and name not in missing | tied:
                box = self.box(tuple(tensor.shape))
                mine = self.held[name] = torch.empty(box.sizes, dtype=tensor.dtype)
                target = Target.whole(name, mine.dtype, mine.numel(), box)
                items.append(item_of(target, narrowed(view, box), mine.view(-1)))
        return [Batch(items)]

    def box(self, shape: tuple[int, ...]) -> ParameterBox:
        first, end = (shape[-1] * rank // self.world_size for rank in (self.rank, self.rank + 1))
        return ParameterBox(shape, (*[0] * (len(shape) - 1), first), (*shape[:-1], end - first))


def loaded(folder: Path, destination: Columns) -> LoadReport:
    """Fill `destination` by the path of any load, each element verified; what was done."""
    alone = Coordinator(destination.rank, destination.world_size, alone=True)
    load = Load(StreamingConfig(verify="full", seek_bytes=64), {}, alone, destination)
    lazily_loaded(str(folder), load, load.place)
    return load.finish(nn.Module(), logging.getLogger(__name__))


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_columns(zoo_checkpoint: Callable[..., Path], name: str) -> None:
    folder = zoo_checkpoint(name)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    destinations = [Columns(rank, 3) for rank in range(3)]
    reports = [loaded(folder, destination) for destination in destinations]
    for key in destinations[0].held:
        assert torch.equal(torch.cat([destination.held[key] for destination in destinations], dim=-1), plain[key])
    assert plain.keys() - destinations[0].held.keys() <= {"lm_head.weight"}, "where it is tied"
    # Together they say what one rank says that has everything.
    (whole,) = loaded(folder, Columns(0, 1)).ranks
    assert sum(int(report.digest, 16) for report in reports) % 2**64 == int(whole.verification.digest, 16)
    assert sum(report.ranks[0].bytes_needed for report in reports) == whole.bytes_needed
