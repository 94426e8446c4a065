"""A checkpoint that brings its own model code, as many on the hub do."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file


CONFIGURATION = """
from transformers import PreTrainedConfig


class TinyConfig(PreTrainedConfig):
    model_type = "tiny_remote"

    def __init__(self, vocab_size=13, hidden_size=7, num_hidden_layers=2, **kwargs):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        super().__init__(**kwargs)
"""

MODELING = """
import torch
from torch import nn
from transformers import PreTrainedModel

from .configuration_tiny import TinyConfig


class TinyBlock(nn.Module):
    def __init__(self, config, drop):
        super().__init__()
        self.drop = drop
        self.norm = nn.LayerNorm(config.hidden_size)
        self.up = nn.Linear(config.hidden_size, 2 * config.hidden_size + 1)
        self.down = nn.Linear(2 * config.hidden_size + 1, config.hidden_size)

    def forward(self, hidden):
        return hidden + self.down(torch.tanh(self.up(self.norm(hidden))))


class TinyPreTrainedModel(PreTrainedModel):
    config_class = TinyConfig
    base_model_prefix = "model"

    def _init_weights(self, module):
        # Written before transformers guarded loaded values.
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.02)
            if module.bias is not None:
                module.bias.data.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.02)
        elif isinstance(module, nn.LayerNorm):
            module.bias.data.zero_()
            module.weight.data.fill_(1.0)
        elif isinstance(module, TinyModel):
            module.scale.data.normal_()


class TinyModel(TinyPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        drops = [rate.item() for rate in torch.linspace(0, 0.1, config.num_hidden_layers)]
        self.layers = nn.ModuleList([TinyBlock(config, drop) for drop in drops])
        self.scale = nn.Parameter(torch.ones(config.hidden_size))
        self.post_init()

    def forward(self, input_ids):
        hidden = self.embed(input_ids) * self.scale
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class TinyForCausalLM(TinyPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.model = TinyModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids):
        return self.lm_head(self.model(input_ids))
"""


def make_remote_checkpoint(folder: Path, leave_out: tuple[str, ...] = ()) -> Path:
    """Write code, config and weights; no package that transformers knows can load it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "configuration_tiny.py").write_text(CONFIGURATION)
    (folder / "modeling_tiny.py").write_text(MODELING)
    config = {
        "model_type": "tiny_remote",
        "architectures": ["TinyForCausalLM"],
        "vocab_size": 13,
        "hidden_size": 7,
        "num_hidden_layers": 2,
        "auto_map": {
            "AutoConfig": "configuration_tiny.TinyConfig",
            "AutoModel": "modeling_tiny.TinyModel",
            "AutoModelForCausalLM": "modeling_tiny.TinyForCausalLM",
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed.weight": (13, 7),
        "model.scale": (7,),
        "lm_head.weight": (13, 7),
    }
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.norm.weight": (7,),
            f"{prefix}.norm.bias": (7,),
            f"{prefix}.up.weight": (15, 7),
            f"{prefix}.up.bias": (15,),
            f"{prefix}.down.weight": (7, 15),
            f"{prefix}.down.bias": (7,),
        }
    generator = torch.Generator().manual_seed(4)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for name in leave_out:
        del tensors[name]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
