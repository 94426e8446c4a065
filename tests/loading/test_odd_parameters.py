"""Models with odd parameters, buffers and initialisation code come out as in plain loading, bit for bit.

Sub-models built inside `__init__`, ties across modules, one module under two names, parameter lists; buffers in the
checkpoint and computed ones, extra state, tensors created on an explicit device; integer, complex, zero-sized,
0-dimensional and frozen parameters; unguarded initialisation code, and conversions that the user registered.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import conversion_mapping
from transformers.core_model_loading import Chunk, Concatenate, ConversionOps, WeightConverter, WeightRenaming

from tests.support import odd_models
from tests.support.cluster import run_ranks
from tests.support.odd_models import WIDTH, Odd, OddConfig, fill
from tests.support.parity import assert_same, compare


CLASSES = [value for value in vars(odd_models).values() if isinstance(value, type) and issubclass(value, Odd)]


def save(model_class: type[Odd], folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Floating-point parameters in `dtype`; buffers keep their own dtype, as router biases do in the hub's files."""
    model = fill(model_class(OddConfig(dtype=dtype, tie_word_embeddings=True)))
    for param in model.parameters():
        if param.is_floating_point():
            param.data = param.data.to(dtype)
    model.save_pretrained(folder)
    return folder


def without(folder: Path, *names: str) -> Path:
    """Remove tensors from a checkpoint of one shard."""
    tensors = load_file(folder / "model.safetensors")
    for name in names:
        del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def name_of(model_class: type[Odd]) -> str:
    return f"tests.support.odd_models:{model_class.__name__}"


def look(model: Any) -> dict[str, Any]:
    """What is neither parameter nor buffer: the extra state, and what a fixed input gives where there is no ZeRO."""
    return {name: value for name, value in model.state_dict().items() if name.endswith("_extra_state")}


def same_extra_states(model: Any) -> dict[str, Any]:
    return {name: (type(value).__name__, value.tolist()) for name, value in look(model).items()}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("model_class", CLASSES, ids=lambda value: value.__name__)
def test_equals_plain_loading(cluster: None, tmp_path: Path, model_class: type[Odd], world_size: int) -> None:
    folder = save(model_class, tmp_path)
    results = run_ranks(world_size, compare, name_of(model_class), folder, {}, torch.float32, same_extra_states)
    assert_same(results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("model_class", CLASSES, ids=lambda value: value.__name__)
def test_equals_plain_loading_in_16_bit(
    cluster: None, tmp_path: Path, model_class: type[Odd], dtype: torch.dtype
) -> None:
    """Buffers stay in their own dtype; parameters that plain loading keeps in fp32 take DeepSpeed's, as in stock."""
    folder = save(model_class, tmp_path, dtype)
    results = run_ranks(2, compare, name_of(model_class), folder, {"dtype": dtype}, dtype, same_extra_states)
    assert_same(results)
    strictly = {odd_models.KeepsFp32Strictly: ["scale", "second.bias", "second.weight"]}
    kept = {odd_models.KeepsFp32: ["second.bias", "second.weight"]} if dtype == torch.float16 else {}
    for result in results:
        assert sorted(result["report"]["recast"]) == (strictly | kept).get(model_class, [])


MISSING: dict[type[Odd], list[str]] = {
    odd_models.Frozen: ["fixed", "late.weight", "first.weight"],
    odd_models.ParameterLists: ["list.1", "dict.a", "nested.0.0"],
    odd_models.Scalars: ["logit_scale"],
    odd_models.CreatedOnCpu: ["here", "layer.weight", "saved"],
    odd_models.PersistentBuffers: ["e_score_correction_bias", "norm.running_mean"],
    odd_models.IntegerParameters: ["table"],
    odd_models.WritesUnguarded: ["extra", "first.weight"],
    odd_models.SubModels: ["text.pooler.dense.weight"],
}
"""Tensors to leave out, by class; each has initialisation code, or is checked only where its values are defined."""


class Initialised:
    """Mixed into a class: everything that plain loading would leave undefined gets a value."""

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[misc]
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        for tensor in own:
            if not getattr(tensor, "_is_hf_initialized", False):
                with torch.no_grad():
                    tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape))


class FrozenInitialised(Initialised, odd_models.Frozen):
    pass


class ParameterListsInitialised(Initialised, odd_models.ParameterLists):
    pass


class ScalarsInitialised(Initialised, odd_models.Scalars):
    pass


class CreatedOnCpuInitialised(Initialised, odd_models.CreatedOnCpu):
    pass


class PersistentBuffersInitialised(Initialised, odd_models.PersistentBuffers):
    pass


class IntegerParametersInitialised(Initialised, odd_models.IntegerParameters):
    pass


class WritesUnguardedInitialised(Initialised, odd_models.WritesUnguarded):
    pass


