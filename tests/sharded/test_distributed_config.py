"""``from_pretrained(distributed_config=...)``: each rank reads its local shards, into the storage that FSDP2 owns."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

import hf_zero_stream
from tests import sampling
from tests.support.cluster import run_ranks
from tests.support.messages import Messages
from tests.support.saving import SHARD_SIZE, different
from tests.support.sharded import Sizes, compare_sharded, load_sharded
from tests.support.zoo import ZOO, Checkpoint


FSDP, TP, HSDP = {"fsdp_size": 2}, {"tp_size": 2}, {"dp_replicate_size": 2, "fsdp_size": 2}
EP = {"fsdp_size": 2, "ep_size": 2}


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "gpt_oss", "qwen3_vl_moe", "bert", "t5"])
def test_equals_plain_loading(cluster: None, zoo_checkpoint: Checkpoint, name: str) -> None:
    of_sizes = [FSDP, TP] if name not in ("bert", "t5") else [FSDP]
    for found in run_ranks(2, compare_sharded, ZOO[name].auto_class, zoo_checkpoint(name), of_sizes):
        for of_size in found:
            assert not of_size["differences"], of_size
            assert of_size["sharded"]
            assert of_size["report"].bytes_read <= 1.3 * of_size["report"].bytes_needed


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_three_ranks(cluster: None, zoo_checkpoint: Checkpoint, name: str) -> None:
    """Dimensions that three does not divide: FSDP2 pads them."""
    for found in run_ranks(3, compare_sharded, ZOO[name].auto_class, zoo_checkpoint(name), [{"fsdp_size": 3}]):
        assert not found[0]["differences"], found


def test_several_dimensions(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    of_sizes: list[Sizes] = [HSDP, {"fsdp_size": 2, "tp_size": 2}, {"fsdp_size": 2, "tp_size": 2, "ep_size": 2}]
    for found in run_ranks(4, compare_sharded, "AutoModelForCausalLM", zoo_checkpoint("deepseek_v3"), of_sizes):
        for of_size in found:
            assert not of_size["differences"], of_size


def save_sharded(folder: Path, of_sizes: list[Sizes], target: Path) -> None:
    for number, sizes in enumerate(of_sizes):
        model = load_sharded(transformers.AutoModelForCausalLM, folder, sizes)
        hf_zero_stream.save_pretrained(model, target / f"ours {number}", max_shard_size=SHARD_SIZE)
        with hf_zero_stream.streaming():
            model.save_pretrained(target / f"inside {number}", max_shard_size=SHARD_SIZE)


@pytest.mark.parametrize(
    ("world_size", "of_sizes"), [(2, [FSDP, TP, EP]), (4, [HSDP, {"fsdp_size": 2, "tp_size": 2}])]
)
def test_saving(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, world_size: int, of_sizes: list[Sizes]
) -> None:
    """The folder of the whole model, byte for byte; replicas are written once."""
    folder = zoo_checkpoint("deepseek_v3")
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder)
    whole.save_pretrained(tmp_path / "whole", max_shard_size=SHARD_SIZE)
    run_ranks(world_size, save_sharded, folder, of_sizes, tmp_path)
    for number in range(len(of_sizes)):
        assert different(tmp_path / f"ours {number}", tmp_path / "whole") == []
        assert different(tmp_path / f"inside {number}", tmp_path / "whole") == []


def load_beside_stock(folder: Path, sizes: Sizes, pieces: Path | None = None) -> dict[str, Any]:
    """Whether a load that is left to transformers gives this rank what transformers alone gives it.

    If `pieces` is given, it is a folder to make with ``distributed_checkpoint=True``, and to load.
    """

    def load() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**sizes))

    if pieces is not None:
        load().save_pretrained(pieces, distributed_checkpoint=True)
        dist.barrier()
        folder = pieces
    messages = Messages()
    transformers.utils.logging.get_logger("hf_zero_stream").addHandler(messages)
    expected = {name: local(tensor) for name, tensor in load().state_dict().items()}
    with hf_zero_stream.streaming(hf_zero_stream.StreamingConfig(progress=False)):
        model = load()
    found = {name: local(tensor) for name, tensor in model.state_dict().items()}
    return {
        "names": sorted(found),
        "equal": found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found),
        "streamed": hasattr(model, "streaming_report"),
        "said": [text for text in messages.found if "leaves this load to transformers" in text],
    }


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def test_pipelines_are_left_to_stock(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    found = run_ranks(2, load_beside_stock, zoo_checkpoint("llama"), {"pp_size": 2})
    assert_left_to_stock(*found, "with pp_size=2 ranks hold different models")


def assert_left_to_stock(first: dict[str, Any], second: dict[str, Any], why: str) -> None:
    for found in (first, second):
        assert found["equal"] and found["names"] and not found["streamed"]
    assert len(first["said"]) == 1 and why in first["said"][0]
    assert second["said"] == []


@pytest.mark.parametrize("sizes", [FSDP, TP], ids=str)
def test_pieces_of_ranks_are_left_to_stock(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, sizes: Sizes
) -> None:
    """A folder of ``save_pretrained(distributed_checkpoint=True)``."""
    pieces = tmp_path / "pieces"
    found = run_ranks(2, load_beside_stock, zoo_checkpoint("llama"), sizes, pieces)
    assert list(pieces.glob("shard-*.safetensors"))
    assert_left_to_stock(*found, "in pieces of safetensors")


def test_missing_parameters_are_those_of_a_plain_load(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    """As if rank 0 had initialised the whole model: shards repeat no rows, and replicas are the same."""
    folder = zoo_checkpoint("llama")
    worlds: list[tuple[int, list[Sizes]]] = [(2, [FSDP, TP]), (4, [HSDP])]
    for world_size, of_sizes in sampling.every(2, worlds):
        for found in run_ranks(world_size, load_with_more_layers, folder, of_sizes):
            for of_size in found:
                assert not of_size["differences"], of_size


def load_with_more_layers(folder: Path, of_sizes: list[Sizes]) -> list[dict[str, Any]]:
    transformers.utils.logging.set_verbosity_error()
    return compare_sharded("AutoModelForCausalLM", folder, of_sizes, num_hidden_layers=3, dtype=torch.bfloat16)
