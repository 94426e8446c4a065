"""Training beside packed weights gives the losses of the dequantised model: every format, dense and a mixture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.cluster import run_ranks
from tests.packed_models import MODELS, Folders
from tests.packed_training import packed_names, plain_losses, trained
from tests.parity import ds_config


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory)


def losses(folder: Path) -> dict[str, Any]:
    world_size = dist.get_world_size()
    homes: dict[str, dict[str, Any]] = {
        "alone": {},
        "hpZ": {"zero_hpz_partition_size": 2 if world_size % 2 == 0 else world_size},
        "offload": {"offload_param": {"device": "cpu"}},
    }
    found: dict[str, Any] = {}
    for dtype in (torch.bfloat16, torch.float32):
        _, dequantised = trained(folder, ds_config(dtype), False)
        found[str(dtype)] = {"dequantised": dequantised}
        for home, zero in homes.items():
            engine, found[str(dtype)][home] = trained(folder, ds_config(dtype, **zero), True)
    found["names"] = packed_names(engine.module)
    return found


@pytest.mark.sample(4)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_losses(cluster: None, folders: Folders, name: str, world_size: int) -> None:
    """Bit for bit those of the dequantised model under ZeRO-3; in fp32 also those of one process without it."""
    (plain,) = run_ranks(1, plain_losses, folders(name), torch.float32)
    for found in run_ranks(world_size, losses, folders(name), timeout=600):
        bf16, fp32 = found["torch.bfloat16"], found["torch.float32"]
        assert bf16["alone"] == bf16["hpZ"] == bf16["offload"] == bf16["dequantised"]
        assert fp32["alone"] == fp32["hpZ"] == fp32["offload"] == fp32["dequantised"]
        assert fp32["alone"] == pytest.approx(plain, rel=3e-7)  # an ulp of DeepSpeed's Adam grows
        assert len(set(bf16["alone"])) == len(set(fp32["alone"])) == 3, "three steps must change the loss"
        assert any("experts.down_proj" in each for each in found["names"]) == name.endswith("mixture")


@pytest.mark.slow
def test_losses_of_nodes(cluster: None, folders: Folders) -> None:
    """hpZ in two nodes of two ranks."""
    for found in run_ranks(4, losses, folders("FP8 by blocks, mixture"), timeout=600):
        bf16 = found["torch.bfloat16"]
        assert bf16["alone"] == bf16["hpZ"] == bf16["offload"] == bf16["dequantised"]
