"""What becomes of quantised checkpoints if a release renames a function that we replace, or no longer calls it."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hf_zero_stream
from hf_zero_stream.bindings.table import TABLE
from hf_zero_stream.plugins.packed import COMPRESSED
from hf_zero_stream.registry import PatchScope
from tests.packed.test_dequantised import load as load_dequantised
from tests.packed.test_gguf import write_lfm2
from tests.packed.test_packed_peft import losses_of_kinds
from tests.support.cluster import run_ranks
from tests.support.mutations import MUTATIONS, Mutation, mutated, mutation_of, mutations
from tests.support.packed_models import MODELS
from tests.support.parity import ds_config
from tests.support.quantised_checkpoints import compressed_tensors
from tests.support.whole import whole_values


OF_FORMATS = {
    "mxfp4": "MXFP4",
    "finegrained_fp8": "FP8 by blocks",
    "compressed_tensors": "int4 by group",
    "gguf": "GGUF",
}
"""Quantised checkpoints that lead to each row for dequantising, by the module of the row."""


def dequantised_values(folder: Path, **kwargs: Any) -> dict[str, torch.Tensor]:
    if (folder / "lfm2.gguf").exists():
        how = {"gguf_file": "lfm2.gguf", "quantization_config": transformers.GgufConfig(dequantize=True)}
        load = transformers.AutoModelForCausalLM.from_pretrained
        return whole_values(load(folder, dtype=torch.bfloat16, **how, **kwargs))
    return whole_values(load_dequantised(folder, **kwargs))


def mutated_when_dequantised(number: int, folder: Path) -> dict[str, Any]:
    """By mutation: the names of wrong values, or what is raised."""
    plain, found = dequantised_values(folder), {}
    for mutate in (lambda row, patch: row, *MUTATIONS):
        with mutation_of(TABLE[PatchScope.LOAD][number], PatchScope.LOAD, mutate):
            try:
                with hf_zero_stream.streaming(hf_zero_stream.StreamingConfig(progress=False)):
                    values = dequantised_values(folder, ds_config=ds_config(torch.bfloat16))
                found[mutate.__name__] = [name for name in plain if not torch.equal(values[name], plain[name])]
            except Exception as error:
                found[mutate.__name__] = f"{type(error).__name__}: {error}"
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [number for number, row in enumerate(TABLE[PatchScope.LOAD]) if row.feature == "dequantising"]
)
def test_never_other_dequantised_values(cluster: None, tmp_path: Path, number: int) -> None:
    kind = next(kind for module, kind in OF_FORMATS.items() if module in TABLE[PatchScope.LOAD][number].of)
    if kind == "GGUF":
        write_lfm2(tmp_path / "lfm2.gguf")
    else:
        MODELS[f"{kind}, mixture"](tmp_path)
    for found in run_ranks(2, mutated_when_dequantised, number, tmp_path, timeout=200):
        assert found.pop("<lambda>") == []
        assert all(what == [] or "Error" in what for what in found.values()), found


@pytest.fixture(scope="module")
def int4(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint, and the losses of adapters on it."""
    compressed_tensors(folder := tmp_path_factory.mktemp("int4"), "int4 with zero points")
    return folder, run_ranks(2, losses_of_kinds, folder, ["IA3"])[0]


@pytest.mark.parametrize("mutation", mutations(("peft.", "compressed_tensors."), PatchScope.MODELS, COMPRESSED))
def test_adapters_on_quantised_weights(int4: tuple[Path, Any], mutation: Mutation) -> None:
    """Packed, and dequantised while they are loaded."""
    outcome, _ = run_ranks(2, mutated, mutation, losses_of_kinds, int4[0], ["IA3"])
    assert isinstance(outcome, str) or outcome == int4[1], outcome
