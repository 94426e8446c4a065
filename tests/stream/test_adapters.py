"""Adapters of PEFT are merged into what a weight stream gives, as PEFT merges them, or streamed by themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.cluster import run_ranks
from tests.support.streams import Adapt, dora, lora, lora_of_experts, stream_adapted, under_fsdp2, under_zero_3


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "adapt"),
    [("llama", lora), ("llama", dora), ("qwen3_moe", lora_of_experts)],
    ids=["lora", "dora", "experts"],
)
@pytest.mark.parametrize("home", [under_zero_3, under_fsdp2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_merged(
    cluster: None,
    zoo_checkpoint: Callable[..., Path],
    tmp_path: Path,
    name: str,
    adapt: Adapt,
    home: Callable[..., object],
    dtype: torch.dtype,
) -> None:
    found, others = run_ranks(2, stream_adapted, zoo_checkpoint(name), tmp_path, home, adapt, dtype)
    assert found == {"merged": [], "again": [], "model's": [], "adapters": [], "changed": True}
    assert others == {"merged": [], "model's": [], "adapters": []}
