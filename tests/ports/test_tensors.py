"""`load_tensors` and `save_tensors`: any module, in any memory; a source, a format, a destination of one's own."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hf_zero_stream
from hf_zero_stream.bindings.table import TABLE, installed
from hf_zero_stream.errors import CheckpointError, LoadError
from hf_zero_stream.plugin_api import Coordinator
from hf_zero_stream.registry import PatchScope
from tests.ports.test_byte_source import Raw
from tests.ports.test_destination_example import Columns
from tests.support.cluster import run_ranks
from tests.support.memory_files import MemoryFiles


class Body(nn.Module):
    """Odd sizes, a buffer that is saved and one that is not, and a tie."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.up = nn.Linear(6, 11)
        self.down = nn.Linear(11, 6, bias=False)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.zeros(5))
        self.register_buffer("table", torch.full((3,), 2.0), persistent=False)


def values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in Body().state_dict().items() if name != "head.weight"}
    # Whole in bf16, which DeepSpeed's Init chooses on a CPU, whatever it is told.
    return {name: torch.randint(-99, 99, shape, generator=generator).float() for name, shape in shapes.items()}


def body(how: str) -> Any:
    """A body that is sharded in this way, with other values."""
    if how == "zero3":
        import deepspeed

        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
        with deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.float32):
            return Body()
    model: Any = Body()
    if how == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    if how == "tp":
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)
    return model


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    with deepspeed.zero.GatheredParameters([*model.parameters()]):
        state = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
        full = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}
        return {name: value.detach().float() for name, value in full.items()}


def trials(folder: Path, target: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    expected = values()
    for how in ("whole", "fsdp2", "tp", "zero3"):
        model = body(how)
        report = hf_zero_stream.load_tensors(model, folder, names=lambda name: name.removeprefix("model."))
        mine = whole(model)
        wrong = [name for name in expected if not torch.equal(mine[name], expected[name])]
        assert torch.equal(model.table, torch.full((3,), 2.0)), "not in the checkpoint"
        hf_zero_stream.save_tensors(model, target / how, max_shard_size=300, dtype="fp32")
        found[how] = wrong, report.ranks[dist.get_rank()].bytes_needed
    return found


def test_any_module(cluster: None, tmp_path: Path) -> None:
    expected = values()
    save_file({f"model.{name}": value for name, value in expected.items()}, tmp_path / "model.safetensors")
    nbytes = sum(value.nbytes for value in expected.values())
    for of_rank in run_ranks(2, trials, tmp_path, tmp_path):
        for how, (wrong, needed) in of_rank.items():
            assert wrong == [], how
            assert needed < 0.8 * nbytes, how
    for how in ("whole", "fsdp2", "tp", "zero3"):
        shards = sorted((tmp_path / how).glob("*.safetensors"))
        saved = {name: value.float() for shard in shards for name, value in load_file(shard).items()}
        assert len(shards) > 1 and saved.keys() == expected.keys()
        assert all(torch.equal(saved[name], value) for name, value in expected.items()), how


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 10), nn.Linear(10, 8))


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(4)
    return layers().state_dict()


class Watching(MemoryFiles):
    """Notes which functions of other libraries are replaced while it is asked."""

    replaced: set[PatchScope]

    def read_into(self, *args: Any) -> None:
        self.replaced = {moment for moment in TABLE if installed(moment)}
        super().read_into(*args)


def own_parts() -> tuple[dict[str, torch.Tensor], set[PatchScope], list[int]]:
    """A source, a destination and a format of a user's own, given to the public function."""
    coordinator, sources = Coordinator.of_default_group(), []

    def source() -> Watching:
        sources.append(Watching({"bucket/1": save(weights())}))
        return sources[-1]

    with torch.device("meta"):
        model = layers()
    hf_zero_stream.load_tensors(model, ["bucket/1"], source=source, destination=Columns(coordinator))
    raw = nn.Module()
    raw.register_buffer("x", torch.zeros(4, dtype=torch.uint8))
    hf_zero_stream.load_tensors(raw, ["x"], source=lambda: MemoryFiles({"x": b"\1\2\3\4"}), format=Raw())
    parts = {name: param.detach() for name, param in model.named_parameters()}
    return parts, sources[0].replaced, raw.x.tolist()


def test_parts_of_ones_own(cluster: None) -> None:
    parts, replaced, raw = zip(*run_ranks(3, own_parts), strict=True)
    for name, value in weights().items():
        assert torch.equal(torch.cat([part[name] for part in parts], dim=-1), value), name
    assert replaced == (set(), set(), set()) and raw == ([1, 2, 3, 4],) * 3


@pytest.mark.parametrize("strict", [True, False])
def test_what_does_not_fit(tmp_path: Path, strict: bool) -> None:
    tensors = values()
    other = tensors | {"up.bias": torch.ones(4), "more": torch.ones(2)}
    del other["scale"]
    save_file(other, tmp_path / "model.safetensors")
    model = Body()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    load = partial(hf_zero_stream.load_tensors, model, tmp_path, strict=strict)
    if strict:
        with pytest.raises(LoadError, match=r"1 missing: scale; 1 unexpected: more; 1 of another shape: up.bias"):
            load()
        expected = before
    else:
        load()
        kept = {name: before[name] for name in ("scale", "up.bias")}
        expected = {**tensors, **kept, "head.weight": tensors["embed.weight"]}
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("strict", [True, False])
def test_a_tensor_that_only_the_index_has(tmp_path: Path, strict: bool) -> None:
    tensors = values()
    save_file({name: value for name, value in tensors.items() if name != "up.bias"}, tmp_path / "one.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "one.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="up.bias"):
        hf_zero_stream.load_tensors(Body(), tmp_path, strict=strict)


def test_two_names_for_one(tmp_path: Path) -> None:
    save_file(values(), tmp_path / "model.safetensors")
    with pytest.raises(LoadError, match=r"makes up.weight of down.weight|makes up.weight of up.weight"):
        hf_zero_stream.load_tensors(Body(), tmp_path, names=lambda name: name.replace("down", "up"))
