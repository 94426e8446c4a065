"""Users' classes whose `__init__` needs values of tensors: stock's ZeRO-3 has them, as it builds models for real.

A plain load builds them on the meta device: it raises where they look at values, and leaves buffers that only
`__init__` computes undefined.
"""

import math
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn

from tests.support.cluster import run_ranks
from tests.support.loading import load_with
from tests.support.odd_models import WIDTH, Odd, OddConfig, SubModels, fill
from tests.support.parity import ds_config


class ComputesBuffers(Odd):
    """Buffers that no checkpoint has, and that no `_init_weights` computes."""

    def build(self) -> None:
        frequencies = 1.0 / (10000 ** (torch.arange(0, WIDTH).float() / WIDTH))
        self.register_buffer("frequencies", frequencies, persistent=False)
        mask = torch.empty(5, 5)
        mask.fill_(float("-inf")).triu_(1)
        self.register_buffer("mask", mask, persistent=False)
        self.first.register_buffer("table", torch.tensor([math.sin(number) for number in range(5)]), persistent=False)
        self.plain = torch.arange(3)


class LooksAtValues(Odd):
    """Numbers, and which parts there are, by values of tensors."""

    def build(self) -> None:
        self.rates = [rate.item() for rate in torch.pow(2.0, -torch.arange(3.0))]
        sizes = torch.tensor([1, 2]).cumsum(0).tolist()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, size) for size in sizes)
        if bool((torch.ones(2) > 0).all()):
            self.more = nn.Parameter(torch.randn(WIDTH))


class SharesParameters(Odd):
    """A tie that the config does not ask for."""

    _tied_weights_keys = {"third.weight": "second.weight"}

    def build(self) -> None:
        self.third = nn.Linear(WIDTH + 2, WIDTH, bias=False)
        self.third.weight = self.second.weight


class HasModels(SubModels):
    """Models of transformers' own, built by `from_config`."""

    def build(self) -> None:
        super().build()
        self.register_buffer("ones", torch.ones(3), persistent=False)


class HasMarks(Odd):
    """Attributes and hooks of parameters."""

    def build(self) -> None:
        self.first.weight._no_weight_decay = True
        self.first.weight.register_hook(lambda gradient: gradient * 0)


class Adds(Odd):
    """What `_init_weights` knows nothing of; the checkpoint lacks it."""

    def build(self) -> None:
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.25))
        self.positions = nn.Parameter(torch.arange(12.0).view(3, 4).sin())
        self.drawn = nn.Parameter(torch.randn(WIDTH))
        self.special = Special(torch.ones(WIDTH))


class Special(nn.Parameter):
    pass


CLASSES: list[type[Odd]] = [ComputesBuffers, LooksAtValues, SharesParameters, HasModels, HasMarks, Adds]


def values(model: Any) -> dict[str, Any]:
    found: dict[str, Any] = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for name, param in model.named_parameters(remove_duplicate=False):
        with deepspeed.zero.GatheredParameters([param]):
            found[name] = param.data.clone()
    others = {name: getattr(model, name) for name in ("rates", "plain") if hasattr(model, name)}
    others["marks"] = [
        (name, getattr(param, "_no_weight_decay", None), len(param._backward_hooks or ()))
        for name, param in model.named_parameters()
    ]
    return {**found, **others}


def load_all(folders: dict[str, Path], dtype: torch.dtype) -> list[str]:
    """What differs from stock's."""
    found = []
    for name, folder in folders.items():
        stock, ours = (
            values(load_with(how, f"{__name__}:{name}", folder, ds_config(dtype), {})) for how in ("stock", "streamed")
        )
        if stock.keys() != ours.keys():
            found.append(f"{name}: {sorted(stock.keys() ^ ours.keys())}")
        for key in stock.keys() & ours.keys():
            one, other = stock[key], ours[key]
            if isinstance(one, torch.Tensor):
                same = one.dtype == other.dtype and torch.equal(one, other)
            else:
                same = one == other
            if not same:
                found.append(f"{name}: {key}: {one}, {other}")
    return found


def test_as_stock(cluster: None, tmp_path: Path) -> None:
    folders = {model_class.__name__: tmp_path / model_class.__name__ for model_class in CLASSES}
    for model_class in CLASSES:
        saved = Odd if model_class is Adds else model_class
        fill(saved(OddConfig())).save_pretrained(folders[model_class.__name__])
    assert run_ranks(2, load_all, folders, torch.float32) == [[], []]


class LacksAHead(Odd):
    """Draws random numbers in `__init__`, and again for what the checkpoint lacks."""

    def build(self) -> None:
        self.drawn = nn.Parameter(torch.randn(WIDTH))
        self.head = nn.Linear(WIDTH, 3)


def heads(folder: Path) -> list[torch.Tensor]:
    class_name = f"{__name__}:LacksAHead"
    plain = load_with("plain", class_name, folder, {}, {})
    streamed = values(load_with("streamed", class_name, folder, ds_config(), {}))
    return [plain.head.weight.detach(), streamed["head.weight"]]


def test_random_numbers_are_those_of_a_plain_load(cluster: None, tmp_path: Path) -> None:
    model = fill(LacksAHead(OddConfig()))
    kept = {name: value for name, value in model.state_dict().items() if not name.startswith("head")}
    model.save_pretrained(tmp_path, state_dict=kept)
    for plain, streamed in run_ranks(2, heads, tmp_path):
        assert torch.equal(plain, streamed) and plain.any()
