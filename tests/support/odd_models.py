"""Tiny model classes, each with one thing that most models do not have. Widths are odd, so partitions are padded.

The last ones load other checkpoints in `__init__`, as custom code does that puts a head on a pretrained encoder.
"""

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel, initialization
from transformers import initialization as init


WIDTH = 7


class OddConfig(PreTrainedConfig):
    model_type = "odd_parameters"


class Odd(PreTrainedModel):
    """Two linear layers; subclasses add to them in `build`."""

    config_class = OddConfig
    base_model_prefix = "model"

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        self.first = nn.Linear(WIDTH, WIDTH + 2)
        self.second = nn.Linear(WIDTH + 2, WIDTH)
        self.build()
        self.post_init()

    def build(self) -> None:
        pass


class KeepsFp32(Odd):
    """fp32 for fp16 models only."""

    _keep_in_fp32_modules = ["second"]


class KeepsFp32Strictly(Odd):
    """fp32 for fp16 and bf16 models."""

    _keep_in_fp32_modules_strict = ["second", "scale"]

    def build(self) -> None:
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("scale_bias", torch.zeros(WIDTH, dtype=torch.float32))


def bert_config() -> transformers.BertConfig:
    return transformers.BertConfig(
        vocab_size=13,
        hidden_size=6,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=5,
        max_position_embeddings=11,
    )


class SubModels(Odd):
    """Models built by `from_config` inside `__init__`."""

    def build(self) -> None:
        self.text = transformers.AutoModel.from_config(bert_config())
        self.other = transformers.BertModel._from_config(bert_config(), add_pooling_layer=False)


class TiesAcrossModules(Odd):
    _tied_weights_keys = {
        "head.weight": "embed.weight",
        "text.embeddings.word_embeddings.weight": "embed.weight",
        "mirror.weight": "first.weight",
    }

    def build(self) -> None:
        self.embed = nn.Embedding(13, 6)
        self.head = nn.Linear(6, 13, bias=False)
        self.text = transformers.AutoModel.from_config(bert_config())
        self.mirror = nn.Linear(WIDTH, WIDTH + 2)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head


class PersistentBuffers(Odd):
    """A router's bias in fp32, a counter, and a mask."""

    def build(self) -> None:
        self.register_buffer("e_score_correction_bias", torch.zeros(WIDTH, dtype=torch.float32))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.zeros(3, 5, dtype=torch.bool))
        self.first.register_buffer("low", torch.zeros(WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH)


class ComputedBuffers(Odd):
    """Buffers that are not in the checkpoint and are computed by `_init_weights`."""

    def build(self) -> None:
        self.register_buffer("positions", torch.arange(WIDTH), persistent=False)
        self.register_buffer("slopes", torch.zeros(WIDTH, dtype=torch.float32), persistent=False)
        self.first.register_buffer("table", torch.zeros(3, 5), persistent=False)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ComputedBuffers):
            init.copy_(module.positions, torch.arange(WIDTH) * 3)
            init.copy_(module.slopes, 2.0 ** -torch.arange(WIDTH))
        if hasattr(module, "table"):
            init.copy_(module.table, torch.arange(15.0).view(3, 5).sin())


class ParameterLists(Odd):
    def build(self) -> None:
        self.list = nn.ParameterList([nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.zeros(2, 3))])
        self.dict = nn.ParameterDict({"a": nn.Parameter(torch.zeros(5)), "b": nn.Parameter(torch.zeros(()))})
        self.nested = nn.ModuleList([nn.ParameterList([nn.Parameter(torch.zeros(3, 1))])])


class Remembering(nn.Module):
    """A module whose extra state is a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.zeros(WIDTH)
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def get_extra_state(self) -> torch.Tensor:
        return self.memory

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.memory = state


class ExtraState(Odd):
    def build(self) -> None:
        self.extra = Remembering()


class IntegerParameters(Odd):
    def build(self) -> None:
        self.table = nn.Parameter(torch.zeros(WIDTH, 3, dtype=torch.int64), requires_grad=False)
        self.bytes = nn.Parameter(torch.zeros(WIDTH, dtype=torch.uint8), requires_grad=False)
        self.flags = nn.Parameter(torch.zeros(WIDTH, dtype=torch.bool), requires_grad=False)


class ComplexParameters(Odd):
    def build(self) -> None:
        self.phases = nn.Parameter(torch.zeros(WIDTH, 2, dtype=torch.complex64))


class ComplexBuffers(Odd):
    def build(self) -> None:
        self.register_buffer("phases", torch.zeros(WIDTH, 2, dtype=torch.complex64))


class ZeroSized(Odd):
    def build(self) -> None:
        self.nothing = nn.Parameter(torch.zeros(0, WIDTH))
        self.no_bias = nn.Linear(WIDTH, 0)
        self.register_buffer("no_buffer", torch.zeros(0))


class Scalars(Odd):
    def build(self) -> None:
        self.logit_scale = nn.Parameter(torch.tensor(0.0))
        self.one = nn.Parameter(torch.zeros(1))


class Frozen(Odd):
    """Parts that `__init__` freezes, one of them missing from some checkpoints."""

    def build(self) -> None:
        self.first.requires_grad_(False)
        self.fixed = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)
        self.late = nn.Linear(WIDTH, 3)
        self.late.weight.requires_grad = False


class TwoNames(Odd):
    """One module, and one parameter, under two names each."""

    _tied_weights_keys = {"alias.weight": "shared.weight", "alias.bias": "shared.bias", "second_scale": "scale"}

    def build(self) -> None:
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.alias = self.shared
        self.scale = nn.Parameter(torch.zeros(WIDTH))
        self.second_scale = self.scale

    def get_input_embeddings(self) -> nn.Module:  # transformers asks when it shards
        return self.shared


class CreatedOnCpu(Odd):
    """Tensors with an explicit device, which the meta device of the loader does not reach."""

    def build(self) -> None:
        self.here = nn.Parameter(torch.full((WIDTH, 3), 0.5, device="cpu"))
        self.layer = nn.Linear(WIDTH, 3, device="cpu")
        self.register_buffer("saved", torch.ones(WIDTH, device="cpu"))


class WritesUnguarded(Odd):
    """Initialises as old code on the hub does: `.data.normal_()`, without asking whether values were loaded."""

    def build(self) -> None:
        self.extra = nn.Parameter(torch.zeros(3, WIDTH))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.02)
            if module.bias is not None:
                module.bias.data.zero_()
        if isinstance(module, WritesUnguarded):
            module.extra.data.uniform_()


class Fused(Odd):
    """What a checkpoint with `q`, `k` and `v` is converted into; see the tests."""

    def build(self) -> None:
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)


def fill(model: PreTrainedModel) -> PreTrainedModel:
    """Different values in every element of every saved tensor, the same on every call."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for value in {id(tensor): tensor for tensor in model.state_dict().values()}.values():
            random: Any = torch.randn(value.shape, generator=generator) * 50
            value.copy_(random.abs() > 30 if value.dtype == torch.bool else random.abs())
            if value.is_complex():
                value += 1j * torch.randn(value.shape, generator=generator)
    return model


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
