"""Plans are data: made for any rank of any world, on this machine, without a process group."""

import pickle
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

import hf_zero_stream
from hf_zero_stream.checkpoint.formats import read_map
from hf_zero_stream.errors import ConfigError
from hf_zero_stream.planning.plan import Target, plan_batch
from hf_zero_stream.seams import converters
from hf_zero_stream.sources.local import _HeaderFile
from tests.support.parity import ds_config
from tests.support.quantised_checkpoints import fp8
from tests.support.zoo import ZOO, Checkpoint


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        *((name, world_size) for name in ZOO for world_size in (1, 2, 7)),
        ("qwen3_moe", 64),
        pytest.param("qwen3_vl_moe", 64, marks=pytest.mark.slow),
    ],
)
def test_ranks_share_the_checkpoint(zoo_checkpoint: Checkpoint, name: str, world_size: int) -> None:
    """Together the ranks fill every element of every parameter once, in file order."""
    plans = [
        hf_zero_stream.plan(str(zoo_checkpoint(name)), world_size=world_size, rank=rank).load
        for rank in range(world_size)
    ]
    assert not torch.distributed.is_initialized()
    for position, target in enumerate(plans[0].targets):
        ranges = [(plan.targets[position].start, plan.targets[position].stop) for plan in plans]
        replicated = world_size > 1 and len(set(ranges)) == 1
        assert replicated or all(before[1] == after[0] for before, after in pairwise(ranges))
        assert ranges[0][0] == 0
        for plan in plans:
            filled = sum(piece.box.numel for read in plan for piece in read.pieces if piece.target == position)
            assert filled == plan.targets[position].stop - plan.targets[position].start
    for plan in plans:
        order = [(read.shard, read.start) for read in plan]
        assert order == sorted(order)
        assert plan.cost.reads == len(list(plan))
        assert plan.cost.target_bytes == sum(target.nbytes for target in plan.targets)


def test_plan_follows_the_ds_config(zoo_checkpoint: Checkpoint) -> None:
    folder = str(zoo_checkpoint("llama"))
    as_is = hf_zero_stream.plan(folder, world_size=2).load
    halved = hf_zero_stream.plan(folder, world_size=2, ds_config=ds_config(torch.bfloat16)).load
    asked = hf_zero_stream.plan(folder, world_size=2, dtype="bfloat16").load
    assert {target.dtype for target in as_is.targets} == {torch.float32}
    assert halved.cost.target_bytes == asked.cost.target_bytes
    assert halved.cost.target_bytes < 0.6 * as_is.cost.target_bytes
    assert halved.cost.bytes_needed == as_is.cost.bytes_needed, "the file's bytes are the same"


def assert_data(folder: Path, **kwargs: Any) -> None:
    """The plan of a load can be pickled, printed and compared."""
    found = hf_zero_stream.plan(str(folder), world_size=2, rank=1, **kwargs)
    assert any(batch.placements for batch in found.load.batches) == bool(kwargs)
    copied = pickle.loads(pickle.dumps(found))
    assert copied == found and repr(copied) == repr(found)
    assert found == hf_zero_stream.plan(str(folder), world_size=2, rank=1, **kwargs)
    assert found != hf_zero_stream.plan(str(folder), world_size=2, rank=0, **kwargs)


def test_a_plan_is_data(zoo_checkpoint: Checkpoint) -> None:
    assert_data(zoo_checkpoint("qwen3_moe"))


@pytest.mark.plugin("packed")
def test_a_plan_is_data_where_functions_give_values(tmp_path: Path) -> None:
    fp8(tmp_path)
    assert_data(tmp_path, quantization_config=transformers.FineGrainedFP8Config(dequantize=True))


def test_plan_takes_settings(zoo_checkpoint: Checkpoint) -> None:
    config = {**ds_config(), "hf_zero_stream": {"staging_bytes": 8 * 4096}}
    plan = hf_zero_stream.plan(str(zoo_checkpoint("llama")), world_size=1, ds_config=config).load
    assert max(read.length for read in plan) <= 4096


