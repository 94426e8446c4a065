"""Models whose `__init__` loads other checkpoints, as custom code does that puts a head on a pretrained encoder."""

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel, initialization

from tests.support.odd_models import bert_config


class AroundConfig(PreTrainedConfig):
    """`inner` and `second` are the paths of checkpoints, `kwargs` what they are loaded with."""

    model_type = "around"

    def __init__(
        self, inner: str = "", second: str = "", options: dict[str, Any] | None = None, **others: Any
    ) -> None:
        self.inner = inner
        self.second = second
        self.options = options or {}
        super().__init__(**others)


class AroundOne(PreTrainedModel):
    """A head on an encoder, which is frozen in part."""

    config_class = AroundConfig
    base_model_prefix = "model"

    def __init__(self, config: AroundConfig) -> None:
        super().__init__(config)
        self.inner = AutoModel.from_pretrained(config.inner, **config.options)
        self.head = nn.Linear(self.inner.config.hidden_size, 5)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            initialization.constant_(module.weight, 3.0)
            initialization.zeros_(module.bias)


class AroundTwo(PreTrainedModel):
    """Two encoders, the second of which is a model around one again, and one that only has a config."""

    config_class = AroundConfig
    base_model_prefix = "model"

    def __init__(self, config: AroundConfig) -> None:
        super().__init__(config)
        self.inner = transformers.BertModel.from_pretrained(config.inner, dtype=torch.float32, add_pooling_layer=False)
        self.second = AroundOne.from_pretrained(config.second)
        self.third = AutoModel.from_config(bert_config())
        self.post_init()


transformers.AutoConfig.register("around", AroundConfig)
AutoModel.register(AroundConfig, AroundOne)


def make_bert(folder: Path, seed: int, leave_out: str = "") -> Path:
    """A checkpoint of BERT with random values."""
    bert_config().save_pretrained(folder)
    save(transformers.BertModel(bert_config()), folder, seed, leave_out)
    return folder


def make_around_one(folder: Path, inner: Path, seed: int, leave_out: str = "", **options: Any) -> Path:
    """A checkpoint of a model that loads `inner`, without the tensors whose names begin with `leave_out`."""
    AroundConfig(inner=str(inner), options=options).save_pretrained(folder)
    parts = {"inner": transformers.BertModel(bert_config()), "head": nn.Linear(bert_config().hidden_size, 5)}
    save(nn.ModuleDict(parts), folder, seed, leave_out)
    return folder


def make_around_two(folder: Path, inner: Path, second: Path, seed: int, leave_out: str = "") -> Path:
    """A checkpoint of a model that loads `inner` and `second`, one that :func:`make_around_one` has made."""
    AroundConfig(inner=str(inner), second=str(second)).save_pretrained(folder)
    parts = {
        "inner": transformers.BertModel(bert_config(), add_pooling_layer=False),
        "second": AroundOne(AroundConfig.from_pretrained(second)),
        "third": transformers.BertModel(bert_config()),
    }
    save(nn.ModuleDict(parts), folder, seed, leave_out)
    return folder


def save(module: nn.Module, folder: Path, seed: int, leave_out: str) -> None:
    """Random values for all parameters but those whose names begin with `leave_out`."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(param.shape, generator=generator) for name, param in module.named_parameters()}
    kept = {name: tensor for name, tensor in tensors.items() if not (leave_out and name.startswith(leave_out))}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def expected_values(folder: Path, inside: dict[str, Path]) -> dict[str, torch.Tensor]:
    """The values of a checkpoint, and for what it lacks, those of checkpoints inside, by the prefix of their names."""
    values: dict[str, torch.Tensor] = {}
    for prefix, path in inside.items():
        values |= {f"{prefix}.{name}": tensor for name, tensor in load_file(path / "model.safetensors").items()}
    return values | load_file(folder / "model.safetensors")
