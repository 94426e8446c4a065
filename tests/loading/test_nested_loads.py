"""A model whose `__init__` calls `from_pretrained` comes out as in stock's ZeRO-3: its own checkpoint's values win.

What that checkpoint lacks keeps the values of the checkpoint inside.
"""

from pathlib import Path
from typing import Any

from transformers.integrations.deepspeed import HfDeepSpeedConfig

import hf_zero_stream
from tests.support.checkpoint_files import differing
from tests.support.cluster import run_ranks
from tests.support.nested_models import (
    AroundOne,
    AroundTwo,
    expected_values,
    make_around_one,
    make_around_two,
    make_bert,
)
from tests.support.parity import ds_config
from tests.support.whole import whole_values


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
        try:
            call()
        except Exception as error:
            found.setdefault(what, []).append((type(error).__name__, str(error)))
        else:
            found.setdefault(what, []).append(("nothing", ""))

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
                assert stocks == ours and stocks[0] != "nothing", (what, stocks, ours)
