"""Models that every rank has in full.

- Stages 0 to 2 and data parallelism: every rank has the plain load's bits and read 1/N of the files.
- Each parameter has memory that is its own to save, pickle, copy and share, wherever a load put it.
"""

import copy
import io
import os
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import hf_zero_stream
from hf_zero_stream.checkpoint.lazy import LazyTensor
from hf_zero_stream.checkpoint.nodes import HostTensor, View
from hf_zero_stream.destinations import parallel
from hf_zero_stream.destinations.exchange import Shared, rounds_of
from hf_zero_stream.errors import ReadError
from hf_zero_stream.holdings.holding import LocalShard
from hf_zero_stream.holdings.introspection import is_streamed
from hf_zero_stream.planning.boxes import ParameterBox
from hf_zero_stream.ranks.coordinator import Coordinator
from hf_zero_stream.settings.config import StreamingConfig
from hf_zero_stream.sources.local import LocalFiles
from tests.support.checkpoint_files import differing
from tests.support.cluster import run_ranks
from tests.support.parity import ds_config, three_losses
from tests.support.zoo import ZOO, Checkpoint


def share_reads() -> None:
    os.environ["HF_ZERO_STREAM_SHARE_READS"] = "1"


def load_shared(name: str, folder: Path, dtype: torch.dtype) -> list[str]:
    """What differs from a plain load, and whether the ranks read as much as there is, once."""
    share_reads()
    auto_class = ZOO[name].auto_class
    plain = getattr(transformers, auto_class).from_pretrained(folder, dtype=dtype)
    torch.manual_seed(0)
    model = getattr(hf_zero_stream, f"Streaming{auto_class}").from_pretrained(folder, dtype=dtype)
    found = [
        key
        for (key, value), (other, expected) in zip(model.state_dict().items(), plain.state_dict().items(), strict=True)
        if key != other or value.dtype != expected.dtype or not torch.equal(value, expected)
    ]
    for (key, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        if param.requires_grad != expected.requires_grad or hasattr(param, "ds_id"):
            found.append(f"{key}: requires_grad or ZeRO-3")
    total = sum(rank.bytes_read for rank in model.streaming_report.ranks)
    on_disk = sum(os.path.getsize(path) for path in folder.glob("*.safetensors"))
    if dist.get_world_size() > 1 and not 0.8 * on_disk < total < 1.05 * on_disk:
        found.append(f"the ranks read {total} bytes of {on_disk}")
    return found


@pytest.mark.parametrize("name", list(ZOO))
@pytest.mark.parametrize("world_size", [2, 3])
def test_values_equal_plain_loading(cluster: None, zoo_checkpoint: Checkpoint, name: str, world_size: int) -> None:
    folder = zoo_checkpoint(name, torch.bfloat16)
    assert run_ranks(world_size, load_shared, name, folder, torch.bfloat16) == [[]] * world_size


def test_a_cast_and_small_chunks(cluster: None, zoo_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters larger than a chunk pass in several."""
    monkeypatch.setenv("HF_ZERO_STREAM_STAGING_BYTES", "4096")
    folder = zoo_checkpoint("qwen3_moe", torch.float32)
    assert run_ranks(2, load_shared, "qwen3_moe", folder, torch.bfloat16) == [[], []]


def losses(folder: Path, stage: int, streams: bool) -> list[float]:
    config = ds_config(torch.bfloat16)
    config["zero_optimization"] = {"stage": stage}
    share_reads()
    library: Any = hf_zero_stream if streams else transformers
    auto_class = getattr(library, "StreamingAutoModelForCausalLM" if streams else "AutoModelForCausalLM")
    model = auto_class.from_pretrained(folder, dtype=torch.bfloat16)
    assert is_streamed(model) == streams
    engine, *_ = deepspeed.initialize(model=model, config=config)
    return three_losses(engine, ZOO["qwen3_moe"].inputs)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.sample(1)
def test_losses_equal_stock(cluster: None, zoo_checkpoint: Checkpoint, stage: int) -> None:
    folder = zoo_checkpoint("qwen3_moe", torch.bfloat16)
    runs = [run_ranks(2, losses, folder, stage, streams) for streams in (True, False)]
    assert runs[0] == runs[1]
    assert len(set(runs[0][0])) == 3


def left_to_transformers(folder: Path) -> list[bool]:
    auto_class = hf_zero_stream.StreamingAutoModelForCausalLM
    with hf_zero_stream.streaming():
        by_default = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert "with share_reads=True each reads a part" in by_default.streaming_report.stock_reason
    share_reads()
    by_device_map = auto_class.from_pretrained(folder, device_map="cpu")
    return [is_streamed(model) for model in (by_default, by_device_map)]


def test_loads_that_are_left_to_transformers(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    folder = zoo_checkpoint("qwen3_moe", torch.bfloat16)
    assert run_ranks(2, left_to_transformers, folder) == [[False, False]] * 2


def broken_on_one_rank(folder: Path) -> str:
    """The error that each rank gets if the shards cannot be read on rank 1."""
    share_reads()

    def fail(self: Any, *args: Any) -> None:
        raise ReadError("made to fail")

    broken = mock.patch.object(LocalFiles, "read_into", fail if dist.get_rank() else LocalFiles.read_into)
    auto_class = hf_zero_stream.StreamingAutoModelForCausalLM
    with broken:
        try:
            auto_class.from_pretrained(folder)
        except ReadError as error:
            message = str(error)
    auto_class.from_pretrained(folder)
    return message


def test_a_rank_that_cannot_read_fails_all(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    folder = zoo_checkpoint("qwen3_moe", torch.bfloat16)
    assert run_ranks(2, broken_on_one_rank, folder) == ["rank 1: made to fail", "made to fail"]


@pytest.mark.parametrize("room", [16, 32, 48, 192, 992, 10**6])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("of_all", [True, False])
def test_rounds_cover_every_element_once(room: int, world_size: int, of_all: bool) -> None:
    """What the ranks read together is every element of every tensor, and all ranks have the same rounds.

    If not `of_all`, there are two groups of ranks, of which one has fewer elements.
    """
    seen: dict[tuple[str, int], torch.Tensor] = {}
    shapes = set()
    for rank in range(world_size if of_all else 2 * world_size):
        shape = []
        group = 0 if of_all else rank % 2
        ranks = [*range(world_size)] if of_all else [*range(group, 2 * world_size, 2)]
        tensors = []
        for most in (0, 1, 2, 7, 64, 501):
            local = torch.zeros(max(0, most - group), dtype=[torch.float32, torch.bfloat16][most % 2])
            seen.setdefault((str(most), group), torch.zeros(local.numel(), dtype=torch.int64))
            view = View.whole(HostTensor.of(local))
            whole = LocalShard(ParameterBox.whole(local.shape), 0, 1)
            tensors.append(Shared.of_replicas(str(most), local, view, whole, ranks, most))
        each_room = max(room, 4 * world_size)
        for parts, is_gathered, used in rounds_of(tensors, world_size if of_all else 2 * world_size, each_room):
            assert is_gathered == of_all and used <= (max(16, each_room // world_size) if of_all else each_room)
            for part in parts:
                start, stop = part.rows_of(ranks.index(rank))
                assert part.offset % 16 == 0 and part.offset + (stop - start) * part.shared.row_bytes <= used
                seen[part.shared.name, group][start:stop] += 1
                shape.append((used, part.shared.name, part.first, part.most, part.offset))
        shapes.add(tuple(shape))
    assert len(shapes) == 1
    assert all(bool((count == 1).all()) for count in seen.values())


def config_of(stage: int) -> dict[str, Any]:
    config = ds_config(torch.bfloat16)
    config["zero_optimization"]["stage"] = stage
    return config


def load(folder: Path, config: dict[str, Any], **settings: Any) -> Any:
    with hf_zero_stream.streaming(hf_zero_stream.StreamingConfig(share_reads=True, **settings)):
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
    monkeypatch.setattr(parallel, "is_accelerator", lambda device: True)
    values = torch.arange(6.0).view(2, 3)

    def device(free: int) -> str:
        monkeypatch.setattr(parallel, "free_bytes", lambda device: free)
        model = nn.Linear(3, 2, bias=False)
        model.weight = nn.Parameter(LazyTensor.whole(HostTensor.of(values), lambda _: values))
        config, ranks = StreamingConfig(staging_bytes=2**18), Coordinator(0, 2, alone=True)
        destination = parallel.Replicated(ranks, config, torch.device("meta"), stage)
        (batch,) = destination.batches(model, set(), set())
        assert [item.memory().device.type for item in batch.items] == [model.weight.device.type]
        return model.weight.device.type

    assert device(2**20) == "cpu" and device(2**21) == "meta"