@pytest.mark.parametrize("kwargs", [{}, {"distributed_config": {"fsdp_size": 2}}], ids=["ZeRO-3", "FSDP2"])
def test_plan_has_the_settings_of_its_block(zoo_checkpoint: Checkpoint, kwargs: dict[str, Any]) -> None:
    with hf_zero_stream.streaming(hf_zero_stream.StreamingConfig(staging_bytes=8 * 4096)):
        plan = hf_zero_stream.plan(str(zoo_checkpoint("llama")), world_size=2, **kwargs).load
    assert max(read.length for read in plan) <= 4096


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_rank_must_be_in_the_world(zoo_checkpoint: Checkpoint, rank: int, world_size: int) -> None:
    with pytest.raises(ConfigError, match="rank"):
        hf_zero_stream.plan(str(zoo_checkpoint("llama")), world_size=world_size, rank=rank)


def test_planning_layers_need_neither_deepspeed_nor_transformers() -> None:
    """The planner must be usable, and testable, without the libraries that it plans for."""
    code = (
        "import sys, hf_zero_stream.planning.plan, hf_zero_stream.checkpoint.lazy;"
        "assert not {'deepspeed', 'transformers'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_moe", "llama4", "t5"])
def test_short_cuts_change_nothing(monkeypatch: pytest.MonkeyPatch, zoo_checkpoint: Checkpoint, name: str) -> None:
    """With a converter copied for each key, as in transformers, the plan is the same."""
    fast = hf_zero_stream.plan(str(zoo_checkpoint(name)), world_size=3, rank=1)
    monkeypatch.delattr(converters._LazyConverter, "__deepcopy__")
    assert hf_zero_stream.plan(str(zoo_checkpoint(name)), world_size=3, rank=1) == fast


def test_headers_are_all_that_is_read(zoo_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of files, in whatever world: ranks of other hosts, whose copies a load would look into, are not there."""
    ends: dict[str, int] = {}
    real = _HeaderFile.read

    def read(self: _HeaderFile, start: int, nbytes: int) -> bytes:
        ends[self.file.name] = max(ends.get(self.file.name, 0), start + nbytes)
        return real(self, start, nbytes)

    monkeypatch.setattr(_HeaderFile, "read", read)
    plan = hf_zero_stream.plan(str(zoo_checkpoint("llama")), world_size=4, rank=3).load
    for number, shard in enumerate(plan.shards):
        first = 8 + int.from_bytes(Path(shard.path).read_bytes()[:8], "little")
        assert ends[shard.path] == first
        assert all(read.start >= first for read in plan if read.shard == number)


def test_neighbours_in_the_file_and_in_the_target_are_one_piece(tmp_path: Path) -> None:
    """Experts' projections lie side by side in both, and each piece has its price."""
    tensors = {name: torch.randn(4, 8) for name in ("a", "b", "c")}
    save_file(tensors, tmp_path / "model.safetensors")
    lazy = {
        name: item[...]
        for name, item in read_map([tmp_path / "model.safetensors"]).slices(lambda _: torch.empty(0)).items()
    }
    fused = torch.cat([lazy["a"], lazy["b"], lazy["c"]])

    def pieces(target: Target, view: Any, **how: int) -> list[int]:
        plan, _ = plan_batch([(target, view)], **{"request_bytes": 2**20, "seek_bytes": 0, **how})
        return [piece.stop - piece.start for read in plan.reads for piece in read.pieces]

    whole = Target("x", torch.float32, 96, 0, 96)
    assert pieces(whole, fused.view_of_node) == [384]
    assert pieces(whole, fused.view_of_node, request_bytes=256) == [256, 128]
    assert pieces(Target("x", torch.bfloat16, 96, 0, 96), fused.view_of_node) == [384], "with the same cast"
    turned = torch.cat([lazy["b"], lazy["a"], lazy["c"]])
    assert pieces(whole, turned.view_of_node) == [128, 128, 128], "not in this order in the target"
