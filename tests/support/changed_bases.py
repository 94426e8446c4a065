"""What users do to a base before they put adapters on it, and trainings of such adapters, by stock and by ours."""

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import peft
import torch
import torch.distributed as dist
import transformers
from torch import nn

import hf_zero_stream
from tests.support.changed_models import with_loss_of, zero_config
from tests.support.checkpoint_files import differing
from tests.support.fsdp2 import announce, make_accelerator
from tests.support.parity import whole_values
from tests.support.trainings import Training, tokens_of
from tests.support.zoo import VOCAB


def resized(model: Any) -> Any:
    model.resize_token_embeddings(VOCAB + 9, mean_resizing=False)
    return model


def new_head(model: Any) -> Any:
    """Of the shape that the checkpoint's has."""
    model.set_output_embeddings(nn.Linear(model.config.hidden_size, VOCAB, bias=False))
    return model


def new_buffer(model: Any) -> Any:
    model.register_buffer("scale", torch.rand(3))
    with_loss_of(model, lambda hidden: model.scale.sum() * hidden.square().mean())
    return model


def by_hand(model: Any) -> Any:
    """One element of one weight, in place."""
    with gathered([model.model.norm.weight]), torch.no_grad():
        model.model.norm.weight[3] += torch.rand(())
    return model


def merged(model: Any) -> Any:
    """Other adapters were trained before, and are a part of the base now."""
    config = peft.LoraConfig(target_modules=["o_proj"], r=2, init_lora_weights=False)
    return peft.get_peft_model(model, config).merge_and_unload()


def two_bases(model: Any) -> Any:
    """A part of the model comes from a checkpoint of its own; it is frozen, too."""
    model.tower = transformers.AutoModelForCausalLM.from_pretrained(f"{model.name_or_path}-other", dtype=torch.float32)
    with_loss_of(model, lambda hidden: model.tower.lm_head(hidden).square().mean())
    return model


def gathered(params: Sequence[Any]) -> Any:
    if not any(hasattr(param, "ds_id") for param in params):
        return nullcontext()
    return deepspeed.zero.GatheredParameters([*params], modifier_rank=0)


CHANGES: dict[str, tuple[Callable[[Any], Any], Callable[[str], bool]]] = {
    "none": (lambda model: model, lambda name: False),
    "resized": (resized, lambda name: name in ("model.embed_tokens.weight", "lm_head.weight")),
    "new head": (new_head, lambda name: name == "lm_head.weight"),
    "new buffer": (new_buffer, lambda name: name == "scale"),
    "by hand": (by_hand, lambda name: name == "model.norm.weight"),
    "merged": (merged, lambda name: ".o_proj." in name),
    "two bases": (two_bases, lambda name: False),
}
"""What is done, and which tensors must be in a state for it: the others are in a checkpoint."""


def by_peft(base: Any) -> Any:
    lora = peft.LoraConfig(target_modules=r"model\.layers\..*(q|v)_proj", r=3, init_lora_weights=False)
    return peft.get_peft_model(base, lora)


class OwnAdapter(nn.Module):
    """A low-rank adapter around a layer, as people write it themselves."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 3, bias=False)
        self.up = nn.Linear(3, base.out_features, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = self.base(hidden) + self.up(self.down(hidden))
        return values


def by_oneself(base: Any) -> Any:
    base.requires_grad_(False)
    for layer in base.model.layers:
        layer.self_attn.q_proj = OwnAdapter(layer.self_attn.q_proj)
        layer.self_attn.v_proj = OwnAdapter(layer.self_attn.v_proj)
    return base


OWN = "own adapters, "
"""Begins the name of a change of a base on which no adapters of PEFT are trained."""


class AdapterTraining(Training):
    """Adapters on a changed base. Stock changes the base while it is whole, ours where it loads it to."""

    def __init__(self, folder: Path, home: str, change: str, seed: int, streams: bool) -> None:
        config = zero_config(home) if home.startswith("zero") else None
        accelerator = None
        if home == "fsdp2":
            announce(cpu_ram_efficient_loading=streams)
            accelerator = make_accelerator()
        how = {"ds_config": config} if streams and home == "zero3" else {}
        base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how)
        torch.manual_seed(seed)
        base = CHANGES[change.removeprefix(OWN)][0](base)
        torch.manual_seed(5)
        self.home, self.is_of_peft = home, not change.startswith(OWN)
        self.model: Any = by_peft(base) if self.is_of_peft else by_oneself(base)
        trained = [param for param in self.model.parameters() if param.requires_grad]
        trains, optimizer = self.model, torch.optim.AdamW(trained, lr=1e-2)
        if accelerator is not None:
            trains, optimizer = accelerator.prepare(self.model, optimizer)
        elif config is not None:
            trains, optimizer = deepspeed.initialize(model=self.model, optimizer=optimizer, config=config)[0], None
        super().__init__(trains, optimizer, batch=self._tokens)

    def _tokens(self, number: int) -> dict[str, torch.Tensor]:
        ids, vocab = tokens_of(number)["input_ids"], self.model.get_input_embeddings().num_embeddings
        ids[:, ::3] = vocab - 1 - ids[:, ::3] % 9  # the last rows, which may be new
        return {"input_ids": ids, "labels": ids % VOCAB}

    def save(self, target: Path) -> None:
        if self.is_of_peft:
            super().save(target)
        elif self.home == "zero2":
            self.trains.save_checkpoint(str(target), exclude_frozen_parameters=True)
        else:
            hf_zero_stream.save_state(self.trains, target, exclude_frozen=True, **self.own)


def in_state(folder: Path) -> set[str]:
    """The names of what is not trained and in the state in `folder`."""
    place = folder / (folder / "latest").read_text()
    return set(json.loads((place / "training_state.json").read_text())["untrained"])


def train_and_save(folder: Path, target: Path, home: str, changes: Sequence[str], streams: bool) -> Any:
    """By change, the losses of two steps after a save, which stock makes by its own means, and the base's values."""
    found = {}
    with hf_zero_stream.streaming() if streams else nullcontext():
        for change in changes:
            training = AdapterTraining(folder, home, change, 1, streams)
            training.train(range(2))
            if streams:
                training.save(target / change)
            elif home.startswith("zero"):
                training.trains.save_checkpoint(str(target / change))
            values = whole_values(training.model)
            if not dist.is_initialized() or dist.get_rank() == 0:
                torch.save(values, target / f"{change}.pt")
            found[change] = training.train((2, 3))
    return found


def resume(folder: Path, source: Path, home: str, changes: Sequence[str], streams: bool) -> Any:
    """By change, the losses of two steps after a resume in new processes, and the tensors that have not come back."""
    found = {}
    with hf_zero_stream.streaming() if streams else nullcontext():
        for change in changes:
            training = AdapterTraining(folder, home, change, 2, streams)
            wrong: list[str] = []
            if streams:
                training.load(source / change)
                wrong = differing(whole_values(training.model), torch.load(source / f"{change}.pt"))
            else:
                training.trains.load_checkpoint(str(source / change))
            found[change] = training.train((2, 3)), wrong
    return found
