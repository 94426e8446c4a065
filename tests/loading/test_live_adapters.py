"""`load_into` with PEFT's wrappers around modules."""

from pathlib import Path

import peft
import torch
from transformers import ResNetConfig, ResNetForImageClassification

import hf_zero_stream


def test_a_wrapped_module_with_buffers(tmp_path: Path) -> None:
    """`modules_to_save` renames buffers as it does parameters: here the statistics of batch norms."""
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=3)
    saved = ResNetForImageClassification(config)
    with torch.no_grad():
        for buffer in saved.buffers():
            buffer.add_(3)
    saved.save_pretrained(tmp_path)
    around = peft.LoraConfig(r=2, target_modules=["convolution"], modules_to_save=["normalization"])
    model = peft.get_peft_model(ResNetForImageClassification(config), around).get_base_model()
    hf_zero_stream.load_into(model, str(tmp_path))
    found = {
        name.replace(".base_layer", "").replace(".original_module", ""): tensor
        for name, tensor in model.state_dict().items()
    }
    assert [name for name, tensor in saved.state_dict().items() if not torch.equal(found[name], tensor)] == []
