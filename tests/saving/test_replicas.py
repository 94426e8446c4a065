"""Where every rank has all of a tensor, and values differ, rank 0's are saved, if nothing has made them equal."""

from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

import hf_zero_stream
from hf_zero_stream.errors import UnsupportedError
from hf_zero_stream.saving.lazy_parameters import digest
from tests.support.cluster import run_ranks
from tests.support.loading import load_with
from tests.support.messages import listen
from tests.support.parity import ds_config
from tests.support.saving import SHARD_SIZE, different, saves_with
from tests.support.zoo import Checkpoint


def save_replicas(checkpoint: Path, folder: Path) -> dict[str, Any]:
    """Without ZeRO: one parameter and one buffer are of each rank's own, and a transposed one (in stock's layout)."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    messages = listen()
    report = hf_zero_stream.save_pretrained(model, folder / "same", max_shard_size=SHARD_SIZE)
    assert messages == []
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() > 1:
                param.add_(torch.randn(param.shape))
    model.register_buffer("running_mean", torch.randn(300))
    if dist.get_rank() == 0:
        model.save_pretrained(folder / "stock", max_shard_size=SHARD_SIZE)
    dist.barrier()
    for write_from in ("all", "rank0"):
        with saves_with(chunk_bytes=512, write_from=write_from, verify="full"):
            hf_zero_stream.save_pretrained(model, folder / write_from, max_shard_size=SHARD_SIZE)
    return {"messages": messages, "written": [rank.bytes_written for rank in report.ranks]}


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_rank_0s_values(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, name: str) -> None:
    found = run_ranks(2, save_replicas, zoo_checkpoint(name), tmp_path)
    for folder in ("all", "rank0"):
        assert different(tmp_path / folder, tmp_path / "stock") == []
    assert all(min(of_rank["written"]) > 0.4 * max(of_rank["written"]) for of_rank in found)
    assert "model.embed_tokens.weight" in found[0]["messages"][0] and "rank 0" in found[0]["messages"][0]
    assert found[1]["messages"] == []


def save_with_a_head(checkpoint: Path, folder: Path) -> None:
    """A head that was added after a streamed load, with another seed on every rank."""
    model = load_with("streamed", "AutoModelForCausalLM", checkpoint, ds_config(), {})
    torch.manual_seed(dist.get_rank())
    model.score = nn.Linear(16, 300)
    model.running = nn.BatchNorm1d(40)
    model.running.running_mean.fill_(dist.get_rank() + 5.0)
    hf_zero_stream.save_pretrained(model, folder)
    if dist.get_rank() == 0:
        torch.save({"weight": model.score.weight, "bias": model.score.bias}, folder / "head.pt")


def test_a_head_with_other_seeds(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    run_ranks(3, save_with_a_head, zoo_checkpoint("qwen3_moe"), tmp_path)
    saved, head = load_file(tmp_path / "model.safetensors"), torch.load(tmp_path / "head.pt")
    assert torch.equal(saved["score.weight"], head["weight"]) and torch.equal(saved["score.bias"], head["bias"])
    assert set(saved["running.running_mean"].tolist()) == {5.0}


def save_moments_that_differ(folder: Path) -> str:
    """A training in which one moment of one parameter is another on the last rank."""
    torch.manual_seed(0)
    model = nn.Linear(64, 48)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 64)).square().sum().backward()
    optimizer.step()
    hf_zero_stream.save_state(model, folder / "same", optimizer=optimizer)
    optimizer.state[model.weight]["exp_avg_sq"].add_(dist.get_rank())
    with pytest.raises(UnsupportedError) as refused:
        hf_zero_stream.save_state(model, folder / "different", optimizer=optimizer)
    return str(refused.value)


def test_moments_that_differ(cluster: None, tmp_path: Path) -> None:
    messages = run_ranks(2, save_moments_that_differ, tmp_path)
    assert all("weight (rank 1)" in message and "bias" not in message for message in messages), messages
    assert not (tmp_path / "different" / "latest").exists()


def save_engine_that_differs(checkpoint: Path, folder: Path) -> str:
    """After deepspeed.initialize, which makes ranks equal, code of some rank changes a parameter."""
    config = ds_config(torch.float32, stage=1)
    model = load_with("streamed", "AutoModelForCausalLM", checkpoint, config, {})
    model.score = nn.Linear(16, 300)
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))
    hf_zero_stream.save_pretrained(engine, folder / "same")
    with torch.no_grad():
        model.score.bias.add_(dist.get_rank() == 1)
    messages = []
    for write_from in ("rank0", "all"):
        with saves_with(write_from=write_from), pytest.raises(UnsupportedError) as refused:
            hf_zero_stream.save_pretrained(engine.module, folder / "different")
        messages.append(str(refused.value))
    assert messages[0] == messages[1]
    return messages[0]


def test_an_engine_that_differs(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    messages = run_ranks(3, save_engine_that_differs, zoo_checkpoint("qwen3_moe"), tmp_path)
    assert all("DeepSpeedEngine" in message and "score.bias (rank 1)" in message for message in messages), messages
    assert list((tmp_path / "different").rglob("*.safetensors")) == []


def test_digests_differ_with_a_single_bit() -> None:
    values = torch.randn(300_001)
    seen = {digest(values)}
    for position in (0, 1, 128, 1023, 150_000, 262_143, 262_144, 300_000):
        values.view(torch.int32)[position] ^= 1
        seen.add(digest(values))
    assert len(seen) == 9
    assert digest(values) == digest(values.clone())
    swapped = values.clone().view(-1)[:300_000].view(300, 1000).flip(0).reshape(-1)
    assert digest(swapped) != digest(values[:300_000])
    assert digest(torch.full((4096,), 1.0)) != digest(torch.full((4096,), 2.0))
    assert digest(torch.zeros(16)) != digest(torch.zeros(17))
    for dtype in (torch.bfloat16, torch.int8, torch.bool):
        assert digest(torch.ones(5, dtype=dtype)) != digest(torch.zeros(5, dtype=dtype))
    assert digest(torch.empty(0)) == digest(torch.empty(0))


def test_digests_differ_where_values_are_of_a_pattern() -> None:
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        identity = torch.eye(512, dtype=dtype)
        assert digest(identity) != digest(identity[[4, 1, 2, 3, 0, *range(5, 512)]])
        values = torch.randn(512, 512, generator=torch.Generator().manual_seed(0)).to(dtype)
        assert digest(values) != digest(-values)
        flipped = values.clone()
        flipped[3::64, 5::64] *= -1
        assert digest(values) != digest(flipped)
