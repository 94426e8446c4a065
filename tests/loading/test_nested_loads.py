"""Models whose `__init__` loads others, or looks at values.

- A model whose `__init__` calls `from_pretrained` comes out as in stock's ZeRO-3: its own checkpoint's values win.
  What that checkpoint lacks keeps the values of the checkpoint inside.
- Users' classes whose `__init__` needs values of tensors: stock's ZeRO-3 has them, as it builds models for real. A
  plain load builds them on the meta device: it raises where they look at values, and leaves buffers that only
  `__init__` computes undefined.
"""

import math
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn
from transformers.integrations.deepspeed import HfDeepSpeedConfig

import hf_zero_stream
from tests.support.checkpoint_files import differing
from tests.support.cluster import run_ranks
from tests.support.messages import error_of
from tests.support.odd_models import (
    WIDTH,
    AroundOne,
    AroundTwo,
    Odd,
    OddConfig,
    SubModels,
    expected_values,
    fill,
    make_around_one,
    make_around_two,
    make_bert,
)
from tests.support.parity import ds_config, load_with, whole_values


def streamed(model_class: type, folder: Path, **kwargs: Any) -> Any:
    with hf_zero_stream.streaming():
        return model_class.from_pretrained(folder, ds_config=ds_config(), **kwargs)


def load_all(folders: dict[str, Path]) -> dict[str, Any]:
    inner, whole, part, two, lacking = (folders[name] for name in ("inner", "whole", "part", "two", "lacking"))
    found: dict[str, Any] = {}

    # All of the encoder is overridden: nothing of its checkpoint is read.
    model = streamed(AroundOne, whole)
    found["whole"] = differing(whole_values(model), expected_values(whole, {}))
    ranks = model.streaming_report.to_dict()["ranks"]
    wanted = sum(tensor.nbytes for tensor in expected_values(whole, {}).values())
    found["bytes needed"] = sum(rank["bytes_needed"] for rank in ranks) == wanted
    # The same into a model that exists.
    hf_zero_stream.load_into(model, str(folders["other"]))
    found["into"] = differing(whole_values(model), expected_values(folders["other"], {}))
    # And planned, for a rank of another world.
    plan = hf_zero_stream.plan(str(part), world_size=3, rank=1).load
    found["planned files"] = sorted({Path(plan.shards[read.shard].path).parent.name for read in plan})

    # Some of it is; the rest, and what nobody has, as in stock.
    model, info = streamed(AroundOne, part, output_loading_info=True)
    values = whole_values(model)
    found["part"] = differing(values, expected_values(part, {"inner": inner}))
    found["trainable"] = all(param.requires_grad for param in model.parameters())
    found["missing"] = all(name.startswith("inner.encoder") for name in info["missing_keys"])
    keep = HfDeepSpeedConfig(ds_config())
    found["part as stock"] = differing(values, whole_values(AroundOne.from_pretrained(part)))
    del keep

    # An encoder whose own checkpoint lacks a layer, which is initialised as that class does it.
    values = whole_values(streamed(AroundOne, lacking))
    layer = "inner.encoder.layer.0.output.dense"
    found["lacking"] = differing(values, expected_values(lacking, {"inner": folders["inner lacking"]}))
    weight, bias = values.pop(f"{layer}.weight"), values.pop(f"{layer}.bias")
    found["initialised"] = 0 < float(weight.abs().max()) < 0.2, bool((bias == 0).all())

    # Several, of which one has one again.
    model = streamed(AroundTwo, two)
    expected = expected_values(two, {"second": whole})
    found["two"] = differing(whole_values(model), expected)
    return found


@pytest.mark.plugin("forecast")
def test_values(cluster: None, tmp_path: Path) -> None:
    inner = make_bert(tmp_path / "inner", 1)
    inner_lacking = make_bert(tmp_path / "inner lacking", 2, "encoder.layer.0.output.dense")
    whole = make_around_one(tmp_path / "whole", inner, 3)
    folders = {
        "inner": inner,
        "inner lacking": inner_lacking,
        "whole": whole,
        "other": make_around_one(tmp_path / "other", inner, 4),
        "part": make_around_one(tmp_path / "part", inner, 5, "inner.encoder"),
        "lacking": make_around_one(tmp_path / "lacking", inner_lacking, 6, "inner.encoder"),
        "two": make_around_two(tmp_path / "two", inner, whole, 7, "second.inner.encoder"),
    }
    layer = "inner.encoder.layer.0.output.dense"
    for found in run_ranks(2, load_all, folders):
        assert found == {
            "whole": [],
            "bytes needed": True,
            "into": [],
            "planned files": ["inner", "part"],
            "part": [],
            "trainable": True,
            "missing": True,
            "part as stock": [],
            "lacking": [f"{layer}.bias", f"{layer}.weight"],
            "initialised": (True, True),
            "two": [],
        }


def errors(folders: dict[str, Path]) -> dict[str, list[tuple[str, str]]]:
    """What stock's ZeRO-3 raises and what streaming does; and both outside of ZeRO-3."""
    found: dict[str, list[tuple[str, str]]] = {}

    def note(what: str, call: Any) -> None:
        found.setdefault(what, []).append(error_of(call))

    def under_zero3(folder: Path) -> Any:
        keep = HfDeepSpeedConfig(ds_config())
        try:
            return AroundOne.from_pretrained(folder)
        finally:
            del keep

    for what in ("gone", "device map"):
        note(what, lambda what=what: under_zero3(folders[what]))
        note(what, lambda what=what: streamed(AroundOne, folders[what]))

    def shared() -> Any:
        with hf_zero_stream.streaming():
            return AroundOne.from_pretrained(folders["whole"])

    note("outside", lambda: AroundOne.from_pretrained(folders["whole"]))
    note("outside", shared)
    return found


def test_errors_are_stocks(cluster: None, tmp_path: Path) -> None:
    inner = make_bert(tmp_path / "inner", 1)
    gone = make_bert(tmp_path / "gone", 1)
    folders = {
        "whole": make_around_one(tmp_path / "whole", inner, 3),
        "gone": make_around_one(tmp_path / "around gone", gone, 3),
        "device map": make_around_one(tmp_path / "mapped", inner, 3, device_map="cpu"),
    }
    (gone / "model.safetensors").unlink()
    for world_size in (1, 2):
        for found in run_ranks(world_size, errors, folders):
            for what, (stocks, ours) in found.items():
                assert stocks == ours and stocks[0], (what, stocks, ours)


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


def load_classes(folders: dict[str, Path], dtype: torch.dtype) -> list[str]:
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
    assert run_ranks(2, load_classes, folders, torch.float32) == [[], []]


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
