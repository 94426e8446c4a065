"""Training beside packed weights gives the losses of the dequantised model: every format, dense and a mixture.

Losses of three steps, alone, with hpZ, and with `offload_param` to the CPU: those of the dequantised model under
ZeRO-3, bit for bit, in bf16 and fp32; in fp32 those of one process without DeepSpeed to 3e-7. That process clips
gradients at 1.0, as DeepSpeed does where `gradient_clipping` is not set; without that, losses of MXFP4 differ by 4e-5.
"""

from collections.abc import Container
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist

from hf_zero_stream.holdings.introspection import packed_weights
from tests.support.cluster import run_ranks
from tests.support.packed_models import MODELS, Folders, in_file
from tests.support.packed_training import (
    count_alive,
    inputs,
    load,
    one_module_at_a_time,
    packed_names,
    plain_losses,
    trained,
    watched_memory,
    with_adapters,
)
from tests.support.parity import ds_config


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory)


def losses(folder: Path, homes_in_fp32: Container[str]) -> dict[str, Any]:
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
            if dtype == torch.float32 and home not in homes_in_fp32:
                continue
            engine, found[str(dtype)][home] = trained(folder, ds_config(dtype, **zero), True)
    found["names"] = packed_names(engine.module)
    return found


HOMES = ("alone", "hpZ", "offload")


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_losses(cluster: None, folders: Folders, name: str, world_size: int) -> None:
    """Bit for bit those of the dequantised model under ZeRO-3; in fp32 also those of one process without it."""
    (plain,) = run_ranks(1, plain_losses, folders(name), torch.float32)
    for found in run_ranks(world_size, losses, folders(name), HOMES, timeout=600):
        bf16, fp32 = found["torch.bfloat16"], found["torch.float32"]
        assert bf16["alone"] == bf16["hpZ"] == bf16["offload"] == bf16["dequantised"]
        assert all(fp32[home] == fp32["dequantised"] for home in HOMES)
        assert fp32["alone"] == pytest.approx(plain, rel=3e-7)  # an ulp of DeepSpeed's Adam grows
        assert len(set(bf16["alone"])) == len(set(fp32["alone"])) == 3, "three steps must change the loss"
        assert any("experts.down_proj" in each for each in found["names"]) == name.endswith("mixture")


@pytest.mark.slow
def test_losses_of_nodes(cluster: None, folders: Folders) -> None:
    """hpZ in two nodes of two ranks."""
    for found in run_ranks(4, losses, folders("FP8 by blocks, mixture"), HOMES, timeout=600):
        bf16 = found["torch.bfloat16"]
        assert bf16["alone"] == bf16["hpZ"] == bf16["offload"] == bf16["dequantised"]


# ------------------------------------------------------------------------------------------------------- memory


PADDING = 4
"""Bytes by which gathered parameters of a module are longer than what is packed."""


def memory(folder: Path) -> dict[str, Any]:
    from deepspeed.utils import z3_leaf_module

    config = one_module_at_a_time()
    base = load(folder, config)
    report = base.streaming_report.to_dict()["ranks"]
    model = with_adapters(base)
    trainable = [param for param in model.parameters() if param.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=trainable)
    alive_after_forward = []
    of_modules = (packed_weights(module).values() for module in base.modules())
    largest = max(sum(weight.row_bytes * len(weight.rows) for weight in each) for each in of_modules)
    with watched_memory(most=largest + PADDING) as seen:

        def look(module: Any, *_: Any) -> None:
            alive_after_forward.append(count_alive(seen["gathered"]))

        inside: set[Any] = set()
        for module in engine.module.modules():
            if z3_leaf_module(module):  # DeepSpeed gathers it as one
                inside.update(child for child in module.modules() if child is not module)
            if any(map(packed_weights, module.modules() if z3_leaf_module(module) else [module])):
                if module not in inside:
                    module.register_forward_hook(look)
        for _ in range(2):  # DeepSpeed knows the order of modules in the second step
            loss = engine(**inputs()).loss
            engine.backward(loss)
            engine.step()
            alive = count_alive(seen["gathered"])
    return {
        "after forward": max(alive_after_forward),
        "after backward": alive,
        "looked": len(alive_after_forward),
        "largest module": largest,
        "read": [rank["bytes_read"] for rank in report],
        "resident": sum(param.ds_tensor.nbytes for param in base.parameters() if not param.requires_grad),
        **{key: seen[key] for key in ("bytes", "peak", "matrices", "overlapping")},
    }


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MODELS)
def test_memory(cluster: None, folders: Folders, name: str) -> None:
    """Of packed bytes each rank reads and holds its part, and one module's are gathered at a time, and soon freed."""
    whole = in_file(folders(name, 256))
    for found in run_ranks(2, memory, folders(name, 256), timeout=300):
        assert all(read <= 1.02 * whole / 2 for read in found["read"])
        assert found["resident"] <= 1.02 * whole / 2
        assert sum(found["bytes"].values()) <= 1.02 * whole, "packed bytes are gathered"
        assert found["looked"] >= 2 and found["matrices"] > 1.5 * found["looked"]
        assert found["after forward"] == found["after backward"] == 0
        assert found["peak"] <= found["largest module"] + PADDING, "one module at a time"
        assert found["overlapping"] == 0, "one matrix at a time"
