"""Partitions in every home: values are plain loading's, losses stock's.

- Partitions in host memory, with hpZ, frozen, and of mixed dtypes: values are plain loading's, losses stock's, to the
  last bit. The table of all homes is docs/support.md.
- Parameters that are partitioned over other ranks than the rest, by DeepSpeed's `ds_zero_partition_process_group`.
- ZeRO++'s quantised weights. DeepSpeed has the kernels for GPUs alone: without them a load is refused; with others, in
  torch, beneath everything else that is DeepSpeed's, streamed models train as stock's. See docs/support.md.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import peft
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import CUDAQuantizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import initialization as init

from hf_zero_stream.destinations.deepspeed import zero3
from tests.support.checkpoint_files import rewritten, tensors_of
from tests.support.cluster import run_ranks
from tests.support.homes import CAUSAL, HPZ, OFFLOAD, Prepare, assert_trains_as_stock, make_even_llama, train
from tests.support.messages import error_of
from tests.support.odd_models import WIDTH, Odd, OddConfig, fill
from tests.support.parity import differences, ds_config, load_with, three_losses
from tests.support.zoo import ZOO, Checkpoint


# ------------------------------------------------------------------------------------------------------- host memory


@pytest.mark.sample(1)
@pytest.mark.parametrize("world_size", [2, 3])
def test_offload_to_pinned_memory(cluster: None, zoo_checkpoint: Checkpoint, world_size: int) -> None:
    folder = zoo_checkpoint("qwen3_moe", torch.bfloat16)
    assert_trains_as_stock(world_size, folder, ds_config(torch.bfloat16, **OFFLOAD))


def pinned_partitions(folder: Path, pin_memory: bool) -> dict[str, Any]:
    """How many partitions lie in memory that was made pinned, as for a GPU."""
    memory: dict[int, torch.Tensor] = {}
    empty = torch.empty

    def made(*sizes: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        tensor = empty(*sizes, **options)
        if pin_memory:
            memory[tensor.data_ptr()] = tensor
        return tensor

    torch.empty = made  # type: ignore[assignment]
    zero3.accelerators = SimpleNamespace(kind=lambda: "cuda")  # type: ignore[assignment]
    config = ds_config(offload_param={"device": "cpu", "pin_memory": pin_memory})
    plain = load_with("plain", CAUSAL, folder, {}, {})
    model = load_with("streamed", CAUSAL, folder, config, {})
    partitions = [param.ds_tensor for param in model.parameters()]
    return {
        "all": len(partitions),
        "pinned": sum(partition.data_ptr() in memory for partition in partitions),
        "differences": differences(model, plain, torch.float32),
    }


@pytest.mark.parametrize("pin_memory", [True, False], ids=["pinned", "pageable"])
def test_pinned_memory_is_filled_in_place(cluster: None, zoo_checkpoint: Checkpoint, pin_memory: bool) -> None:
    for found in run_ranks(2, pinned_partitions, zoo_checkpoint("llama"), pin_memory):
        assert found["differences"] == []
        assert found["pinned"] == (found["all"] if pin_memory else 0)


# --------------------------------------------------------------------------------------------------------------- hpZ


@pytest.mark.sample(1)
@pytest.mark.parametrize(("world_size", "size"), [pytest.param(4, 2, marks=pytest.mark.slow), (3, 3), (2, 8)])
def test_hpz(cluster: None, zoo_checkpoint: Checkpoint, world_size: int, size: int) -> None:
    """Each rank reads 1/N of the checkpoint; DeepSpeed makes the second copies at the first gather."""
    folder = zoo_checkpoint("qwen3_moe", torch.bfloat16)
    config = ds_config(torch.bfloat16, zero_hpz_partition_size=size)
    streamed = assert_trains_as_stock(world_size, folder, config)
    assert [rank["second copies"] for rank in streamed] == [0] * world_size
    stored = sum(value.nbytes for value in tensors_of(folder).values())
    assert sum(rank["bytes needed"] for rank in streamed) == stored


def initialised_under(folder: Path, zero: dict[str, Any]) -> list[str]:
    plain = load_with("plain", CAUSAL, folder, {}, {})
    return differences(load_with("streamed", CAUSAL, folder, ds_config(**zero), {}), plain, torch.float32)


@pytest.mark.parametrize(("world_size", "zero"), [(4, HPZ), (2, OFFLOAD)], ids=["hpz", "offload"])
def test_missing_keys(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, world_size: int, zero: dict[str, Any]
) -> None:
    """Initialisation gathers what it writes, and writes it back to where it lives."""
    lost = ("lm_head.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight")
    rewritten(zoo_checkpoint("llama"), tmp_path, lambda tensors: [tensors.pop(name) for name in lost])
    assert run_ranks(world_size, initialised_under, tmp_path, zero) == [[]] * world_size


# ------------------------------------------------------------------------------------------- frozen and mixed dtypes


def freeze_half(model: nn.Module) -> nn.Module:
    for name, param in model.named_parameters():
        param.requires_grad_("layers.1" in name or "lm_head" in name)
    return model


def add_lora(model: nn.Module) -> nn.Module:
    """Factors in fp32 on a base in bf16: PEFT's default."""
    lora = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(model, lora)
    dtypes = {param.requires_grad: param.dtype for param in model.parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    return model


@pytest.mark.sample(1)
@pytest.mark.parametrize("prepare", [freeze_half, add_lora])
@pytest.mark.parametrize(
    ("world_size", "zero"), [(3, OFFLOAD), pytest.param(4, HPZ, marks=pytest.mark.slow)], ids=["offload", "hpz"]
)
def test_frozen(
    cluster: None, zoo_checkpoint: Checkpoint, world_size: int, zero: dict[str, Any], prepare: Prepare
) -> None:
    folder = zoo_checkpoint("qwen3_moe", torch.bfloat16)
    assert_trains_as_stock(world_size, folder, ds_config(torch.bfloat16, **zero), prepare)


def frozen_partitions(folder: Path) -> list[bool]:
    """For each frozen parameter, whether its partition is the memory that was loaded into, after training too."""
    config = ds_config(**OFFLOAD)
    model = freeze_half(load_with("streamed", CAUSAL, folder, config, {}))
    before = {name: (param.ds_tensor.data_ptr(), param.ds_tensor.clone()) for name, param in model.named_parameters()}
    trained = [param for param in model.parameters() if param.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=trained)
    three_losses(engine, ZOO["llama"].inputs)
    return [
        param.ds_tensor.data_ptr() == before[name][0] and torch.equal(param.ds_tensor, before[name][1])
        for name, param in model.named_parameters()
        if not param.requires_grad
    ]


def test_frozen_partitions_stay(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    for stayed in run_ranks(2, frozen_partitions, zoo_checkpoint("llama")):
        assert len(stayed) > 5 and all(stayed)


@pytest.mark.slow
def test_torch_autocast(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    """Mixed dtypes: partitions in fp32, of which those of linear layers are gathered in bf16."""
    config = {**ds_config(), "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    mixed = assert_trains_as_stock(2, zoo_checkpoint("llama"), config)
    exact = run_ranks(2, train, "streamed", zoo_checkpoint("llama"), ds_config())
    assert mixed[0]["losses"] != exact[0]["losses"]


class Grouped(Odd):
    """One parameter is partitioned over two ranks at a time, and so is one of a submodule."""

    def build(self) -> None:
        self.experts = nn.Parameter(torch.zeros(5, WIDTH))
        if dist.is_initialized():
            first = dist.get_rank() // 2 * 2
            group = dist.new_group([first, first + 1], use_local_synchronization=True)
            self.experts.ds_zero_partition_process_group = group
            self.second.weight.ds_zero_partition_process_group = group

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Grouped):
            init.copy_(module.experts, torch.arange(5.0 * WIDTH).view(5, WIDTH))


def load_grouped(folder: Path) -> dict[str, Any]:
    plain = dict(load_with("plain", f"{__name__}:Grouped", folder, {}, {}).named_parameters())
    model = load_with("streamed", f"{__name__}:Grouped", folder, ds_config(), {})
    ranks = {name: param.ds_zero_partition_world_size for name, param in model.named_parameters()}
    own = {name: param.ds_tensor.numel() for name, param in model.named_parameters()}
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        different = [name for name, param in model.named_parameters() if not torch.equal(param.data, plain[name])]
    return {"different": different, "ranks": ranks, "own": own}


@pytest.mark.parametrize("missing", [False, True], ids=["whole", "missing"])
def test_group_of_a_parameter(cluster: None, tmp_path: Path, missing: bool) -> None:
    fill(Grouped(OddConfig())).save_pretrained(tmp_path)
    if missing:
        tensors = load_file(tmp_path / "model.safetensors")
        del tensors["experts"], tensors["first.weight"]
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for found in run_ranks(4, load_grouped, tmp_path):
        assert found["different"] == []
        assert found["ranks"] == {name: 2 if name in ("experts", "second.weight") else 4 for name in found["ranks"]}
        assert found["own"]["experts"] == -(-5 * WIDTH // 2)


WIRE = {"zero_quantized_weights": True}
FROZEN = {"zero_quantized_nontrainable_weights": True}


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_even_llama(tmp_path_factory.mktemp("even"))


def errors_with(folder: Path, zero: dict[str, Any]) -> list[tuple[str, str]]:
    found = []
    for how in ("stock", "streamed"):
        found.append(error_of(lambda how=how: load_with(how, CAUSAL, folder, ds_config(**zero), {})))
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
