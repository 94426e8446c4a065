"""Lazy tensors against real ones: the same ops, every range, with and without materialising."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hf_zero_stream.checkpoint.formats import read_map
from hf_zero_stream.checkpoint.lazy import LazyTensor
from hf_zero_stream.checkpoint.nodes import Computed, Node, Stored, View
from hf_zero_stream.engine.compute import ShardEvaluator
from hf_zero_stream.engine.execute import execute_reads
from hf_zero_stream.planning.plan import BatchPlan, Target, partition_range, plan_batch
from hf_zero_stream.sources.local import LocalFiles


Program = Callable[[dict[str, torch.Tensor]], torch.Tensor]


class Checkpoint:
    """A checkpoint on disk, as real tensors and as lazy ones."""

    def __init__(self, folder: Path, tensors: dict[str, torch.Tensor], seek_bytes: int = 16) -> None:
        names = list(tensors)
        half = len(names) // 2
        paths = [folder / "a.safetensors", folder / "b.safetensors"]
        for path, group in zip(paths, (names[:half], names[half:]), strict=True):
            save_file({name: tensors[name] for name in group}, path)
        self.real = tensors
        self.index = read_map(paths)
        self.request_bytes, self.seek_bytes = 64, seek_bytes
        self.files = LocalFiles(self.index.shards)
        self.evaluator = ShardEvaluator(
            self.files, request_bytes=self.request_bytes, seek_bytes=seek_bytes, staging_bytes=2 * self.request_bytes
        )

    def lazy(self) -> dict[str, torch.Tensor]:
        slices = self.index.slices(self.evaluator.materialise)
        return {name: item[...] for name, item in slices.items()}

    def plan(self, tensor: torch.Tensor, rank: int, world_size: int) -> BatchPlan:
        assert isinstance(tensor, LazyTensor)
        target = Target("p", tensor.dtype, *partition_range(tensor.numel(), rank, world_size))
        plan, self.leaves = plan_batch(
            [(target, tensor.view_of_node)], request_bytes=self.request_bytes, seek_bytes=self.seek_bytes
        )
        return plan

    def load(self, tensor: torch.Tensor, rank: int, world_size: int, threads: int = 2) -> torch.Tensor:
        plan = self.plan(tensor, rank, world_size)
        (target,) = plan.targets
        values = torch.zeros(target.numel, dtype=target.dtype)
        execute_reads(plan, [values], self.files, threads=threads)
        self.evaluator.place(plan, self.leaves, [values])
        return values


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    torch.manual_seed(0)
    tensors = {f"m{number}": torch.randn(6, 10) for number in range(4)}
    tensors |= {f"c{number}": torch.randn(3, 4, 5) for number in range(2)}
    tensors |= {"half": torch.randn(7, 8).bfloat16(), "scalar": torch.randn(()), "odd": torch.randn(13)}
    tensors |= {"ints": torch.arange(24).view(4, 6), "empty": torch.zeros(0, 3)}
    return Checkpoint(tmp_path, tensors)


LAYOUT: dict[str, Program] = {
    "as_is": lambda t: t["m0"],
    "scalar": lambda t: t["scalar"],
    "empty": lambda t: t["empty"],
    "transpose": lambda t: t["m0"].T,
    "permute": lambda t: t["c0"].permute(2, 0, 1),
    "permute_contiguous_reshape": lambda t: t["c0"].permute(2, 0, 1).contiguous().reshape(10, 6),
    "stack": lambda t: torch.stack([t["m0"], t["m1"], t["m2"]]),
    "stack_last": lambda t: torch.stack([t["m0"], t["m1"]], dim=-1),
    "cat": lambda t: torch.cat([t["m0"], t["m1"]], dim=0),
    "cat_last": lambda t: torch.cat([t["m0"], t["m1"].T[:6, :6], t["m2"]], dim=1),
    "experts": lambda t: torch.cat([torch.stack([t["m0"], t["m1"]]), torch.stack([t["m2"], t["m3"]])], dim=1),
    "experts_transposed": lambda t: torch.stack([t["m0"], t["m1"]]).transpose(1, 2).contiguous(),
    "split": lambda t: t["c0"].split([1, 3], dim=1)[1],
    "chunk": lambda t: t["m0"].chunk(3, dim=1)[2],
    "unbind": lambda t: t["c0"].unbind(1)[2],
    "slices": lambda t: t["m0"][1:5:2, 3:],
    "expand": lambda t: t["odd"].expand(3, 13),
    "unsqueeze_squeeze": lambda t: t["c0"].unsqueeze(0).transpose(0, 2).squeeze(2),
    "cast": lambda t: t["m0"].to(torch.bfloat16),
    "cast_twice": lambda t: t["m0"].to(torch.float16).to(torch.float64),
    "cast_transposed": lambda t: t["half"].T.to(torch.float32),
    "cast_then_cat": lambda t: torch.cat([t["m0"].to(torch.bfloat16)[:, :8], t["half"]], dim=0),
    "cast_ints": lambda t: t["ints"].to(torch.int16),
    "rows": lambda t: t["m0"].index_select(0, torch.tensor([5, 3, 1, 1, 2, 3])),
    "columns": lambda t: t["m0"].index_select(1, torch.tensor([0, 2, 4, 9])),
    "fancy_index": lambda t: t["m0"][torch.tensor([-1, 0, 2])],
    "rope": lambda t: t["c0"].reshape(3, 2, 2, 5).transpose(1, 2).reshape(12, 5),
    "nested": lambda t: torch.cat(
        [t["c0"].permute(1, 0, 2).contiguous().view(4, 15).T, t["m0"].T[:, :4].repeat(2, 1)[:15]]
    ),
    "clone_of_view": lambda t: t["c1"].transpose(0, 2).clone().transpose(0, 2).reshape(-1),
    "detach_alias": lambda t: torch.ops.aten.alias(t["m0"].detach()),
    "pad_by_nothing": lambda t: torch.nn.functional.pad(t["m0"], (0, 0)),
}
POINTWISE: dict[str, Program] = {
    "scaled": lambda t: t["m0"] * 3.0,
    "blocks": lambda t: (t["m0"].view(3, 2, 2, 5) * t["m1"][:3, :2].unsqueeze(1).unsqueeze(-1)).view(6, 10),
    "scalar_tensor_does_not_promote": lambda t: t["half"] * t["scalar"],
    "mixed_with_real": lambda t: t["m0"] + torch.arange(10.0),
    "transposed_then_cast": lambda t: (t["m0"] / 7).T.to(torch.bfloat16),
    "of_concatenation": lambda t: -torch.cat([t["m0"], t["m1"]]) + 1,
}
WHOLE: dict[str, Program] = {
    "softmax": lambda t: torch.softmax(t["m0"], dim=-1),
    "flip": lambda t: t["m0"].flip(0),
    "sort": lambda t: t["m0"].sort(dim=1)[1],
    "cumsum_of_cat": lambda t: torch.cat([t["m0"], t["m1"]]).cumsum(0).T,
    "masked": lambda t: t["m0"][t["m0"] > 0],
    "roll_in_stack": lambda t: torch.stack([t["m0"].roll(1, 0), t["m1"]]),
}


def check(checkpoint: Checkpoint, program: Program, world_size: int) -> list[BatchPlan]:
    expected, lazy = program(checkpoint.real), program(checkpoint.lazy())
    assert isinstance(lazy, LazyTensor)
    assert (lazy.shape, lazy.dtype) == (expected.shape, expected.dtype)
    plans = [checkpoint.plan(lazy, rank, world_size) for rank in range(world_size)]
    loaded = torch.cat([checkpoint.load(lazy, rank, world_size) for rank in range(world_size)])[: expected.numel()]
    assert torch.equal(loaded, expected.reshape(-1))
    return plans


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("name", list(LAYOUT))
def test_layout_is_read_by_ranges(checkpoint: Checkpoint, name: str, world_size: int) -> None:
    for plan in check(checkpoint, LAYOUT[name], world_size):
        assert not plan.placements and not plan.materialised
        if name not in ("expand", "rows", "repeat", "nested"):  # these use some bytes more than once
            assert plan.cost.bytes_needed <= plan.cost.bytes_read
        assert all(read.length <= checkpoint.request_bytes for read in plan.reads)
        order = [(read.shard, read.start) for read in plan.reads]
        assert order == sorted(order)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("name", list(POINTWISE))
def test_exact_functions_are_computed_piece_by_piece(checkpoint: Checkpoint, name: str, world_size: int) -> None:
    for plan in check(checkpoint, POINTWISE[name], world_size):
        assert not plan.materialised


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("name", list(WHOLE))
def test_other_functions_are_materialised_and_reported(checkpoint: Checkpoint, name: str, world_size: int) -> None:
    for plan in check(checkpoint, WHOLE[name], world_size):
        assert "aten" in plan.materialised["p"]


def test_inference_mode(checkpoint: Checkpoint) -> None:
    """Composite ops arrive undecomposed there; they must stay lazy."""
    for name in ("rope", "experts_transposed", "chunk"):
        with torch.inference_mode():
            lazy = LAYOUT[name](checkpoint.lazy())
        plan = checkpoint.plan(lazy, 0, 1)
        assert not plan.materialised
        assert torch.equal(checkpoint.load(lazy, 0, 1), LAYOUT[name](checkpoint.real).reshape(-1))


def test_needed_bytes_are_shared_out(checkpoint: Checkpoint) -> None:
    lazy = LAYOUT["experts"](checkpoint.lazy())
    plans = [checkpoint.plan(lazy, rank, 4) for rank in range(4)]
    assert sum(plan.cost.bytes_needed for plan in plans) == 4 * 6 * 10 * 4
    assert sum(plan.cost.bytes_read for plan in plans) == 4 * 6 * 10 * 4


@pytest.mark.parametrize("seed", range(60))
def test_random_programs(checkpoint: Checkpoint, seed: int) -> None:
    """Chains of random layout ops."""
    rng = random.Random(seed)

    def program(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        local = random.Random(seed)
        value = tensors[local.choice(["m0", "c0", "half"])]
        for _ in range(6):
            dim = local.randrange(value.dim())
            step = local.choice(["transpose", "cat", "stack", "select", "narrow", "clone", "cast", "flatten"])
            if step == "transpose":
                value = value.transpose(dim, local.randrange(value.dim()))
            elif step == "cat":
                value = torch.cat([value, value.narrow(dim, 0, 1)], dim)
            elif step == "stack" and value.dim() < 5:
                value = torch.stack([value, value], dim)
            elif step == "select" and value.dim() > 2:
                value = value.select(dim, local.randrange(value.shape[dim]))
            elif step == "narrow":
                length = local.randint(1, value.shape[dim])
                value = value.narrow(dim, local.randint(0, value.shape[dim] - length), length)
            elif step == "clone":
                value = value.contiguous()
            elif step == "cast":
                value = value.to(local.choice([torch.float16, torch.bfloat16, torch.float32]))
            elif step == "flatten" and value.dim() > 2:
                value = value.reshape(-1, value.shape[-1])
        return value

    check(checkpoint, program, rng.choice([1, 2, 3, 7]))


def test_writing_into_a_checkpoint_tensor_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(NotImplementedError, match="write into a checkpoint tensor"):
        checkpoint.lazy()["m0"].mul_(2)


def test_rows_out_of_range_are_refused(checkpoint: Checkpoint) -> None:
    lazy = checkpoint.lazy()["m0"]
    size = len(lazy)
    for row in (size, -1):
        with pytest.raises(IndexError, match=f"out of range for dimension 0 with size {size}"):
            lazy.index_select(0, torch.tensor([0, row]))
    for row in (size, -size - 1):
        with pytest.raises(IndexError, match=f"out of range for dimension 0 with size {size}"):
            lazy[torch.tensor([0, row])]


def test_lazy_tensor_holds_no_memory(tmp_path: Path) -> None:
    big = Checkpoint(tmp_path, {"a": torch.zeros(4, 4), "b": torch.zeros(4, 4)}).lazy()["a"]
    bigger = big.expand(1000, 1000, 4, 4).reshape(4000, 4000)
    assert bigger.shape == (4000, 4000)
    assert torch.nn.Parameter(bigger).shape == (4000, 4000)


class Unheard(Computed):
    """Of a kind that is new."""


@pytest.mark.parametrize("node", [Stored((3,), torch.float32, "weight"), Unheard((3,), torch.float32, print, (), {})])
def test_a_node_that_the_engine_does_not_know_is_refused(node: Node) -> None:
    evaluator = ShardEvaluator(LocalFiles(), request_bytes=64, seek_bytes=0, staging_bytes=64)
    with pytest.raises(TypeError, match=f"a {type(node).__name__} has no values to place"):
        evaluator.materialise(View.whole(node))