class SubModelsInitialised(Initialised, odd_models.SubModels):
    pass


@pytest.mark.sample(3)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("model_class", list(MISSING), ids=lambda value: value.__name__)
def test_missing_ones_are_initialised_as_in_plain_loading(
    cluster: None, tmp_path: Path, model_class: type[Odd], world_size: int
) -> None:
    folder = without(save(model_class, tmp_path), *MISSING[model_class])
    name = f"{__name__}:{model_class.__name__}Initialised"
    results = run_ranks(world_size, compare, name, folder, {})
    assert_same(results)
    assert results[0]["info"]["missing_keys"]


# --------------------------------------------------------------------------------------------------- conversion ops


class Doubles(ConversionOps):
    """Depends on values, but element by element."""

    @torch.no_grad
    def convert(self, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {key: value[0] * 2 if isinstance(value, list) else value * 2 for key, value in input_dict.items()}

    @property
    def reverse_op(self) -> ConversionOps:
        raise NotImplementedError


class Normalises(Doubles):
    """Each element depends on all of them, and a branch on a value."""

    @torch.no_grad
    def convert(self, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        result = {}
        for key, value in input_dict.items():
            value = value[0] if isinstance(value, list) else value
            largest = value.abs().max()
            result[key] = value / largest if largest.item() > 1 else value
        return result


class ThroughNumpy(Doubles):
    """Leaves torch altogether."""

    @torch.no_grad
    def convert(self, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        value = next(iter(input_dict.values()))
        value = value[0] if isinstance(value, list) else value
        return {next(iter(input_dict)): torch.from_numpy(value.float().numpy()[::-1].copy())}


def split_qkv(folder: Path) -> Path:
    tensors = load_file(folder / "model.safetensors")
    for kind in ("weight", "bias"):
        for name, part in zip("qkv", tensors.pop(f"qkv.{kind}").chunk(3), strict=True):
            tensors[f"{name}_proj.{kind}"] = part.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def compare_with_mapping(folder: Path, kind: str) -> dict[str, Any]:
    mapping: dict[str, list[Any]] = {
        "concatenates": [
            WeightConverter([f"{name}_proj.{end}" for name in "qkv"], f"qkv.{end}", [Concatenate(dim=0)])
            for end in ("weight", "bias")
        ],
        "chunks": [
            WeightConverter("both.weight", ["first.weight", "second.weight"], [Chunk(dim=0)]),
            WeightRenaming("first_offset", "first.bias"),
        ],
        "doubles": [WeightConverter("first.weight", "first.weight", [Doubles()])],
        "normalises": [WeightConverter("first.weight", "first.weight", [Normalises()])],
        "through_numpy": [WeightConverter("first.weight", "first.weight", [ThroughNumpy()])],
    }
    model_class = "Fused" if kind == "concatenates" else "Square" if kind == "chunks" else "Odd"
    module = __name__ if kind == "chunks" else "tests.support.odd_models"
    conversion_mapping.register_checkpoint_conversion_mapping(model_class, mapping[kind])
    return compare(f"{module}:{model_class}", folder, {})


class Square(Odd):
    def build(self) -> None:
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)


@pytest.mark.sample(1)
@pytest.mark.parametrize("world_size", [2, 3])
def test_registered_concatenation(cluster: None, tmp_path: Path, world_size: int) -> None:
    folder = split_qkv(save(odd_models.Fused, tmp_path))
    results = run_ranks(world_size, compare_with_mapping, folder, "concatenates")
    assert_same(results)
    assert not results[0]["info"]["missing_keys"]
    assert all(not rank["materialised"] for rank in results[0]["report"]["ranks"])


@pytest.mark.sample(1)
@pytest.mark.parametrize("world_size", [2, 3])
def test_registered_chunks_and_renames(cluster: None, tmp_path: Path, world_size: int) -> None:
    folder = save(Square, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["both.weight"] = torch.cat([tensors.pop("first.weight"), tensors.pop("second.weight")])
    tensors["first_offset"] = tensors.pop("first.bias")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    results = run_ranks(world_size, compare_with_mapping, folder, "chunks")
    assert_same(results)
    assert not results[0]["info"]["missing_keys"] and not results[0]["info"]["unexpected_keys"]
    assert all(not rank["materialised"] for rank in results[0]["report"]["ranks"])


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("kind", ["doubles", "normalises", "through_numpy"])
def test_registered_op_that_needs_values(cluster: None, tmp_path: Path, kind: str, world_size: int) -> None:
    """Only the parameter that the op makes is materialised, and the report names it."""
    results = run_ranks(world_size, compare_with_mapping, save(Odd, tmp_path), kind)
    assert_same(results)
    for rank in results[0]["report"]["ranks"]:
        assert list(rank["materialised"]) == ([] if kind == "doubles" else ["first.weight"])
