"""One rank reads for the others, which need not see the shards at all."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hf_zero_stream
from hf_zero_stream.plugins.relay import relay
from tests.support.cluster import SOON_S, run_ranks, run_ranks_expecting_errors
from tests.support.commands import run_command
from tests.support.disk import failing, replace_reads
from tests.support.hosts import move_to_host
from tests.support.parity import differences, ds_config
from tests.support.zoo import Checkpoint


def load_elsewhere(folder: Path, scratch: Path) -> dict[str, Any]:
    """Load where every rank but 0 sees a folder without shards, in many chunks."""
    relay.CHUNK_BYTES = 1000

    rank = torch.distributed.get_rank()
    seen = folder
    if rank:
        seen = scratch / f"node{rank}"
        shutil.copytree(folder, seen, ignore=shutil.ignore_patterns("*.safetensors"))
    # Loaded before a DeepSpeed config is alive: afterwards a load on one rank alone would wait for the others.
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
    config = {**ds_config(), "hf_zero_stream": {"read_from": "rank0"}}
    keep = transformers.integrations.HfDeepSpeedConfig(config)
    model = hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(seen)
    del keep
    return {"differences": differences(model, plain, torch.float32)}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", ["qwen3_moe", "llama"])
def test_rank0_reads_for_all(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, name: str, world_size: int
) -> None:
    for result in run_ranks(world_size, load_elsewhere, zoo_checkpoint(name), tmp_path):
        assert result["differences"] == []


def load_with_local_readers(folder: Path, hosts: list[str]) -> dict[str, Any]:
    """Four ranks on two hosts: each host's first rank reads."""
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder)
    move_to_host(hosts[torch.distributed.get_rank()])
    opened: list[str] = []
    real_open = os.open
    os.open = lambda path, *rest, **kwargs: opened.append(str(path)) or real_open(path, *rest, **kwargs)
    config = {**ds_config(), "hf_zero_stream": {"read_from": "local_rank0"}}
    model = hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(folder, ds_config=config)
    os.open = real_open
    return {
        "differences": differences(model, plain, torch.float32),
        "opened": sorted({Path(path).name for path in opened if path.endswith(".safetensors")}),
    }


@pytest.mark.parametrize(
    ("hosts", "readers"), [("aabb", [0, 2]), ("abab", [0, 1]), ("abba", [0, 1])], ids=["by slot", "by node", "mixed"]
)
def test_one_rank_of_each_host_reads(
    cluster: None, zoo_checkpoint: Checkpoint, hosts: str, readers: list[int]
) -> None:
    """However the launcher numbers ranks, and whatever it says of a host in variables."""
    results = run_ranks(4, load_with_local_readers, zoo_checkpoint("qwen3_moe"), list(hosts))
    assert all(result["differences"] == [] for result in results)
    assert [rank for rank, result in enumerate(results) if result["opened"]] == readers


SCRIPT = """
import os
import sys

import deepspeed
import torch
from hf_zero_stream import StreamingAutoModelForCausalLM

deepspeed.init_distributed("gloo")
opened = []
real_open = os.open
os.open = lambda path, *rest, **kwargs: opened.append(str(path)) or real_open(path, *rest, **kwargs)
zero = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
config = {**zero, "hf_zero_stream": {"read_from": "local_rank0"}}
model = StreamingAutoModelForCausalLM.from_pretrained(sys.argv[-1], ds_config=config)
reads = any(path.endswith(".safetensors") for path in opened)
print(f"rank {torch.distributed.get_rank()} of {model.streaming_report.world_size}: reads={reads}", flush=True)
"""


@pytest.mark.slow
def test_under_the_deepspeed_launcher(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """It announces how many ranks a host has in a variable of its own."""
    (tmp_path / "script.py").write_text(SCRIPT)
    printed = run_command(f"deepspeed --num_accelerators 2 script.py {zoo_checkpoint('llama')}", tmp_path)
    assert "rank 0 of 2: reads=True" in printed
    assert "rank 1 of 2: reads=False" in printed


def load_with_a_failing_reader(folder: Path) -> Any:
    if torch.distributed.get_rank() == 0:
        replace_reads(failing(errno.EIO))
    config = {**ds_config(), "hf_zero_stream": {"read_from": "rank0"}}
    return hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(folder, ds_config=config)


def test_a_failing_reader_fails_all(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    outcomes = run_ranks_expecting_errors(3, load_with_a_failing_reader, zoo_checkpoint("qwen3_moe"), timeout=60)
    for outcome in outcomes:
        assert outcome.error_type == "ReadError"
        assert outcome.seconds < SOON_S
    assert "Input/output error" in str(outcomes[0].error_message)
    assert "rank 0" in str(outcomes[1].error_message)
