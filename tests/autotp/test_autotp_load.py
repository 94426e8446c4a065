"""A load under AutoTP: each rank reads the parts that DeepSpeed keeps of a model that nobody has in full."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import transformers
from transformers.integrations import HfDeepSpeedConfig

import hf_zero_stream
from hf_zero_stream.checkpoint.lazy import LazyTensor
from hf_zero_stream.errors import UnsupportedError
from hf_zero_stream.holdings.deepspeed.partitions import own_range
from hf_zero_stream.reports.measures import AnonymousMemory
from tests.autotp.test_autotp import CONFIGS, TEXT, checkpoint_of, config_of, engine_of, save_as_stock
from tests.support.checkpoint_files import differing, tensors_of
from tests.support.cluster import run_ranks
from tests.support.parity import ds_config
from tests.support.training_state import train


CONFIGS["hooks"] = lambda: transformers.Qwen3Config(**TEXT, head_dim=12, tie_word_embeddings=True)
"""Of replicas that are used on parts of activations (q_norm) DeepSpeed sums the gradients, by hooks."""


def parts(engine: Any) -> dict[str, torch.Tensor]:
    """Copies of what this rank holds: under ZeRO-3 partitions, without padding, which stock leaves undefined."""
    found = {}
    for name, param in engine.module.named_parameters():
        found[name] = param.detach().clone()
        if hasattr(param, "ds_tensor"):
            _, start, stop = own_range(param)
            found[name] = param.ds_tensor[: stop - start].clone()
    return found


def hold(checkpoint: Path, config: dict[str, Any], how: str, trains: bool) -> dict[str, Any]:
    """What this rank holds of each parameter of the engine, what it has drawn, and two steps."""
    torch.manual_seed(5)
    with hf_zero_stream.streaming() if how == "ours" else nullcontext():
        engine = engine_of(checkpoint, config)
    found = {"values": parts(engine)}
    found["drawn"] = torch.rand(4)
    found["losses"] = train(engine, range(2)) if trains else []
    found["after"] = parts(engine)
    if how == "ours":
        report = engine.module.streaming_report
        is_zero3 = config["zero_optimization"]["stage"] == 3
        assert report.into == ("ZeRO-3 partitions of the parts" if is_zero3 else "the parts") + " that AutoTP has cut"
        found["bytes"] = [rank.bytes_needed for rank in report.ranks]
        found["materialised"] = [rank.materialised for rank in report.ranks]
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("model", "stage", "dtype"),
    [
        ("hooks", 1, torch.float32),
        ("bigcode", 1, torch.float32),
        ("plan", 0, torch.bfloat16),
        ("tied", 2, torch.bfloat16),
        ("uneven", 2, torch.float32),
        ("one kv head", 0, torch.float32),
        ("custom", 1, torch.bfloat16),
        ("heuristic", 2, torch.float32),
        ("fused", 1, torch.float32),
        ("viewed", 0, torch.float32),
        ("hooks", 3, torch.float32),
        ("bigcode", 3, torch.float32),
        ("plan", 3, torch.bfloat16),
        ("tied", 3, torch.float32),
        ("uneven", 3, torch.bfloat16),
        ("fused", 3, torch.float32),
        ("heuristic", 3, torch.float32),
        ("custom", 3, torch.bfloat16),
    ],
)
def test_parts_are_stocks(cluster: None, tmp_path: Path, model: str, stage: int, dtype: torch.dtype) -> None:
    """Bit for bit what DeepSpeed cuts of whole models, also in ways that it does not describe (bigcode)."""
    checkpoint, trains = checkpoint_of(model, tmp_path / "checkpoint"), model not in ("fused", "viewed", "bigcode")
    config = config_of(model, stage, 2, dtype)
    ranks = 4 if stage == 3 else 2
    stock, ours = (run_ranks(ranks, hold, checkpoint, config, how, trains) for how in ("stock", "ours"))
    for expected, found in zip(stock, ours, strict=True):
        for when in ("values", "after"):
            assert found[when].keys() == expected[when].keys()
            assert [name for name, part in expected[when].items() if not torch.equal(found[when][name], part)] == []
        assert torch.equal(found["drawn"], expected["drawn"])
        assert found["losses"] == expected["losses"]
    assert not any(map(any, ours[0]["materialised"]))


def test_four_ranks(cluster: None, tmp_path: Path) -> None:
    checkpoint, config = checkpoint_of("plan", tmp_path / "checkpoint"), config_of("plan", 1, 2)
    stock, ours = (run_ranks(4, hold, checkpoint, config, how, True) for how in ("stock", "ours"))
    for expected, found in zip(stock, ours, strict=True):
        assert all(torch.equal(found["after"][name], part) for name, part in expected["after"].items())
        assert found["losses"] == expected["losses"]


def swap(checkpoint: Path, folder: Path, config: dict[str, Any], how: str) -> list[float]:
    """The losses of four steps; after two of them a save and, of ours, a resume."""
    with hf_zero_stream.streaming() if how == "ours" else nullcontext():
        engine = engine_of(checkpoint, config)
        losses = train(engine, range(2))
        if how == "stock":
            save_as_stock(engine, folder / how)
            return losses + train(engine, (2, 3))
        assert engine.module.streaming_report.into == "the parts that AutoTP has cut"
        hf_zero_stream.save_pretrained(engine, folder / how)
        hf_zero_stream.save_state(engine, folder / "state")
        train(engine, (2, 3))
        hf_zero_stream.load_state(engine, folder / "state")
        return losses + train(engine, (2, 3))


@pytest.mark.slow
def test_swap_files(cluster: None, async_io: None, tmp_path: Path) -> None:
    """Parts of which DeepSpeed itself writes partitions into swap files, those of parameters and of the optimizer."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 3072, "num_hidden_layers": 1, "vocab_size": 4096}
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**{**TEXT, **sizes}))
    model.save_pretrained(tmp_path / "checkpoint")
    losses = []
    for how in ("stock", "ours"):
        config, nvme = config_of("plan", 3, 2), {"device": "nvme", "nvme_path": str(tmp_path / f"swap {how}")}
        offload = {"offload_param": {**nvme, "buffer_size": 2**22}, "offload_optimizer": nvme}
        config["zero_optimization"].update(offload)
        losses.append(run_ranks(4, swap, tmp_path / "checkpoint", tmp_path, config, how))
        assert any(path.is_file() for path in (tmp_path / f"swap {how}").rglob("*"))
    assert losses[0] == losses[1]
    assert differing(tensors_of(tmp_path / "ours"), tensors_of(tmp_path / "stock")) == []


