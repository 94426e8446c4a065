"""What has changed since the last pass: applied to what was got before, it gives what a save holds, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch

import hf_zero_stream
from hf_zero_stream.errors import ConfigError, StreamError
from tests.support import live_sharded as live
from tests.support.checkpoint_files import differing
from tests.support.cluster import run_ranks
from tests.support.loading import load_with
from tests.support.parity import ds_config
from tests.support.streams import change, lora, odd_model, patched, stream_changes, taken, under_zero_3
from tests.support.zoo import ZOO, Checkpoint, build_model


NAMES = ("qwen3_moe", "qwen3", "deepseek_v3", "gpt_oss", "qwen3_vl_moe")
"""Fused experts, also transposed ones, ties, and a buffer that is saved."""


def of_zero(checkpoints: dict[str, Path], folder: Path, to: str) -> list[Any]:
    found = []
    for name, checkpoint in checkpoints.items():
        model = load_with("streamed", ZOO[name].auto_class, checkpoint, ds_config(torch.bfloat16), {})
        found.append(stream_changes(model, folder / name, to, bucket_bytes=20_000))
    return found


def of_dtensors(checkpoint: Path, folder: Path, ways: list[live.Way]) -> list[Any]:
    return [stream_changes(way(checkpoint), folder / way.__name__, "rank0") for way in ways]


def of_conversions(folder: Path) -> list[Any]:
    """Of tensors that are computed from whole parameters."""
    return [stream_changes(odd_model(folder / "odd"), folder / "saved", "rank0", bucket_bytes=1000)]


def assert_right(of_ranks: list[list[Any]], most: float = 0.3) -> None:
    for models in of_ranks:
        for steps in models:
            assert [differences for differences, _ in steps] == [[]] * 3
            assert all(0 < share < most for _, share in steps)


@pytest.mark.parametrize("to", ["rank0", "all", "owners"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_under_zero_3(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, world_size: int, to: str) -> None:
    checkpoints = {name: zoo_checkpoint(name) for name in NAMES}
    assert_right(run_ranks(world_size, of_zero, checkpoints, tmp_path, to))


def test_of_dtensors(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    ways = [live.mixed_precision, live.partly_sharded, live.tp, live.by_transformers]
    assert_right(run_ranks(2, of_dtensors, zoo_checkpoint("qwen3_moe"), tmp_path, ways))


def test_conversions(cluster: None, tmp_path: Path) -> None:
    """Which may change every element of a tensor, if one of a parameter has changed."""
    assert_right(run_ranks(2, of_conversions, tmp_path), most=1.01)


def merged(checkpoint: Path) -> list[Any]:
    """Whether patches of a model with adapters lead to what a whole pass gives (all ranks)."""
    model = under_zero_3(checkpoint, lora, torch.float32)
    stream = hf_zero_stream.weight_stream(model, deltas=True, bucket_bytes=20_000)
    whole = hf_zero_stream.weight_stream(model)
    tensors = taken(stream)
    found = []
    for step in range(2):
        change(model, step)
        patched(tensors, stream)
        found.append(differing(tensors, taken(whole)))
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 7.0)
    try:
        list(stream.deltas())
    except StreamError as error:
        found.append(str(error))
    return found


def test_adapters(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    for differences in run_ranks(2, merged, zoo_checkpoint("llama")):
        assert differences[:2] == [[], []] and "Go through the whole stream first" in differences[2]


def test_only_after_a_whole_pass() -> None:
    """A loop that was left early, and a model that has become another, are no passes to compare with."""
    model = build_model("llama")
    with pytest.raises(ConfigError, match="deltas=True"):
        hf_zero_stream.weight_stream(model).deltas()
    stream = hf_zero_stream.weight_stream(model, deltas=True, bucket_bytes=10_000)
    with pytest.raises(StreamError, match="no complete pass"):
        list(stream.deltas())
    tensors = taken(stream)
    change(model, 1)
    assert patched(tensors, stream) and stream.version == 2
    assert differing(tensors, {name: tensors[name] for name in model.state_dict()}) == []
    for _ in stream.deltas():
        break
    with pytest.raises(StreamError, match="no complete pass"):
        list(stream.deltas())
    taken(stream)
    model.resize_token_embeddings(300)
    with pytest.raises(StreamError, match="no complete pass"):
        list(stream.deltas())
    tensors = taken(stream)
    assert patched(tensors, stream) == 0
