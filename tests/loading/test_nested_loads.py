"""Models whose `__init__` loads others, or looks at values.

- A model whose `__init__` calls `from_pretrained` comes out as in stock's ZeRO-3: its own checkpoint's values win.
  What that checkpoint lacks keeps the values of the checkpoint inside.
- Users' classes come out as in a plain load, which builds them on the meta device: it raises where an `__init__` looks
  at values, and forgets what that has put into parameters and on them.
"""

from functools import partial
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


class LooksAtValues(Odd):
    """Numbers that are values of tensors."""

    def build(self) -> None:
        self.rates = [rate.item() for rate in torch.pow(2.0, -torch.arange(3.0))]


class SharesParameters(Odd):
    """A tie that the config does not ask for."""

    _tied_weights_keys = {"third.weight": "second.weight"}

    def build(self) -> None:
        self.third = nn.Linear(WIDTH + 2, WIDTH, bias=False)
        self.third.weight = self.second.weight


class HasModels(SubModels):
    """Models of transformers' own, built by `from_config`, and a buffer that is in the checkpoint."""

    def build(self) -> None:
        super().build()
        self.register_buffer("ones", torch.ones(3))


class HasMarks(Odd):
    """Attributes and hooks of parameters."""

    def build(self) -> None:
        self.first.weight._no_weight_decay = True
        self.first.weight.register_hook(lambda gradient: gradient * 0)


CLASSES: list[type[Odd]] = [SharesParameters, HasModels, HasMarks]


def values(model: Any) -> dict[str, Any]:
    found: dict[str, Any] = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for name, param in model.named_parameters(remove_duplicate=False):
        with deepspeed.zero.GatheredParameters([param]):
            found[name] = param.data.clone()
        found[f"marks of {name}"] = torch.tensor([hasattr(param, "_no_weight_decay"), bool(param._backward_hooks)])
    return found


def load_classes(folders: dict[str, Path]) -> tuple[dict[str, list[str]], list[tuple[str, str]]]:
    """What differs from a plain load, and the errors of both; plain ones first, before a model keeps ZeRO-3 on."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in folders}
    errors = []
    for how in ("plain", "streamed"):
        for name, folder in folders.items():
            load = partial(load_with, how, f"{__name__}:{name}", folder, ds_config(), {"dtype": torch.float32})
            if name == LooksAtValues.__name__:
                errors.append(error_of(load))
            else:
                found[name].append(values(load()))
    return {name: differing(*both) for name, both in found.items() if both}, errors


def test_users_classes_as_in_a_plain_load(cluster: None, tmp_path: Path) -> None:
    folders = {model_class.__name__: tmp_path / model_class.__name__ for model_class in [*CLASSES, LooksAtValues]}
    for model_class in [*CLASSES, LooksAtValues]:
        fill(model_class(OddConfig())).save_pretrained(folders[model_class.__name__])
    for different, (plain, ours) in run_ranks(2, load_classes, folders):
        assert different == {model_class.__name__: [] for model_class in CLASSES}
        assert plain == ours and "meta" in ours[1]


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
