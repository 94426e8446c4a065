"""OpenRLHF's engines get what they would get without streaming(), in the same calls, and nothing is gathered."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import hf_zero_stream
from hf_zero_stream.plugins.stream.weights import weight_stream
from tests.support.checkpoint_files import differing
from tests.support.cluster import run_ranks, run_ranks_expecting_errors
from tests.support.parity import ds_config, load_with
from tests.support.rl_trainers import Engines, openrlhf
from tests.support.streams import change, counted_buckets, counted_gathers, lora, randomised
from tests.support.zoo import Checkpoint


STEPS = 2


def sync(folder: Path, streams: bool, fails: int = -1, frozen: str = "", **options: Any) -> dict[str, Any]:
    """Changes of weights, and a sync after each."""
    trainer_class = openrlhf()
    model = load_with("streamed", "AutoModelForCausalLM", folder, ds_config(torch.bfloat16), {"dtype": torch.bfloat16})
    for name, param in model.named_parameters():
        param.requires_grad_(not frozen or frozen not in name)
    engines = Engines(2, fails)
    trainer = trainer_class(model, engines, **options)
    loaded = []
    small = patch.dict(weight_stream.__kwdefaults__, bucket_bytes=20_000)
    with small, hf_zero_stream.streaming() if streams else nullcontext():
        with counted_gathers() as gathers, counted_buckets() as others:
            for step in range(STEPS):
                change(model, step)
                trainer.broadcast_to_vllm()
                loaded.append(dict(engines.loaded))
    assert options.get("ipc") or max(others, default=0) <= 1
    return {"calls": engines.calls, "loaded": loaded, "gathers": len(gathers), "buckets": len(others)}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "options", [{}, {"ipc": True}, {"vlm": True, "frozen": "layers.0"}], ids=["broadcast", "ipc", "vlm"]
)
def test_as_stock(cluster: None, zoo_checkpoint: Checkpoint, options: dict[str, Any]) -> None:
    folder = zoo_checkpoint("qwen3_moe")
    stock, *_ = run_ranks(2, _with, sync, folder, False, options)
    ours, *others = run_ranks(2, _with, sync, folder, True, options)
    assert ours["calls"] == stock["calls"] and len(ours["calls"]) > 2 * STEPS
    for mine, theirs in zip(ours["loaded"], stock["loaded"], strict=True):
        assert mine and differing(mine, theirs) == []
    assert differing(*ours["loaded"]), "the changes are seen"
    assert ours["gathers"] == others[0]["gathers"] == 0 < stock["gathers"]
    assert ours["buckets"] > 2 * STEPS


def _with(function: Callable[..., Any], folder: Path, streams: bool, options: dict[str, Any]) -> Any:
    return function(folder, streams, **options)


def test_tensor_parallelism_is_left_to_openrlhf(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    ours, *_ = run_ranks(2, _with, sync, zoo_checkpoint("llama"), True, {"tensor_parallel": 2})
    assert ours["gathers"] > 0 and ours["loaded"][0]


def test_an_engine_that_fails(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    """All ranks hear of it; without streaming() the others wait in a gather."""
    first, other = run_ranks_expecting_errors(2, _with, sync, zoo_checkpoint("llama"), True, {"fails": 7})
    assert (first.error_type, first.error_message) == ("RuntimeError", "an engine is out of memory")
    assert other.error_type == "PeerError" and "out of memory" in str(other.error_message)


def merged(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What engines get of a model with adapters, and what PEFT makes of a copy."""
    plain = randomised(lora(load_with("plain", "AutoModelForCausalLM", folder, {}, {"dtype": torch.float32})))
    whole = dict(plain.merge_and_unload().named_parameters())
    trainer_class, engines = openrlhf(), Engines(1)
    model = load_with("streamed", "AutoModelForCausalLM", folder, ds_config(torch.float32), {"dtype": torch.float32})
    with hf_zero_stream.streaming():
        trainer_class(randomised(lora(model)), engines).broadcast_to_vllm()
    return engines.loaded, {name: param.detach() for name, param in whole.items()}


def test_adapters_are_merged(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    """OpenRLHF would send the names of PEFT, which no engine knows."""
    (found, expected), _ = run_ranks(2, merged, zoo_checkpoint("llama"))
    assert differing(found, expected) == []
