"""Every conversion op of transformers on lazy tensors: the bits that it gives on real ones, from reads alone."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import core_model_loading as ops

from tests.core.test_lazy import Checkpoint


HEADS = 3


class Parameters:
    """Stands for a model: ops look up the shapes of the parameters that they make."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        self.shapes = shapes

    def get_parameter(self, name: str) -> nn.Parameter:
        return nn.Parameter(torch.empty(self.shapes[name], device="meta"))


@dataclass
class Case:
    """An op, and the checkpoint tensors that it is given.

    Attributes:
        sources: source pattern -> shapes of the tensors that matched it.
        targets: the target patterns.
        shapes: the model's parameters, for ops that ask for their shapes.
    """

    op: Callable[[], Any]
    sources: dict[str, list[tuple[int, ...]]]
    targets: list[str]
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)


EXPERTS = {"gate": [(4, 6)] * 6, "up": [(4, 6)] * 6}
CASES = {
    "Chunk": Case(lambda: ops.Chunk(dim=0), {"qkv": [(12, 5)]}, ["q", "k", "v"]),
    "Chunk inner": Case(lambda: ops.Chunk(dim=1), {"both": [(5, 8)]}, ["a", "b"]),
    "Split": Case(lambda: ops.Split(dim=0), {"a": [(11, 5)]}, ["a", "b"], {"a": (4, 5), "b": (7, 5)}),
    "Concatenate": Case(lambda: ops.Concatenate(dim=0), {"q": [(4, 5)], "k": [(3, 5)]}, ["qk"]),
    "Concatenate inner": Case(lambda: ops.Concatenate(dim=1), {"q": [(4, 5)], "k": [(4, 2)]}, ["qk"]),
    "Interleave": Case(lambda: ops.Interleave(dim=1), {"x": [(2, 8, 3)]}, ["x"]),
    "Interleave inverse": Case(lambda: ops.Interleave(dim=0, inverse=True), {"x": [(10, 3)]}, ["x"]),
    "MergeModulelist": Case(lambda: ops.MergeModulelist(dim=0), {"e": [(4, 5)] * 3}, ["e"]),
    "SplitModulelist": Case(lambda: ops.SplitModulelist(dim=0), {"e": [(3, 4, 5)]}, ["e.*"]),
    "Transpose": Case(lambda: ops.Transpose(1, 2), {"x": [(3, 4, 5)]}, ["x"]),
    "Transpose checked": Case(lambda: ops.Transpose(check_dims=True), {"x": [(4, 5)]}, ["x"], {"x": (5, 4)}),
    "Transpose not needed": Case(lambda: ops.Transpose(check_dims=True), {"x": [(4, 5)]}, ["x"], {"x": (4, 5)}),
    "Conv3dToLinear": Case(lambda: ops.Conv3dToLinear(3, (2, 2, 2)), {"x": [(5, 3, 2, 2, 2)]}, ["x"]),
    "LinearToConv3d": Case(lambda: ops.LinearToConv3d(3, (2, 2, 2)), {"x": [(5, 24)]}, ["x"]),
    "PermuteForRope": Case(lambda: ops.PermuteForRope(), {"q": [(12, 5)]}, ["q"]),
    "PermuteForRope bias": Case(lambda: ops.PermuteForRope(inverse=True), {"q": [(12,)]}, ["q"]),
    "VisionFuseAndPermuteForRope": Case(
        lambda: ops.VisionFuseAndPermuteForRope(permute_layer_names=["q", "k"]),
        {"q": [(12, 5)], "k": [(12, 5)], "v": [(12, 5)]},
        ["qkv"],
    ),
    "VisionUnfuseAndPermuteForRope": Case(
        lambda: ops.VisionUnfuseAndPermuteForRope(permute_layer_names=["q", "k"]), {"qkv": [(36, 5)]}, ["q", "k", "v"]
    ),
    "ErnieFuseAndSplitTextVisionExperts": Case(
        lambda: ops.ErnieFuseAndSplitTextVisionExperts(), EXPERTS, ["text", "vision"]
    ),
    "ErnieSplitAndDecoupleTextVisionExperts": Case(
        lambda: ops.ErnieSplitAndDecoupleTextVisionExperts(),
        {"text": [(3, 8, 6)], "vision": [(3, 8, 6)]},
        ["gate", "up"],
    ),
}
if hasattr(ops, "Inkling2UnpadVocab"):  # since transformers 5.24
    CASES |= {
        "Inkling2LoopMergeMessageQueries": Case(
            lambda: ops.Inkling2LoopMergeMessageQueries(), {"q": [(6, 5)], "kv": [(6, 5)]}, ["both"]
        ),
        "Inkling2LoopMergeMessageQueries inverse": Case(
            lambda: ops.Inkling2LoopMergeMessageQueries(inverse=True), {"both": [(3, 4, 5)]}, ["q", "kv"]
        ),
        "Inkling2UnpadVocab": Case(lambda: ops.Inkling2UnpadVocab(), {"x": [(12, 5)]}, ["x"], {"x": (10, 5)}),
        "Inkling2UnpadVocab inverse": Case(lambda: ops.Inkling2UnpadVocab(inverse=True), {"x": [(10, 5)]}, ["x"]),
    }

