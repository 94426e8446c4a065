"""Partitions in DeepSpeed's swap files: the values and losses of stock, in host memory no more than its buffers."""

from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import transformers

import hf_zero_stream
from benchmarks.moe_checkpoint import make_moe_checkpoint
from hf_zero_stream.engine.reader import Reader
from hf_zero_stream.planning.plan import LoadPlan
from tests.support.cluster import RankFailure, run_ranks
from tests.support.parity import ds_config, load_with, three_losses, unequal
from tests.support.zoo import Checkpoint


pytestmark = pytest.mark.usefixtures("async_io")

MIB = 2**20


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE of 40 MB in bf16, whose experts, but not its small weights, go to swap files."""
    return make_moe_checkpoint(tmp_path_factory.mktemp("moe"), 4e7, num_layers=4, num_experts=32)


def offload(folder: Path, **settings: Any) -> dict[str, Any]:
    nvme = {"device": "nvme", "nvme_path": str(folder), "buffer_count": 4, "buffer_size": 4 * MIB, **settings}
    return ds_config(torch.bfloat16, offload_param=nvme)


def inputs() -> dict[str, torch.Tensor]:
    ids = torch.arange(32).view(2, 16) * 37 % 1000
    return {"input_ids": ids, "labels": ids}


def train(folder: Path, config: dict[str, Any], loader: str) -> tuple[list[float], int]:
    """Losses of three steps, and how many parameters lie in swap files."""
    model = load_with(loader, "AutoModelForCausalLM", folder, config, {})
    swapped = sum(param.ds_tensor.final_location == "nvme" for param in model.parameters())
    engine, *_ = deepspeed.initialize(model=model, config=config)
    return three_losses(engine, inputs), swapped


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_losses_equal_stock(cluster: None, checkpoint: Path, tmp_path: Path, world_size: int) -> None:
    streamed = run_ranks(world_size, train, checkpoint, offload(tmp_path / "ours"), "streamed")
    stock = run_ranks(world_size, train, checkpoint, offload(tmp_path / "stock"), "stock")
    assert streamed == stock
    assert streamed[0][1] >= 8, "the fused experts should be in swap files"
    assert len(set(streamed[0][0])) == 3


def values(folder: Path, config: dict[str, Any]) -> list[str]:
    """Differences from plain loading, and whether two models loaded one after the other keep their own files."""
    plain = load_with("plain", "AutoModelForCausalLM", folder, {}, {"dtype": torch.bfloat16})
    models = [load_with("streamed", "AutoModelForCausalLM", folder, config, {}) for _ in range(2)]
    return [f"model {number}: {name}" for number, model in enumerate(models) for name in unequal(model, plain)]


@pytest.mark.parametrize("buffer_count", [1, 2, 5])
def test_values_equal_plain_loading(cluster: None, checkpoint: Path, tmp_path: Path, buffer_count: int) -> None:
    config = offload(tmp_path, buffer_count=buffer_count)
    assert run_ranks(2, values, checkpoint, config) == [[], []]


def executed(folder: Path, config: dict[str, Any]) -> LoadPlan:
    """The plan that a load carries out."""
    plans: list[LoadPlan] = []
    fill = Reader.fill

    def noting(self: Reader, batches: Any, plan: LoadPlan, *args: Any) -> None:
        plans.append(plan)
        fill(self, batches, plan, *args)

    Reader.fill = noting  # type: ignore[method-assign]
    hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(folder, ds_config=config)
    return plans[0]


@pytest.mark.plugin("forecast")
@pytest.mark.parametrize("batches", [1, 5])
def test_the_plan_that_is_shown_is_the_plan_that_runs(
    cluster: None, checkpoint: Path, tmp_path: Path, batches: int
) -> None:
    config = offload(tmp_path) if batches > 1 else ds_config(torch.bfloat16)
    shown = [hf_zero_stream.plan(str(checkpoint), world_size=2, rank=rank, ds_config=config) for rank in range(2)]
    assert [forecast.load for forecast in shown] == run_ranks(2, executed, checkpoint, config)
    assert len(shown[0].load.batches) == batches


def growth(folder: Path, config: dict[str, Any]) -> tuple[int, int]:
    model = hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(folder, ds_config=config)
    rank = model.streaming_report.ranks[torch.distributed.get_rank()]
    return rank.anonymous_growth_peak, rank.partition_bytes


@pytest.mark.slow
def test_host_memory_is_bounded_by_the_buffers(cluster: None, tmp_path: Path) -> None:
    """Partitions of 384 MiB on one rank pass through buffers of 2 x 24 MiB."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1024,
        hidden_size=1024,
        intermediate_size=12288,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "llama")
    buffers = offload(tmp_path / "swap", buffer_count=2, buffer_size=12 * MIB)
    ((peak, partitions),) = run_ranks(1, growth, tmp_path / "llama", buffers)
    assert partitions > 350 * MIB
    assert peak < 48 * MIB + 64 * MIB + 32 * MIB, "buffers, staging and what else a load needs"


@pytest.mark.slow
def test_missing_weights_are_initialised_in_swap_files(cluster: None, checkpoint: Path, tmp_path: Path) -> None:
    assert run_ranks(2, classifier, checkpoint, offload(tmp_path)) == [True, True]


def classifier(folder: Path, config: dict[str, Any]) -> bool:
    """A new head of over 1 MiB gets values, the same on all ranks."""
    auto_class = hf_zero_stream.StreamingAutoModelForSequenceClassification
    model = auto_class.from_pretrained(folder, ds_config=config, num_labels=8192)
    assert model.score.weight.ds_tensor.final_location == "nvme"
    with deepspeed.zero.GatheredParameters([model.score.weight]):
        everyone = [torch.empty_like(model.score.weight) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(everyone, model.score.weight.data)
        return bool(everyone[0].float().std() > 0.01) and all(torch.equal(everyone[0], other) for other in everyone)


def test_small_buffer_size_is_refused_before_loading(cluster: None, checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(2, values, checkpoint, offload(tmp_path, buffer_size=MIB))
    for outcome in failure.value.outcomes:
        assert outcome.error_type == "ConfigError"
        assert outcome.error_message is not None
        assert "buffer_size: expected at least" in outcome.error_message and "mlp.experts" in outcome.error_message
    assert not list(Path(tmp_path).rglob("*.swp"))


@pytest.mark.slow
def test_every_home_is_the_one_of_stock(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Tiny weights stay in host memory."""
    folder = zoo_checkpoint("qwen3_moe", torch.bfloat16)
    assert run_ranks(2, values, folder, offload(tmp_path)) == [[], []]