def refused(checkpoint: Path, config: dict[str, Any]) -> str:
    with hf_zero_stream.streaming(), pytest.raises(UnsupportedError) as error:
        engine_of(checkpoint, config)
    return str(error.value)


def test_groups_of_hpz_are_those_of_autotp(cluster: None, tmp_path: Path) -> None:
    """Stock gathers what other ranks have of other parts."""
    config = config_of("plan", 3, 2)
    config["zero_optimization"]["zero_hpz_partition_size"] = 2
    for text in run_ranks(4, refused, checkpoint_of("plan", tmp_path / "checkpoint"), config):
        assert text.startswith("zero_hpz_partition_size: ") and "autotp_size" in text


def other_uses(checkpoint: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Models that are used before the engine, changed, or trained by an engine without AutoTP."""
    keeps = HfDeepSpeedConfig(config)
    ids = torch.arange(6, 24).view(1, -1)
    stock = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    with hf_zero_stream.streaming():
        used, changed, whole = (transformers.AutoModelForCausalLM.from_pretrained(checkpoint) for _ in range(3))
    assert all(isinstance(param, LazyTensor) for param in whole.parameters())
    plain = ds_config(torch.float32, stage=1)
    engine, *_ = deepspeed.initialize(model=whole, config=plain, model_parameters=list(whole.parameters()))
    for name, param in stock.named_parameters():
        assert torch.equal(engine.module.get_parameter(name), param), name
    with torch.no_grad():
        assert torch.equal(used(input_ids=ids).logits, stock(input_ids=ids).logits)
        if dist.get_rank() == 0:  # a look at what one rank has
            changed(input_ids=ids)
        changed.model.layers[0].mlp.up_proj.weight.mul_(2)
        stock.model.layers[0].mlp.up_proj.weight.mul_(2)
    engine, *_ = deepspeed.initialize(model=changed, config=config, model_parameters=list(changed.parameters()))
    expected, *_ = deepspeed.initialize(model=stock, config=config, model_parameters=list(stock.parameters()))
    for name, param in expected.module.named_parameters():
        assert torch.equal(engine.module.get_parameter(name), param), name
    del keeps
    return {}


def test_other_uses(cluster: None, tmp_path: Path) -> None:
    run_ranks(2, other_uses, checkpoint_of("plan", tmp_path / "checkpoint"), config_of("plan", 1, 2))


def grow(checkpoint: Path, config: dict[str, Any], how: str) -> dict[str, Any]:
    """Bytes by which anonymous memory grows at most, until the engine's parameters have been cut."""
    engine_class = deepspeed.runtime.engine.DeepSpeedEngine
    configure, memory = engine_class._configure_distributed_model, AnonymousMemory()
    found: dict[str, Any] = {}

    def note(self: Any, model: Any) -> None:
        memory.sample()
        found["grown"] = memory.growth_peak
        configure(self, model)

    engine_class._configure_distributed_model = note
    with memory, hf_zero_stream.streaming() if how == "ours" else nullcontext():
        engine_of(checkpoint, config)
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_memory(cluster: None, tmp_path: Path, stage: int) -> None:
    """No rank ever has the whole model in memory: 220 MB, of which half is cut. Nor all of its part under ZeRO-3."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 3072, "num_hidden_layers": 10, "vocab_size": 4096}
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**{**TEXT, **sizes}))
    model.save_pretrained(tmp_path / "checkpoint")
    whole = sum(param.nbytes for param in model.parameters())
    config = config_of("plan", stage, 2)
    grown = {
        how: max(found["grown"] for found in run_ranks(4, grow, tmp_path / "checkpoint", config, how))
        for how in ("stock", "ours")
    }
    assert grown["ours"] < (0.75 if stage == 1 else 0.4) * whole, grown


def digest(checkpoint: Path, config: dict[str, Any]) -> str:
    with hf_zero_stream.streaming(hf_zero_stream.StreamingConfig(verify="full")):
        digest: str = engine_of(checkpoint, config).module.streaming_report.digest
    return digest


@pytest.mark.plugin("verify")
@pytest.mark.parametrize("model", ["uneven", "fused"])
def test_digest(cluster: None, tmp_path: Path, model: str) -> None:
    """It is the model's, however ranks hold it."""
    checkpoint = checkpoint_of(model, tmp_path / "checkpoint")
    runs = [(2, config_of(model, 1, 2)), (4, config_of(model, 1, 2)), (2, config_of(model, 3, 1))]
    runs += [(4, config_of(model, 3, 2))]
    found = {value for ranks, config in runs for value in run_ranks(ranks, digest, checkpoint, config)}
    assert len(found) == 1 and found != {""}
