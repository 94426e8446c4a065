"""checkpoint-engine: each rank's parameter server holds its share of the weights, by files or by a weight stream."""

import argparse
from itertools import chain
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
import torch.distributed as dist
import transformers
from checkpoint_engine import ps
from transformers.integrations import HfDeepSpeedConfig

from benchmarks.clients.common import (
    ADAMW,
    STEPS,
    TRAINED,
    batch,
    digest,
    ds_config,
    in_memory,
    load,
    rank,
    report,
    world_size,
)


NAME = "step 3"


class NoDevices:
    """In place of a host's GPUs."""

    device_type = "cpu"
    device_module = SimpleNamespace(device_count=world_size, set_device=lambda index: None)


ps.DeviceManager = NoDevices
ps._get_physical_gpu_id = lambda manager, index: str(index)


def register(server: Any, **what: Any) -> None:
    """In memory that is not pinned, as there are no devices."""
    empty = torch.empty
    with patch.object(torch, "empty", lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs)):
        server.register_checkpoint(NAME, **what)


def held(server: Any) -> dict[str, torch.Tensor]:
    """What a parameter server holds."""
    found = {}
    for buffer in server._get_memory_pool(NAME):
        at = 0
        for each in buffer.metas:
            nbytes = each.shape.numel() * each.dtype.itemsize
            found[each.name] = buffer.buffer[at : at + nbytes].view(each.dtype).view(each.shape)
            at += each.aligned_size
    return found


def parameter_server(settings: argparse.Namespace) -> None:
    deepspeed.init_distributed("gloo")
    transformers.set_seed(42)
    config = ds_config(optimizer=ADAMW)
    keeps_zero_3 = HfDeepSpeedConfig(config)  # as long as it lives
    model = load(settings.folder)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    losses = []
    for step in range(STEPS):
        loss = engine(input_ids=batch(step), labels=batch(step)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    server = ps.ParameterServer(auto_pg=False)
    if settings.streams:
        import hf_zero_stream

        stream = hf_zero_stream.weight_stream(engine, to="owners")
        register(server, named_tensors={name: tensor.cpu() for bucket in stream for name, tensor in bucket})
    else:
        folder = settings.folder / TRAINED / "files"
        state = engine._zero3_consolidated_16bit_state_dict()
        if rank() == 0:
            model.save_pretrained(folder, state_dict=state)
        dist.barrier()
        register(server, files=list(map(str, folder.glob("*.safetensors"))) if rank() == 0 else [])
    server.gather_metas(NAME)
    shares: list[Any] = [None] * world_size()
    dist.all_gather_object(shares, held(server))
    assert len({name for share in shares for name in share}) == sum(map(len, shares))
    memory = in_memory(model)
    report(settings.folder, model, losses, memory=memory, files=digest(chain.from_iterable(map(dict.items, shares))))
    del keeps_zero_3
