"""Models that were streamed into shards train as plain ones do, and as those of stock do."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

from tests import sampling
from tests.support.cluster import run_ranks
from tests.support.sharded import Sizes, even_inputs, even_model, load_sharded
from tests.support.trainings import Training
from tests.support.zoo import Checkpoint


CAUSAL = transformers.AutoModelForCausalLM


def three_losses(model: Any) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return Training(model, optimizer, batch=lambda _: even_inputs()).train(range(3))


def losses_or_error(model_or_call: Any) -> Any:
    try:
        return three_losses(model_or_call())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def train(folder: Path, of_sizes: list[Sizes]) -> list[Any]:
    """The losses of plain training, of stock's sharded model, and of ours, in each of the sizes."""
    transformers.utils.logging.set_verbosity_error()
    plain, found = three_losses(CAUSAL.from_pretrained(folder)), []
    for sizes in of_sizes:
        dist.barrier()
        stock = losses_or_error(lambda sizes=sizes: CAUSAL.from_pretrained(folder, distributed_config=dict(sizes)))
        dist.barrier()
        ours = losses_or_error(lambda sizes=sizes: load_sharded(CAUSAL, folder, sizes))
        found.append((sizes, plain, stock, ours))
    return found


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
@pytest.mark.sample(1)
def test_losses(cluster: None, tmp_path: Path, name: str) -> None:
    even_model(name).save_pretrained(tmp_path)
    of_experts: list[Sizes] = [{"fsdp_size": 2, "ep_size": 2}] if name == "qwen3_moe" else []
    of_sizes: list[Sizes] = sampling.every(2, [{"fsdp_size": 2}, {"tp_size": 2}, *of_experts])
    for found in run_ranks(2, train, tmp_path, of_sizes):
        for sizes, plain, stock, ours in found:
            assert ours == stock, (sizes, stock, ours)
            assert len(set(plain)) == 3
            assert ours == pytest.approx(plain, abs=1e-6), sizes
    if sampling.is_sample:
        return
    for found in run_ranks(4, train, tmp_path, [{"dp_replicate_size": 2, "fsdp_size": 2}]):
        for sizes, plain, stock, ours in found:
            assert ours == stock and ours == pytest.approx(plain, abs=1e-6), (sizes, plain, stock, ours)


@pytest.mark.slow
def test_policies(cluster: None, tmp_path: Path) -> None:
    """Memory on the CPU, and 16-bit computing: as in stock, its errors included."""
    even_model("llama").save_pretrained(tmp_path)
    of_sizes: list[Sizes] = [
        {"fsdp_size": 2, "fsdp_cpu_offload": True},
        {"fsdp_size": 2, "fsdp_mixed_precision": True},
        {"fsdp_size": 2, "fsdp_cpu_offload": True, "fsdp_mixed_precision": True},
    ]
    for found in run_ranks(2, train, tmp_path, of_sizes):
        for sizes, _, stock, ours in found:
            assert ours == stock, (sizes, stock, ours)
        assert any(isinstance(ours, list) for _, _, _, ours in found)


@pytest.mark.slow
def test_a_tied_head_of_odd_sizes(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    """It stays one parameter. Of stock's, which FSDP2 pads, the two ends part in the first step, without a word."""
    for found in run_ranks(2, train, zoo_checkpoint("qwen3"), [{"fsdp_size": 2}]):
        ((_, plain, stock, ours),) = found
        assert ours == plain and len(set(plain)) == 3
        assert stock[0] == plain[0] and stock[1:] != plain[1:]
