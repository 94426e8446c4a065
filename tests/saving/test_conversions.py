"""Conversions whose reverse needs values: the parameter is gathered, the report names it, the bytes are stock's."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, Transpose, WeightConverter

import hf_zero_stream
from tests.support.cluster import run_ranks
from tests.support.parity import ds_config
from tests.support.saving import different, saves_with


class Scaled(ConversionOps):
    """Arithmetic: elements of the file are those of the model, doubled; and the other way round."""

    def __init__(self, factor: float = 0.5) -> None:
        self.factor = factor

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        (values,) = input_dict.values()
        return {target_patterns[0]: self.of(values[0] if isinstance(values, list) else values)}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * self.factor

    @property
    def reverse_op(self) -> ConversionOps:
        return Scaled(1 / self.factor)


class Sorted(Scaled):
    """A function of all elements at once."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.flatten().sort().values.view(tensor.shape)

    @property
    def reverse_op(self) -> ConversionOps:
        return Sorted()


class OddConfig(PretrainedConfig):
    model_type = "odd_to_save"


class OddModel(PreTrainedModel):
    config_class = OddConfig

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        self.scaled = torch.nn.Linear(7, 9)
        self.sorted = torch.nn.Linear(5, 11)
        self.turned = torch.nn.Linear(64, 48, bias=False)
        self.plain = torch.nn.Linear(3, 5)
        self.register_buffer("steps", torch.arange(6))
        self.post_init()


CONVERSIONS = [
    WeightConverter("scaled.file_weight", "scaled.weight", operations=[Scaled()]),
    WeightConverter("sorted.file_weight", "sorted.weight", operations=[Sorted()]),
    WeightConverter("turned.file_weight", "turned.weight", operations=[Transpose(0, 1)]),
]


def save_odd(checkpoint: Path, folder: Path, write_from: str) -> list[dict[str, Any]]:
    register_checkpoint_conversion_mapping("odd_to_save", CONVERSIONS, overwrite=True)
    if dist.get_rank() == 0:
        torch.manual_seed(3)
        OddModel(OddConfig()).save_pretrained(checkpoint)
    dist.barrier()
    plain = OddModel.from_pretrained(checkpoint)
    plain.save_pretrained(folder / "stock", max_shard_size="2KB")
    with hf_zero_stream.streaming():
        model = OddModel.from_pretrained(checkpoint, ds_config=ds_config())
    with saves_with(write_from=write_from, chunk_bytes=512, verify="full"):
        report = hf_zero_stream.save_pretrained(model, folder / "ours", max_shard_size="2KB")
    rounds = [rank.rounds for rank in report.ranks]
    return [dict(report.materialised), {"rounds": rounds[0]}]


@pytest.mark.parametrize("write_from", ["all", "rank0"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_reversed_by_value(cluster: None, tmp_path: Path, world_size: int, write_from: str) -> None:
    for materialised, other in run_ranks(world_size, save_odd, tmp_path / "odd", tmp_path, write_from):
        assert materialised.keys() == {"scaled.file_weight", "sorted.file_weight"}
        assert (other["rounds"] > 0) == (world_size > 1), "the transposed one should go through exchanges"
    assert different(tmp_path / "ours", tmp_path / "stock") == []


def test_in_one_process_without_a_group(tmp_path: Path) -> None:
    assert not dist.is_initialized()
    register_checkpoint_conversion_mapping("odd_to_save", CONVERSIONS, overwrite=True)
    OddModel(OddConfig()).save_pretrained(tmp_path / "odd")
    model = OddModel.from_pretrained(tmp_path / "odd")
    model.save_pretrained(tmp_path / "stock")
    with saves_with(verify="full"):
        report = hf_zero_stream.save_pretrained(model, tmp_path / "ours")
    assert report.materialised.keys() == {"scaled.file_weight", "sorted.file_weight"}
    assert different(tmp_path / "ours", tmp_path / "stock") == []
