"""States of models whose conversions compute: they have the values as they are, whatever becomes of the weights."""

from pathlib import Path

import deepspeed
import pytest
import torch
from torch.distributed.fsdp import fully_shard
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Transpose, WeightConverter

import hf_zero_stream
from tests.saving.test_conversions import OddConfig, OddModel, Scaled, Sorted
from tests.support.changed_models import zero_config
from tests.support.checkpoint_files import differing
from tests.support.cluster import run_ranks
from tests.support.parity import whole_values
from tests.support.training_state import values_in
from tests.support.trainings import Training


class TrainedModel(OddModel):
    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        self.register_buffer("table", torch.zeros(5))
        self.post_init()

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        layers = (self.scaled, self.sorted, self.turned, self.plain)
        return sum(layer(numbers[:, : layer.in_features]).square().mean() for layer in layers)


CONVERSIONS = [
    WeightConverter("scaled.file_weight", "scaled.weight", operations=[Scaled(1 / 3)]),  # rounded on the way
    WeightConverter("sorted.file_weight", "sorted.weight", operations=[Sorted()]),  # and this is lost
    WeightConverter("file_table", "table", operations=[Scaled(1 / 3)]),
    WeightConverter("turned.file_weight", "turned.weight", operations=[Transpose(0, 1)]),
]


class OddTraining(Training):
    def __init__(self, folder: Path, home: str) -> None:
        register_checkpoint_conversion_mapping("odd_to_save", CONVERSIONS, overwrite=True)
        config = {"ds_config": zero_config(home)} if home.startswith("zero") else {}
        model = TrainedModel.from_pretrained(folder, **config)
        model.scaled.requires_grad_(False)
        if home == "fsdp2":
            fully_shard(model)
        optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.1)
        self.model = model
        if config:
            engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config["ds_config"])[0]
            super().__init__(engine)
        else:
            super().__init__(model, optimizer)

    def step_once(self) -> None:
        torch.manual_seed(4)
        self.step(self.trains(torch.randn(3, 64)))
        self.model.table.add_(0.1)


def save(folder: Path, target: Path, home: str) -> dict[str, torch.Tensor]:
    with hf_zero_stream.streaming():
        training = OddTraining(folder, home)
        training.step_once()
        training.save(target)
        return whole_values(training.model)


def resume(folder: Path, source: Path, home: str) -> dict[str, torch.Tensor]:
    with hf_zero_stream.streaming():
        training = OddTraining(folder, home)
        training.load(source)
        return whole_values(training.model)


@pytest.mark.parametrize("home", ["fsdp2", "replicas", "zero3", "zero2"])
def test_values_come_back_as_they_are(cluster: None, tmp_path: Path, home: str) -> None:
    register_checkpoint_conversion_mapping("odd_to_save", CONVERSIONS, overwrite=True)
    torch.manual_seed(3)
    TrainedModel(OddConfig()).save_pretrained(tmp_path / "odd")
    (saved, _) = run_ranks(2, save, tmp_path / "odd", tmp_path / "state", home)
    assert differing(saved, run_ranks(2, resume, tmp_path / "odd", tmp_path / "state", home)[1]) == []
    assert differing(saved, run_ranks(3, resume, tmp_path / "odd", tmp_path / "state", home)[2]) == []
    assert different_in_state(tmp_path / "state" / "global_step1", saved) == []


def different_in_state(place: Path, expected: dict[str, torch.Tensor]) -> list[str]:
    """The names of what has another value than `expected` in the map of the state in `place`."""
    expected = {name: it.float() if it.is_floating_point() else it for name, it in expected.items()}
    return differing(values_in(place), expected)


def test_the_map_of_a_state_without_zero_has_what_is_not_trained(tmp_path: Path) -> None:
    register_checkpoint_conversion_mapping("odd_to_save", [], overwrite=True)
    model = OddModel(OddConfig())
    model.scaled.requires_grad_(False)
    model.register_buffer("table", torch.arange(5.0))
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad])
    hf_zero_stream.save_state(model, tmp_path / "state", optimizer=optimizer, tag="first")
    assert different_in_state(tmp_path / "state" / "first", whole_values(model)) == []


def test_a_conversion_that_depends_on_values(tmp_path: Path) -> None:
    class OfValues(Scaled):
        def of(self, tensor: torch.Tensor) -> torch.Tensor:
            return tensor * (3.0 if tensor.abs().max().item() > 0 else 5.0)

    conversion = WeightConverter("scaled.file_weight", "scaled.weight", operations=[OfValues()])
    register_checkpoint_conversion_mapping("odd_to_save", [conversion], overwrite=True)
    model = TrainedModel(OddConfig())
    optimizer = torch.optim.SGD(model.parameters())
    hf_zero_stream.save_state(model, tmp_path, optimizer=optimizer, tag="first")
    expected = whole_values(model)
    with torch.no_grad():
        model.scaled.weight.zero_()
    hf_zero_stream.load_state(model, tmp_path, optimizer=optimizer)
    assert differing(whole_values(model), expected) == []


@pytest.mark.parametrize("where", ["frozen", "buffer", "trained"])
def test_a_conversion_that_is_not_undone(tmp_path: Path, where: str) -> None:
    """Weights would bring its values back as others, and no resume reads these."""

    class OneWay(Scaled):
        @property
        def reverse_op(self) -> Transpose:
            return Transpose(0, 0)

    name = "table" if where == "buffer" else "plain.weight"
    conversion = WeightConverter(f"file_{name}", name, operations=[OneWay(1 / 3)])
    register_checkpoint_conversion_mapping("odd_to_save", [conversion], overwrite=True)
    model = TrainedModel(OddConfig())
    if where == "frozen":
        model.plain.requires_grad_(False)
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad])
    hf_zero_stream.save_state(model, tmp_path, optimizer=optimizer, tag="first")
    expected = whole_values(model)
    with torch.no_grad():
        model.plain.weight.zero_()
        model.table.zero_()
    hf_zero_stream.load_state(model, tmp_path, optimizer=optimizer)
    assert differing(whole_values(model), expected) == []
