"""A new process group without new processes: a rank has gone, and those that are left go on in one of their own."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers.integrations import HfDeepSpeedConfig

import hf_zero_stream
from tests.support.cluster import free_port, run_ranks
from tests.support.sharded import even_inputs, even_model


CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
}

Step = Callable[[], float]


def streamed(folder: Path) -> Any:
    with hf_zero_stream.streaming():
        return transformers.AutoModelForCausalLM.from_pretrained(folder)


def under_fsdp2(folder: Path) -> tuple[Any, dict[str, Any], Step]:
    mesh, model = init_device_mesh("cpu", (dist.get_world_size(),)), streamed(folder)
    for part in [*model.model.layers, model]:
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step() -> float:
        loss = model(**even_inputs()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return model, {"optimizer": optimizer}, step


def under_zero3(folder: Path) -> tuple[Any, dict[str, Any], Step]:
    kept = HfDeepSpeedConfig(CONFIG)
    engine, *_ = deepspeed.initialize(model=streamed(folder), config=CONFIG)
    del kept

    def step() -> float:
        loss = engine(**even_inputs()).loss
        engine.backward(loss)
        engine.step()
        return float(loss)

    return engine, {}, step


def go_on_with_fewer(folder: Path, out: Path, home: str, port: int) -> dict[str, list[float]]:
    """Losses of a training that goes on, of a resume by the ranks that are left, and of one from hosts' memory."""
    begin = {"fsdp2": under_fsdp2, "zero3": under_zero3}[home]
    trained, own, step = begin(folder)
    step()
    hf_zero_stream.save_state(trained, out / "shared", **own)
    hf_zero_stream.save_state(trained, out / "hosts", hosts=True, **own)
    found = {"went on": [step(), step()]}
    dist.barrier()
    (deepspeed.comm if home == "zero3" else dist).destroy_process_group()
    rank = int(os.environ["RANK"])
    if rank == 2:
        return {}
    os.environ.update(WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_PORT=str(port))
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    for place in ("shared", "hosts"):
        trained, own, step = begin(folder)
        hf_zero_stream.load_state(trained, out / place, hosts=place == "hosts", **own)
        found[place] = [step(), step()]
    hf_zero_stream.save_state(trained, out / "again", **own)
    return found


@pytest.mark.plugin("hosts")
@pytest.mark.parametrize("home", ["fsdp2", "zero3"])
def test_a_rank_has_gone(cluster: None, tmp_path: Path, home: str) -> None:
    even_model("llama").save_pretrained(tmp_path / "model")
    for found in run_ranks(3, go_on_with_fewer, tmp_path / "model", tmp_path, home, free_port())[:2]:
        assert found["shared"] == found["hosts"] == pytest.approx(found["went on"], abs=1e-5)
        assert len(set(found["shared"])) == 2
