"""Adapters of PEFT are merged into what a weight stream gives, as PEFT merges them, or streamed by themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import hf_zero_stream
from hf_zero_stream.errors import UnsupportedError
from tests.support.cluster import run_ranks
from tests.support.streams import (
    Adapt,
    differing,
    dora,
    lora,
    lora_of_experts,
    stream_adapted,
    taken,
    under_fsdp2,
    under_zero_3,
)
from tests.support.zoo import build_model


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


def test_what_the_plan_depends_on() -> None:
    """Not on how a model describes itself, which is another after a step of DeepSpeed's; but on what is merged."""
    model = lora(build_model("llama"))
    stream = hf_zero_stream.weight_stream(model)
    before, plan = taken(stream), stream.buckets
    model.base_model.model.model.norm.extra_repr = lambda: "trained"
    assert differing(before, taken(stream)) == [] and stream.buckets is plan
    model.merge_adapter()
    with pytest.raises(UnsupportedError, match="unmerge_adapter"):
        taken(stream)
    model.unmerge_adapter()
    assert taken(stream).keys() == before.keys()
