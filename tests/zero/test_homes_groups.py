"""Parameters that are partitioned over other ranks than the rest, by DeepSpeed's `ds_zero_partition_process_group`."""

from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import initialization as init

from tests.support.cluster import run_ranks
from tests.support.loading import load_with
from tests.support.odd_models import WIDTH, Odd, OddConfig, fill
from tests.support.parity import ds_config


class Grouped(Odd):
    """One parameter is partitioned over two ranks at a time, and so is one of a submodule."""

    def build(self) -> None:
        self.experts = nn.Parameter(torch.zeros(5, WIDTH))
        if dist.is_initialized():
            first = dist.get_rank() // 2 * 2
            group = dist.new_group([first, first + 1], use_local_synchronization=True)
            self.experts.ds_zero_partition_process_group = group
            self.second.weight.ds_zero_partition_process_group = group

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Grouped):
            init.copy_(module.experts, torch.arange(5.0 * WIDTH).view(5, WIDTH))


def load_grouped(folder: Path) -> dict[str, Any]:
    plain = dict(load_with("plain", f"{__name__}:Grouped", folder, {}, {}).named_parameters())
    model = load_with("streamed", f"{__name__}:Grouped", folder, ds_config(), {})
    ranks = {name: param.ds_zero_partition_world_size for name, param in model.named_parameters()}
    own = {name: param.ds_tensor.numel() for name, param in model.named_parameters()}
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        different = [name for name, param in model.named_parameters() if not torch.equal(param.data, plain[name])]
    return {"different": different, "ranks": ranks, "own": own}


@pytest.mark.parametrize("missing", [False, True], ids=["whole", "missing"])
def test_group_of_a_parameter(cluster: None, tmp_path: Path, missing: bool) -> None:
    fill(Grouped(OddConfig())).save_pretrained(tmp_path)
    if missing:
        tensors = load_file(tmp_path / "model.safetensors")
        del tensors["experts"], tensors["first.weight"]
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for found in run_ranks(4, load_grouped, tmp_path):
        assert found["different"] == []
        assert found["ranks"] == {name: 2 if name in ("experts", "second.weight") else 4 for name in found["ranks"]}
        assert found["own"]["experts"] == -(-5 * WIDTH // 2)
