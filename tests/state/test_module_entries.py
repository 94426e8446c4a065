"""What modules keep beside parameters and buffers is not left out of a training state in silence."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero_stream
from hf_zero_stream.errors import UnsupportedError
from hf_zero_stream.state.refusals import refuse_module_entries
from tests.support.odd_models import Odd, OddConfig


class Scaled(nn.Linear):
    """Keeps a scale as FP8 layers do."""

    scale: Any = None

    def get_extra_state(self) -> Any:
        return self.scale

    def set_extra_state(self, state: Any) -> None:
        self.scale = state


class Writing(nn.Linear):
    """Adds an entry of its own."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}absmax"] = torch.ones(3)


def save(layer: nn.Module, folder: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), layer)
    hf_zero_stream.save_state(model, folder, optimizer=torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize("scale", [{"scale": 2.0}, torch.ones(2), b"2"], ids=["dict", "tensor", "bytes"])
def test_extra_state(tmp_path: Path, scale: Any) -> None:
    layer = Scaled(4, 4)
    layer.scale = scale
    with pytest.raises(UnsupportedError, match=r"1 entries that are neither .*: 1\._extra_state\."):
        save(layer, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("scale", [None, {}, torch.empty(0, dtype=torch.uint8)], ids=["None", "dict", "tensor"])
def test_none(tmp_path: Path, scale: Any) -> None:
    """Layers that could keep something, and do not."""
    layer = Scaled(4, 4)
    layer.scale = scale
    save(layer, tmp_path)
    assert (tmp_path / "latest").exists()


def test_entries_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"1\.absmax"):
        save(Writing(4, 4), tmp_path)


def test_shared_and_left_out(tmp_path: Path) -> None:
    """Tied parameters and buffers that no state dict has are no such entries."""
    layer = nn.Linear(4, 4)
    layer.register_buffer("noted", torch.ones(2), persistent=False)
    model = nn.Sequential(layer, nn.Linear(4, 4), layer)
    hf_zero_stream.save_state(model, tmp_path, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert (tmp_path / "latest").exists()


def test_beside_quantised_layers(tmp_path: Path) -> None:
    """Quantised layers add entries of their own; those of other layers of the same model are not passed over."""

    class Packed(nn.Linear):
        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[f"{prefix}weight.absmax"] = torch.ones(3)

    packed, layer = Packed(4, 4), Scaled(4, 4)
    packed.weight = nn.Parameter(torch.ones(4, 2, dtype=torch.uint8), requires_grad=False)
    model: Any = Odd(OddConfig())
    model.first, model.second, model.hf_quantizer = packed, layer, object()
    refuse_module_entries(model)
    layer.scale = {"scale": 2.0}
    with pytest.raises(UnsupportedError, match=r"1 entries that are neither .*: second\._extra_state\."):
        refuse_module_entries(model)
