"""What needs a CUDA device (`make gpu`), and what `make gpu` says without one."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from scripts.gpu import block
from tests.zoo import make_moe_checkpoint


ROOT = Path(__file__).parents[1]

NEEDS_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
NEEDS_DEEPSPEED = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=900,
    )


def test_without_cuda_it_says_so() -> None:
    done = run("-m", "scripts.gpu", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1 and done.stdout == ""
    assert "needs a machine with an NVIDIA GPU" in done.stderr and "Nothing was run" in done.stderr


def test_block_of_results() -> None:
    text = "\n".join(block(10, 5, {1: "ours: 1.00 s\n", 2: ""}))
    assert "FAIL (exit code 5)" in text and "--gigabytes 10 --world 2" in text
    assert "```text\nours: 1.00 s\n```" in text and "```text\nfailed\n```" in text


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=NEEDS_DEEPSPEED)], ids=str)
class TestOnADevice:
    pytestmark = NEEDS_CUDA

    def test_bits_are_those_of_a_load_on_the_host(self, world: int) -> None:
        """Partitions come through pinned buffers and side streams; both ranks share the one device."""
        done = run("-m", "benchmarks.gpu", "--gigabytes", "0.05", "--repeats", "1", "--world", str(world))
        assert done.returncode == 0, done.stdout + done.stderr
        assert "bits: those of a load on the host" in done.stdout


LOSSES = """
import sys, torch, deepspeed, hf_zero_stream
from transformers import AutoModelForCausalLM
deepspeed.init_distributed("nccl")
config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3},
          "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}
losses = []
for stream in (True, False):
    from transformers.integrations import HfDeepSpeedConfig
    keep = HfDeepSpeedConfig(config)
    if stream:
        with hf_zero_stream.streaming():
            model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
        assert model.streaming_report.ranks[0].device_peak > 0
    else:
        model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
    assert all(param.ds_tensor.device.type == "cuda" for param in model.parameters())
    engine = deepspeed.initialize(model=model, config=config)[0]
    tokens = torch.arange(5, 37, device="cuda").view(1, -1)
    for _ in range(3):
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
    losses.append(loss.item())
assert losses[0] == losses[1], losses
"""


class TestTraining:
    pytestmark = [*NEEDS_CUDA, NEEDS_DEEPSPEED]

    def test_losses_are_stocks(self, tmp_path: Path) -> None:
        folder = make_moe_checkpoint(tmp_path / "moe", 1e7, num_layers=2, num_experts=8)
        rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29581"}
        done = run("-c", LOSSES, str(folder), **rank, DS_ACCELERATOR="cuda", CUDA_VISIBLE_DEVICES="0")
        assert done.returncode == 0, done.stderr[-3000:]
