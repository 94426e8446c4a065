"""Packed weights, and who dequantises them.

- Packed weights give the values that loading them dequantised gives, bit for bit, and hold the file's own bytes.
- Another plug-in may say how weights of a quant_method are dequantised; then they stay quantised as ours do.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.profiler import ProfilerActivity, profile

from hf_zero_stream.checkpoint.lazy import LazyTensor
from hf_zero_stream.destinations.base import Batch, Destination
from hf_zero_stream.engine.load import Load
from hf_zero_stream.errors import CheckpointError, UnsupportedError
from hf_zero_stream.holdings.introspection import packed_weights
from hf_zero_stream.loading.dry_load import lazily_loaded
from hf_zero_stream.plugins.packed import programs
from hf_zero_stream.plugins.packed.quantisers import by_transformers
from hf_zero_stream.plugins.packed.weights import PackedWeight, sources
from hf_zero_stream.ranks.coordinator import Coordinator
from hf_zero_stream.registry import Plugin, plugins
from hf_zero_stream.settings.config import StreamingConfig
from tests.support.checkpoint_files import tensors_of
from tests.support.quantised_checkpoints import (
    SCHEMES,
    bitsandbytes,
    compressed_tensors,
    dense_fp8,
    fp4_experts,
    fp8,
    fp8_with_a_short_block,
    mxfp4,
)


MAKERS: dict[str, Callable[[Path], Any]] = {
    "fp8": fp8,
    "fp8 with a short block": fp8_with_a_short_block,
    "fp4 experts": fp4_experts,
    "mxfp4": mxfp4,
    **{name: lambda folder, name=name: compressed_tensors(folder, name) for name in SCHEMES},
}


class Nowhere(Destination):
    """Lazy models with packed weights, which are never placed."""

    hides_zero3 = takes_packed = True

    def dtype(self, wanted: torch.dtype | None) -> torch.dtype | None:
        return wanted

    def batches(self, *args: Any, **kwargs: Any) -> list[Batch]:
        return []


@contextmanager
def lazy_model(folder: Path, *, keep_quantized: bool, **kwargs: Any) -> Iterator[Any]:
    load = Load(StreamingConfig(keep_quantized=keep_quantized), {}, Coordinator(0, 1, alone=True), Nowhere())
    with closing(load):
        yield lazily_loaded(str(folder), load, **kwargs)[0]


def dequantising_config(folder: Path) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder).quantization_config
    kinds = {
        "fp8": transformers.FineGrainedFP8Config,
        "mxfp4": transformers.Mxfp4Config,
        "compressed-tensors": transformers.CompressedTensorsConfig,
    }
    return kinds[config["quant_method"]](dequantize=True)


DTYPES = [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)]


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", MAKERS)
def test_values_and_bytes(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    MAKERS[name](tmp_path)
    config = dequantising_config(tmp_path)
    with lazy_model(tmp_path, keep_quantized=True, dtype=dtype, quantization_config=config) as dequantised:
        values = {key: param.materialise() for key, param in dequantised.named_parameters()}
    check(tmp_path, dtype, values)


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp32"])
@pytest.mark.parametrize("experts", [0, 3])
@pytest.mark.parametrize("kind", ["nf4", "fp4", "double nf4", "int8"])
def test_bitsandbytes(tmp_path: Path, kind: str, experts: int, dtype: torch.dtype) -> None:
    """The values are those that the package itself gives back; experts are quantised one by one."""
    bitsandbytes(tmp_path, kind, width=136, dequantised=tmp_path / "plain", experts=experts)
    expected = load_file(tmp_path / "plain" / "model.safetensors")
    if experts:
        expected |= in_stacks(expected, "model.layers.0.mlp.experts", experts)
    check(tmp_path, dtype, expected)


def in_stacks(tensors: dict[str, torch.Tensor], prefix: str, experts: int) -> dict[str, torch.Tensor]:
    """The fused parameters that transformers makes of matrices of experts."""
    gate, up, down = (
        torch.stack([tensors[f"{prefix}.{number}.{key}.weight"] for number in range(experts)])
        for key in ("gate_proj", "up_proj", "down_proj")
    )
    return {f"{prefix}.gate_up_proj": torch.cat([gate, up], dim=1), f"{prefix}.down_proj": down}


@pytest.mark.parametrize("scheme", ["int4 with zero points", "int8 by channel", "float8 by block"])
def test_experts_that_transformers_cannot_dequantise(tmp_path: Path, scheme: str) -> None:
    compressed_tensors(tmp_path, scheme, experts=True)
    with pytest.raises(UnsupportedError, match="mlp.experts.*keep_quantized=False"):
        with lazy_model(tmp_path, keep_quantized=True, dtype=torch.bfloat16):
            pass


def change(name: str, new: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Path], None]:
    """Have the tensors of the checkpoint whose names end in `name` replaced, or left out."""

    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        changed = {key: new(value) if key.endswith(name) else value for key, value in tensors.items()}
        assert any(changed[key] is not value for key, value in tensors.items())
        kept = {key: value.contiguous() for key, value in changed.items() if value is not None}
        save_file(kept, folder / "model.safetensors", {"format": "pt"})

    return apply


def set_bits(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"num_bits": 4', '"num_bits": 8'))


def blocks_of_128(text: torch.Tensor) -> torch.Tensor:
    return torch.tensor(list(bytes(text.tolist()).replace(b'"blocksize": 64', b'"blocksize": 128')), dtype=torch.uint8)


NF4_TEXT = "q_proj.weight.quant_state.bitsandbytes__nf4"
LYING: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "no scales": ("fp8", change("gate_proj.weight_scale_inv", lambda _: None), "weight in torch.float8.*no scales"),
    "too few scales": ("fp8", change("o_proj.weight_scale_inv", lambda it: it[:-1]), "o_proj.weight: .*dequantise"),
    "scales of other groups": (
        "mxfp4",
        change("proj_scales", lambda it: it[..., :1]),
        r"down_proj: .*dequantise.*blocks\.shape",
    ),
    "no zero points": ("int4", change("q_proj.weight_zero_point", lambda _: None), "q_proj.weight: .*dequantise"),
    "other bits": ("int4", set_bits, "proj.weight: .*dequantise"),
    "no SCB": ("int8", change("q_proj.SCB", lambda _: None), "q_proj.weight in torch.int8, and no scales"),
    "too few absmax": ("nf4", change("q_proj.weight.absmax", lambda it: it[:-1]), "expected absmax to have 64"),
    "other blocks": ("nf4", change(NF4_TEXT, blocks_of_128), "expected absmax to have 32 .* found 64"),
    "no text": ("nf4", change(NF4_TEXT, lambda _: None), "expected absmax, quant_map and quant_state"),
    "short table": ("nf4", change("q_proj.weight.quant_map", lambda it: it[:8]), "expected quant_map to have 16"),
}


@pytest.mark.parametrize("name", LYING)
def test_lying_checkpoints(tmp_path: Path, name: str) -> None:
    """Refused when they are loaded, with the name of a weight, not read as other values."""
    makers: dict[str, Callable[[Path], Any]] = {
        "fp8": dense_fp8,
        "mxfp4": mxfp4,
        "int4": lambda folder: compressed_tensors(folder, "int4 with zero points"),
        "int8": lambda folder: bitsandbytes(folder, "int8", width=64),
        "nf4": lambda folder: bitsandbytes(folder, "double nf4", width=64),
    }
    kind, lie, message = LYING[name]
    makers[kind](tmp_path)
    lie(tmp_path)
    with pytest.raises((UnsupportedError, CheckpointError), match=message):
        with lazy_model(tmp_path, keep_quantized=True, dtype=torch.bfloat16):
            pass


def in_small_pieces(weight: PackedWeight, parameter: torch.Tensor, number: int) -> torch.Tensor:
    """The matrix, computed in pieces that end within blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "PIECE_NUMEL", 700)
        return weight.matrix(parameter, number)