VOCABULARY = SimpleNamespace(vocab_size=12, unpadded_vocab_size=10)
CONFIG = SimpleNamespace(
    num_attention_heads=HEADS,
    vision_config=SimpleNamespace(num_attention_heads=HEADS),
    moe_num_experts=[3, 3],
    get_text_config=lambda: VOCABULARY,
)


def convert(case: Case, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The op's results by name, lists unfolded."""
    given = {
        source: [tensors[f"{source}.{number}"] for number in range(len(shapes))]
        for source, shapes in case.sources.items()
    }
    result = case.op().convert(
        given,
        source_patterns=list(case.sources),
        target_patterns=case.targets,
        config=CONFIG,
        model=Parameters(**case.shapes),
        full_layer_name=case.targets[0],
    )
    return {
        f"{name}.{number}": tensor
        for name, value in result.items()
        for number, tensor in enumerate(value if isinstance(value, list) else [value])
    }


FROM_VALUES = {"Inkling2LoopDequantizeExperts"}
"""These write into memory of their own, and have each tensor that they are given read whole."""


PADDED = {"Inkling2UnpadVocab inverse"}
"""Of these results some elements are constants, which nobody reads."""


def test_every_op_has_a_case() -> None:
    known = {name for name, value in vars(ops).items() if isinstance(value, type)}
    known = {name for name in known if issubclass(getattr(ops, name), ops.ConversionOps) and name[0] != "_"}
    assert {name.partition(" ")[0] for name in CASES} == known - {"ConversionOps"} - FROM_VALUES


@pytest.mark.skipif(not hasattr(ops, "Inkling2LoopDequantizeExperts"), reason="transformers before 5.24")
def test_experts_of_inkling(tmp_path: Path) -> None:
    real = {
        "weight": torch.randn(9, 4, 64).to(torch.float8_e4m3fn),
        "scale": torch.randint(120, 130, (9, 4, 2), dtype=torch.uint8),
    }

    def converted(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        op, sources = ops.Inkling2LoopDequantizeExperts(), ["weight", "scale", "amax", "denominator"]
        return op.convert(tensors, source_patterns=sources, target_patterns=["experts"])["experts"]

    assert torch.equal(converted(Checkpoint(tmp_path, real).lazy()), converted(real))


@pytest.mark.parametrize("name", CASES)
def test_same_bits(tmp_path: Path, name: str) -> None:
    """Each rank's part of each result, in worlds of 1, 2, 3 and 5, from reads alone."""
    case = CASES[name]
    torch.manual_seed(0)
    real = {
        f"{source}.{number}": torch.randn(shape)
        for source, shapes in case.sources.items()
        for number, shape in enumerate(shapes)
    }
    checkpoint = Checkpoint(tmp_path, real)
    expected = convert(case, real)
    lazy = convert(case, checkpoint.lazy())
    assert lazy.keys() == expected.keys() and expected
    for key, tensor in expected.items():
        assert lazy[key].shape == tensor.shape and lazy[key].dtype == tensor.dtype
        for world_size in (1, 2, 3, 5):
            parts = []
            for rank in range(world_size):
                plan = checkpoint.plan(lazy[key], rank, world_size)
                assert not plan.materialised and bool(plan.placements) <= (name in PADDED)
                parts.append(checkpoint.load(lazy[key], rank, world_size))
            assert torch.equal(torch.cat(parts)[: tensor.numel()], tensor.reshape(-1)), (key, world_size)
