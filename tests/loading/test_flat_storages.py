"""Each parameter has memory that is its own to save, pickle, copy and share, wherever a load put it."""

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import hf_zero_stream
from hf_zero_stream.checkpoint.lazy import LazyTensor
from hf_zero_stream.checkpoint.nodes import HostTensor
from hf_zero_stream.destinations.deepspeed import flat
from hf_zero_stream.destinations.deepspeed.flat import EngineReplicas
from hf_zero_stream.holdings.deepspeed import partitions as own
from hf_zero_stream.ranks.coordinator import Coordinator
from hf_zero_stream.settings.config import StreamingConfig
from tests.support.checkpoint_files import differing
from tests.support.cluster import run_ranks
from tests.support.parity import ds_config, three_losses
from tests.support.zoo import ZOO, Checkpoint


def config_of(stage: int) -> dict[str, Any]:
    config = ds_config(torch.bfloat16)
    config["zero_optimization"]["stage"] = stage
    return config


def load(folder: Path, config: dict[str, Any], **settings: Any) -> Any:
    with hf_zero_stream.streaming(hf_zero_stream.StreamingConfig(**settings)):
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, ds_config=config)


def saved_bytes(value: Any) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return len(file.getvalue())


def handle(folder: Path, out: Path, stage: int) -> dict[str, Any]:
    """What users do with a model before `deepspeed.initialize`."""
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    expected = plain.state_dict()
    model = load(folder, config_of(stage))
    found: dict[str, Any] = {"loaded": differing(model.state_dict(), expected)}
    pairs = list(zip([*model.parameters(), *model.buffers()], [*plain.parameters(), *plain.buffers()], strict=True))
    found["storages"] = sum(
        mine.untyped_storage().nbytes() != other.untyped_storage().nbytes() for mine, other in pairs
    )
    found["offsets"] = sum(mine.storage_offset() for mine, _ in pairs)
    found["torch.save"] = sum(abs(saved_bytes(mine) - saved_bytes(other)) > 64 for mine, other in pairs)
    found["pickle"] = sum(abs(len(pickle.dumps(mine)) - len(pickle.dumps(other))) > 64 for mine, other in pairs)
    found["state dict"] = saved_bytes(model.state_dict()) < saved_bytes(expected) + 64 * len(expected)
    path = out / f"{torch.distributed.get_rank()}.safetensors"
    save_file(model.state_dict(), path)
    found["safetensors"] = differing(load_file(path), expected)
    duplicate = copy.deepcopy(model)
    with torch.no_grad():
        model.lm_head.weight.add_(1)
        model.lm_head.weight.sub_(model.lm_head.weight).add_(plain.lm_head.weight)
    found["a copy"] = differing(duplicate.state_dict(), expected)
    found["shared"] = all(param.is_shared() for param in duplicate.share_memory().parameters())
    found["a shared copy"] = differing(duplicate.state_dict(), expected)

    losses = []
    for one in (model, copy.deepcopy(model)):
        engine = deepspeed.initialize(model=one, config=config_of(stage))[0]
        losses.append(three_losses(engine, ZOO["llama"].inputs))
    found["losses"] = losses[0] == losses[1] and len(set(losses[0])) == 3
    return found


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_every_parameter_is_its_own(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, stage: int) -> None:
    for found in run_ranks(2, handle, zoo_checkpoint("llama", torch.bfloat16), tmp_path, stage):
        assert found == {
            "loaded": [],
            "storages": 0,
            "offsets": 0,
            "torch.save": 0,
            "pickle": 0,
            "state dict": True,
            "safetensors": [],
            "a copy": [],
            "shared": True,
            "a shared copy": [],
            "losses": True,
        }


def partitions(folder: Path) -> list[str]:
    """ZeRO-3 partitions and buffers that do not have a storage of their size alone."""
    model = load(folder, config_of(3))
    tensors = {**{name: param.ds_tensor for name, param in model.named_parameters()}, **dict(model.named_buffers())}
    return [name for name, tensor in tensors.items() if tensor.untyped_storage().nbytes() != tensor.nbytes]


def test_every_partition_is_its_own(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    assert run_ranks(2, partitions, zoo_checkpoint("llama", torch.bfloat16)) == [[], []]


@pytest.mark.parametrize("stage", [0, 2])
def test_on_the_device(monkeypatch: pytest.MonkeyPatch, stage: int) -> None:
    """Where it has room; a device without memory stands in for one."""
    monkeypatch.setattr(own, "local_device", lambda: torch.device("meta"))
    monkeypatch.setattr(flat, "is_accelerator", lambda device: True)
    values = torch.arange(6.0).view(2, 3)

    def device(free: int) -> str:
        monkeypatch.setattr(flat, "free_bytes", lambda device: free)
        model = nn.Linear(3, 2, bias=False)
        model.weight = nn.Parameter(LazyTensor.whole(HostTensor.of(values), lambda _: values))
        destination = EngineReplicas(
            config_of(stage), Coordinator(0, 2, alone=True), StreamingConfig(staging_bytes=2**18)
        )
        (_, batch) = destination.batches(model, set(), set())
        assert [item.memory().device.type for item in batch.items] == [model.weight.device.type]
        return model.weight.device.type

    assert device(2**20) == "cpu" and device(2**21) == "meta"
