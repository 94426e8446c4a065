"""ZeRO++'s quantised weights. DeepSpeed has the kernels for GPUs alone: without them a load is refused; with others,
in torch, beneath everything else that is DeepSpeed's, streamed models train as stock's. See docs/support.md.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import CUDAQuantizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import nn

from tests.support.cluster import run_ranks
from tests.support.homes import CAUSAL, HPZ, Prepare, assert_trains_as_stock, make_even_llama, train
from tests.support.loading import load_with
from tests.support.parity import ds_config


WIRE = {"zero_quantized_weights": True}
FROZEN = {"zero_quantized_nontrainable_weights": True}


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_even_llama(tmp_path_factory.mktemp("even"))


def errors_with(folder: Path, zero: dict[str, Any]) -> list[tuple[str, str]]:
    found = []
    for how in ("stock", "streamed"):
        try:
            load_with(how, CAUSAL, folder, ds_config(**zero), {})
        except Exception as error:
            found.append((type(error).__name__, str(error)))
        torch.distributed.barrier()
    return found


@pytest.mark.parametrize("zero", [WIRE, FROZEN], ids=["weights", "nontrainable"])
def test_no_quantizer_on_a_cpu(cluster: None, even: Path, zero: dict[str, Any]) -> None:
    """Stock's `zero.Init` fails for want of a kernel. We say so before anything is loaded."""
    (setting,) = zero
    for stock, streamed in run_ranks(2, errors_with, even, zero):
        assert stock == ("ValueError", "This op had not been implemented on CPU backend.")
        assert streamed[0] == "UnsupportedError"
        assert setting in streamed[1] and stock[1] in streamed[1]


# ------------------------------------------------------------------------------------------------------ with kernels


class TorchKernels:
    """What DeepSpeed's CUDA kernels compute: int8, symmetric, one scale per group of values."""

    Symmetric = 0

    def quantize(self, values: torch.Tensor, groups: int, bits: int, kind: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = values.float().view(groups, -1)
        scales = rows.abs().amax(dim=1, keepdim=True).clamp(min=1e-8) / 127
        # DeepSpeed's have the shape (groups, 1), which gloo, other than NCCL, would not gather into a flat buffer.
        return (rows / scales).round().to(torch.int8).view(values.shape), scales.view(-1)

    def dequantize(
        self, quantised: torch.Tensor, scales: torch.Tensor, groups: int, bits: int, kind: int
    ) -> torch.Tensor:
        return (quantised.float().view(groups, -1) * scales.view(-1, 1)).half().view(quantised.shape)


def train_quantised(how: str, folder: Path, config: dict[str, Any], prepare: Prepare) -> dict[str, Any]:
    CUDAQuantizer.quantizer_cuda_module = TorchKernels()
    return train(how, folder, config, prepare)


@pytest.mark.parametrize(("world_size", "zero"), [(2, WIRE), (4, WIRE | HPZ)], ids=["qwz", "qwz_hpz"])
@pytest.mark.sample(1)
def test_quantised_on_the_wire(cluster: None, even: Path, world_size: int, zero: dict[str, Any]) -> None:
    """Partitions are those of a plain load; gathering quantises them, ours as stock's."""
    quantised = assert_trains_as_stock(world_size, even, ds_config(**zero), run=train_quantised)
    exact = run_ranks(world_size, train, "streamed", even, ds_config())
    assert quantised[0]["losses"] != exact[0]["losses"], "nothing was quantised"


def frozen_and_quantised(how: str, folder: Path, zero: dict[str, Any]) -> dict[str, tuple[torch.dtype, float]]:
    """DeepSpeed's way to keep frozen weights in int8: load, freeze, `optimizer.quantize_nontrainable_params()`.

    Returns each partition's dtype, and the parameter's largest error relative to its largest value.
    """
    CUDAQuantizer.quantizer_cuda_module = TorchKernels()
    plain = dict(load_with("plain", CAUSAL, folder, {}, {"dtype": torch.float16}).named_parameters())
    model = load_with(how, CAUSAL, folder, ds_config(torch.float16, **zero), {"dtype": torch.float16})
    model.requires_grad_(False)
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        pass  # with hpZ, the first gather makes the second copies
    # An engine would need fp16 on the CPU; this method of its optimizer wants just these two attributes.
    optimizer = SimpleNamespace(zero_quantized_nontrainable_weights=True, module=model)
    DeepSpeedZeroOptimizer_Stage3.quantize_nontrainable_params(optimizer)
    found = {}
    for name, param in model.named_parameters():
        with deepspeed.zero.GatheredParameters([param]):
            error = ((param.data - plain[name]).abs().max() / plain[name].abs().max()).item()
        found[name] = (param.ds_tensor.dtype, error)
    return found


@pytest.mark.parametrize(("world_size", "zero"), [(2, FROZEN), (4, FROZEN | HPZ)], ids=["alone", "hpz"])
def test_quantising_frozen_weights(cluster: None, tmp_path: Path, world_size: int, zero: dict[str, Any]) -> None:
    folder = make_even_llama(tmp_path, vocab_size=8192)
    streamed = run_ranks(world_size, frozen_and_quantised, "streamed", folder, zero)
    for found in streamed:
        assert {name for name, (dtype, _) in found.items() if dtype == torch.int8} == {
            "model.embed_tokens.weight",
            "lm_head.weight",
        }, "the two that DeepSpeed takes to be large enough"
        for dtype, error in found.values():
            assert error == 0 if dtype == torch.float16 else 0 < error < 0.01
    assert streamed == run_ranks(world_size, frozen_and_quantised, "stock", folder, zero)


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64), requires_grad=False)


def error_of_frozen(how: str, folder: Path) -> float:
    """The largest error of a frozen parameter of the user's own, added to a loaded model, once it is partitioned."""
    CUDAQuantizer.quantizer_cuda_module = TorchKernels()
    model = load_with(how, CAUSAL, folder, ds_config(**FROZEN), {})
    model.extra = Frozen()
    expected = model.extra.weight.detach().clone()
    next(iter(model.parameters())).convert_to_zero_parameters(param_list=[model.extra.weight])
    with deepspeed.zero.GatheredParameters([model.extra.weight]):
        return (model.extra.weight.data - expected).abs().max().item()


def test_partitioning_what_is_frozen(cluster: None, even: Path) -> None:
    """DeepSpeed quantises a partition while it is empty and copies the values into its int8, which loses them."""
    assert run_ranks(2, error_of_frozen, "streamed", even) == [0, 0]
    assert not any(error < 0.3 for error in run_ranks(2, error_of_frozen, "stock", even))
