"""The memory that training will need, in reports of loads: computed when it is asked for, and told to people."""

import dataclasses
import html
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_zero_stream
from hf_zero_stream.errors import MissingPluginError
from hf_zero_stream.planning.plan import LoadPlan
from hf_zero_stream.plugins.forecast.footprint import EngineSettings, ParameterShape, memory_footprint
from hf_zero_stream.plugins.forecast.plan import Forecast
from hf_zero_stream.reports.load import LoadReport
from tests.support.cli import run
from tests.support.cluster import run_ranks
from tests.support.parity import ds_config
from tests.support.plugins import without_plugin
from tests.support.zoo import Checkpoint


SHAPES = [ParameterShape("layers.0.mlp.weight", 3 * 2**20, torch.bfloat16, ranks=2)]


def test_lines_for_people() -> None:
    memory = memory_footprint(SHAPES, EngineSettings(reduce_bucket_bytes=2**11), staging_bytes=2**26)
    heading, *lines = memory.table().splitlines()
    assert heading.startswith("Memory that training will need") and all(line.startswith("  ") for line in lines)
    shown = [(line[:28].strip(), line[28:].strip()) for line in lines]
    assert shown == [
        ("partitions", "3.0 MiB cpu"),
        ("peak of the load", "67.0 MiB cpu (staging up to 64.0 MiB)"),
        ("largest gather", "6.0 MiB (layers.0.mlp.weight)"),
        ("deepspeed.initialize adds", "fp32 copies 6.0 MiB cpu"),
        ("", "gradients 3.0 MiB cpu"),
        ("and peaks at", "18.0 MiB cpu"),
        ("the first backward adds", "reduce bucket 2.0 KiB cpu"),
        ("the first step adds", "optimizer states 12.0 MiB cpu"),
        ("held in training", "24.0 MiB cpu"),
        ("passes peak at", "30.0 MiB cpu (without activations)"),
        ("a step peaks at", "42.0 MiB cpu"),
        ("with a fused optimizer", "36.0 MiB cpu"),
    ]


def test_forecasts_are_printed_as_tables_in_a_notebook_too() -> None:
    forecast = Forecast(LoadPlan(3, 64, (), ()), memory_footprint(SHAPES, EngineSettings(), staging_bytes=2**26))
    text = str(forecast)
    assert text == forecast.table() == f"{forecast}" and text.startswith("PLAN OF RANK 3 OF 64\nNeeds 0 B of 0 B")
    assert max(map(len, text.splitlines())) <= 80
    assert forecast._repr_html_() == f"<pre>{html.escape(text)}</pre>"


def test_a_report_asks_once_and_copies_do_not() -> None:
    asked: list[int] = []

    def forecast() -> Any:
        asked.append(1)
        return memory_footprint(SHAPES, EngineSettings())

    report, other = (LoadReport(world_size=1, ranks=(), forecast=forecast) for _ in range(2))
    assert pickle.loads(pickle.dumps(other)).footprint is None and not asked
    assert report.to_dict()["footprint"] == dataclasses.asdict(report.footprint)
    assert pickle.loads(pickle.dumps(report)).footprint == report.footprint and len(asked) == 1


def load_and_ask(folder: Path) -> dict[str, Any]:
    model = hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(folder, ds_config=ds_config())
    report = model.streaming_report
    found: dict[str, Any] = {"computed": "footprint" in vars(report)}
    with without_plugin("forecast"):
        other = hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(folder, ds_config=ds_config())
        found["without"] = other.streaming_report.footprint, "Memory that training" in str(other.streaming_report)
    found["table"] = str(report.footprint.table()) in str(report)
    return found


def test_a_load_computes_nothing_before_its_report_is_asked(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    (found,) = run_ranks(1, load_and_ask, zoo_checkpoint("llama"))
    assert found == {"computed": False, "without": (None, False), "table": True}


def test_what_needs_the_plugin_names_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hf_zero_stream, "_is_there", lambda home: "forecast" not in home)
    monkeypatch.delitem(vars(hf_zero_stream), "plan", raising=False)
    with without_plugin("forecast"):
        with pytest.raises(MissingPluginError, match="hf_zero_stream.plan needs the plug-in 'forecast'"):
            hf_zero_stream.plan(str(tmp_path), world_size=2)
        message = run("plan", str(tmp_path), "--world-size", "2", code=1).stderr
    assert "hf-zero-stream plan needs the plug-in 'forecast'" in message