LARGE: dict[str, Callable[[Path], Any]] = {
    "fp8": lambda folder: fp8(folder, width=1024),
    "fp4 experts": lambda folder: fp4_experts(folder, width=1024),
    "mxfp4": lambda folder: mxfp4(folder, width=1024),
    "int4": lambda folder: compressed_tensors(folder, "int4 with zero points", width=1024),
    "nf4": lambda folder: bitsandbytes(folder, "double nf4", width=1024),
    "int8": lambda folder: bitsandbytes(folder, "int8", width=1024),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_peak_of_dequantising(tmp_path: Path, name: str) -> None:
    """Beside the matrix itself a few MiB, however large it is; all at once would be up to nine times the matrix."""
    LARGE[name](tmp_path)
    with lazy_model(tmp_path, keep_quantized=True, dtype=torch.bfloat16) as packed:
        found = [
            (weight.shape[-2] * weight.shape[-1], weight, module._parameters[key])
            for module in packed.modules()
            for key, weight in packed_weights(module).items()
        ]
        numel, weight, param = max(found, key=lambda each: each[0])
        assert isinstance(param, LazyTensor)
        parameter = param.materialise()
        weight.matrix(parameter)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
            matrix = weight.matrix(parameter)
    assert matrix.nbytes == 2 * numel > 4 * 2**20 * 0.99
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    in_order = sorted(events, key=lambda event: event.start_ns())
    peak = max(accumulate(event.nbytes() for event in in_order))
    assert matrix.nbytes <= peak <= matrix.nbytes + 8 * 2**20


def check(folder: Path, dtype: torch.dtype, expected: dict[str, torch.Tensor]) -> None:
    """What is packed of the checkpoint in `folder` has the `expected` values, in `dtype`, and the file's bytes."""
    in_file = tensors_of(folder)
    with lazy_model(folder, keep_quantized=True, dtype=dtype) as packed:
        held: dict[str, Any] = {}
        for prefix, module in packed.named_modules():
            for key, weight in packed_weights(module).items():
                param: Any = module._parameters[key]
                assert param.dtype == torch.uint8 and not param.requires_grad
                values = expected[f"{prefix}.{key}"]
                parameter = param.materialise()
                assert weight.shape == values.shape
                assert param.nbytes < values.numel() * dtype.itemsize
                matrices = values if weight.is_stack else [values]
                for number, matrix in enumerate(matrices):
                    for mine in (weight.matrix(parameter, number), in_small_pieces(weight, parameter, number)):
                        assert mine.dtype == dtype and mine.is_contiguous()
                        assert torch.equal(mine, matrix.to(dtype)), (prefix, key, number)
                held[f"{prefix}.{key}"] = weight, param.view_of_node
        assert held
        assert not any(param.requires_grad for param in packed.parameters())
        found = sources(held)
        quantised = {key for key, it in in_file.items() if it.dtype.itemsize == 1 or not it.is_floating_point()}
        assert quantised <= found.keys(), "all that is quantised is kept"
        some = next(iter(packed.parameters()))
        assert isinstance(some, LazyTensor)
        for key, (entry, view) in found.items():
            written = LazyTensor.of(view, some.reader).materialise()
            assert (entry.dtype, entry.shape) == (in_file[key].dtype, tuple(in_file[key].shape))
            assert torch.equal(written, in_file[key].contiguous().view(-1).view(torch.uint8)), key


def as_fp8(fields: Mapping[str, Any], *, casts: bool) -> Mapping[str, Any] | None:
    """FP8 by another name."""
    return by_transformers({**fields, "quant_method": "fp8"}, casts=casts)


def test_of_another_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fp8(tmp_path)
    how = {"dtype": torch.bfloat16, "quantization_config": dequantising_config(tmp_path)}
    with lazy_model(tmp_path, keep_quantized=True, **how) as dequantised:
        values = {key: param.materialise() for key, param in dequantised.named_parameters()}
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"fp8"', '"of another"'))
    found = (*plugins(), Plugin("another", tools={"quantiser of another": f"{__name__}:as_fp8"}))
    monkeypatch.setattr("hf_zero_stream.registry.plugins", lambda: found)
    check(tmp_path, torch.bfloat16, values)
