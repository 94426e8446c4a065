"""Buffers that several layers of a model share: a state has each once, and all layers go on with its values."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import hf_zero_stream
from tests.state.test_changed import train_here
from tests.support.training_state import values_in
from tests.support.zoo import Checkpoint


class Net(nn.Module):
    """Not one of transformers', which refuse to save buffers that layers share."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.inner = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        share_buffers(self, self.inner.model.layers)

    def get_input_embeddings(self) -> Any:
        return self.inner.get_input_embeddings()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        output = self.inner(input_ids=input_ids, labels=labels)
        output.loss = output.loss * self.inner.model.layers[1].scale + self.inner.model.layers[1].offset
        return output


def share_buffers(model: nn.Module, layers: Any) -> None:
    scale, offset = torch.tensor(2.0), torch.tensor(0.5)
    for layer in layers:
        layer.register_buffer("scale", scale)
    layers[0].register_buffer("offset", offset, persistent=False)  # a state dict has it by its second name
    layers[1].register_buffer("offset", offset)


@pytest.mark.parametrize("strict", [True, False])
def test_shared_buffers(zoo_checkpoint: Checkpoint, tmp_path: Path, strict: bool) -> None:
    def made() -> tuple[Any, torch.optim.Optimizer, Any]:
        model = Net(zoo_checkpoint("llama"))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2), model.inner.model.layers

    model, optimizer, layers = made()
    train_here(model, optimizer, range(2))
    layers[0].scale.mul_(1.5)
    layers[1].offset.add_(3)
    hf_zero_stream.save_state(model, tmp_path / "state", optimizer=optimizer)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    continued = train_here(model, optimizer, (2, 3))
    model, optimizer, layers = made()
    hf_zero_stream.load_state(model, tmp_path / "state", optimizer=optimizer, strict=strict)
    assert layers[0].scale == layers[1].scale == 3 and layers[0].offset == layers[1].offset == 3.5
    assert train_here(model, optimizer, (2, 3)) == continued
    found = values_in(tmp_path / "state" / "global_step2")
    assert found.keys() == expected.keys()
    assert [name for name, value in found.items() if not torch.equal(value, expected[name])] == []
