"""Each load, save and resume ends in one line of rank 0, by default; every usual way silences it or asks for more."""

import io
import json
import logging
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import transformers

import hf_zero_stream
from hf_zero_stream.settings import log
from hf_zero_stream.settings.config import REPORT_VARIABLE
from tests.support import fsdp2
from tests.support.cluster import run_ranks
from tests.support.parity import ds_config
from tests.support.trainers import ZERO_3, arguments_of, join_as_launched
from tests.support.zoo import Checkpoint


Step = Callable[[], object]

TRANSFORMERS, OURS, ROOT = (logging.getLogger(name) for name in ("transformers", "hf_zero_stream", ""))


@contextmanager
def way(name: str) -> Iterator[None]:
    """One of the ways by which a user says how much he wants to read."""
    levels = {TRANSFORMERS: TRANSFORMERS.level, ROOT: ROOT.level}
    kind, _, level = name.partition("=")
    if kind == log.LOG_VARIABLE:
        os.environ[kind] = level
    elif kind:
        {"transformers": TRANSFORMERS, "ours": OURS, "root": ROOT}[kind].setLevel(level)
    try:
        yield
    finally:
        os.environ.pop(log.LOG_VARIABLE, None)
        for logger, before in levels.items():
            logger.setLevel(before)
        if kind == "ours":
            OURS.setLevel(logging.NOTSET)


def heard(step: Step) -> list[str]:
    """What a step writes to stderr, bars included."""
    with redirect_stderr(io.StringIO()) as text:
        step()
    return [line for line in text.getvalue().splitlines() if line.startswith("hf_zero_stream") or "%|" in line]


def in_a_training(checkpoint: Path, folder: Path) -> dict[str, list[str]]:
    os.environ[REPORT_VARIABLE] = str(folder / "reports")
    config = ds_config()
    engines: list[Any] = []

    def load() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(checkpoint, ds_config=config)

    def train() -> None:
        engines.append(deepspeed.initialize(model=load(), config=config)[0])
        ids = torch.arange(8)[None]
        engines[0].backward(engines[0](input_ids=ids, labels=ids).loss)
        engines[0].step()

    with hf_zero_stream.streaming():
        found = {}
        for name in ("", "transformers=ERROR", f"{log.LOG_VARIABLE}=warning", "ours=ERROR", "root=ERROR"):
            with way(name):
                found[f"load {name}"] = heard(load)
        for name in ("ours=INFO", "transformers=INFO", f"{log.LOG_VARIABLE}=info", "root=INFO"):
            with way(name):
                found[f"table {name}"] = heard(load)
        train()
        engine, place = engines[0], folder / "state"
        steps: dict[str, Step] = {
            "save": lambda: engine.module.save_pretrained(folder / "weights"),
            "state": lambda: engine.save_checkpoint(place),
            "resume": lambda: engine.load_checkpoint(place),
            "background": lambda: hf_zero_stream.save_state(engine, place, asynchronous=True, tag="b").wait(),
        }
        found |= {name: heard(step) for name, step in steps.items()}
        resumed = hf_zero_stream.load_state(engine, place)
        assert str(resumed).startswith("resumed b, which 2 ranks saved, in 0.") and resumed.bytes_read > 0
    return found


BYTES = r"[\d.]+ [KM]iB"
REST = rf"in \d\.\d\d s; a rank read {BYTES}, and its memory on the host grew by [\d.]+ [KM]?i?B"


def bars_of(lines: list[str]) -> set[str]:
    return {line.partition(":")[0] for line in lines if "%|" in line}


def lines_of(lines: list[str]) -> list[str]:
    """The lines but for that of a run's first state, which says whose its format is."""
    return [line for line in lines if "%|" not in line and "this run are hf_zero_stream's" not in line]


def test_what_a_training_under_zero3_says(
    compiler: None, cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Files of the state are for whom the umask lets read them, random numbers too."""
    found, of_rank_1 = run_ranks(2, in_a_training, zoo_checkpoint("qwen3_moe"), tmp_path)
    assert not any(of_rank_1.values()), of_rank_1
    size = rf"({BYTES})"
    loaded = re.fullmatch(
        rf"hf_zero_stream: loaded {size} into ZeRO-3 partitions on 2 ranks {REST} \(stock: rank 0 reads {size}\)",
        *lines_of(found["load "]),
    )
    assert loaded and loaded[1] == loaded[2]
    for name, lines in found.items():
        if name.startswith("load ") and name != "load ":
            assert not lines_of(lines), (name, lines)
            assert bool(bars_of(lines)) is (name != "load transformers=ERROR"), (name, lines)
        elif name.startswith("table"):
            assert lines[-2].startswith("hf_zero_stream: STREAMING LOAD REPORT"), (name, lines)
            assert lines[-1].startswith("hf_zero_stream: loaded "), (name, lines)
    assert bars_of(found["load "]) == {"Streaming weights"}
    (counted,) = {line.partition("| ")[2].partition("/")[0] for line in found["load "] if "100%|" in line}
    in_time = r"in \d\.\d\d s"
    end = r"\(2 ranks; host memory of a rank grew by at most [\d.]+ [KM]?i?B\)"
    state = rf"saved {BYTES} of training state in \d shards to .*/state {in_time}"
    grew = r"and its memory on the host grew by [\d.]+ [KM]?i?B"
    resumed = rf".*/state: resumed global_step1, which 2 ranks saved, {in_time}; rank 0 read {BYTES}, {grew}"
    for name, bar, pattern in (
        ("save", {"Writing weights"}, rf"saved {BYTES} of weights in 1 shard to .*/weights {in_time} {end}"),
        ("state", {"Writing training state"}, f"{state} {end}"),
        ("resume", {"Streaming training state"}, resumed),
        ("background", set(), f"{state} in the background {end}"),
    ):
        (line,) = lines_of(found[name])
        assert re.fullmatch(f"hf_zero_stream: {pattern}", line) and bars_of(found[name]) == bar, (name, found[name])
    reports = [json.loads(line) for line in (tmp_path / "reports").read_text().splitlines()]
    kinds = [report["kind"] for report in reports]
    assert kinds == ["load"] * 10 + ["save", "save", "resume", "save", "resume"]
    read = sum(rank["bytes_read"] for rank in reports[0]["ranks"])
    assert float(counted.rstrip("k")) == pytest.approx(read / 1024, rel=0.01), "the bar counts what all ranks read"
    assert len(reports[0]["ranks"]) == 2 and reports[0]["stock_reader"] == "rank 0"
    assert [(each["what"], each["asynchronous"]) for each in reports if each["kind"] == "save"] == [
        ("weights", False),
        ("training state", False),
        ("training state", True),
    ]
    umask = os.umask(0)
    os.umask(umask)
    files = [path for path in (tmp_path / "state").rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) & ~0o111 for path in files} == {0o666 & ~umask}
    assert "rng.safetensors" in {path.name for path in files}


def under_fsdp2(checkpoint: Path, efficient: bool) -> dict[str, list[str]]:
    fsdp2.announce(cpu_ram_efficient_loading=efficient)
    accelerator = fsdp2.make_accelerator()
    models: list[Any] = []

    def prepare() -> None:
        models.extend(accelerator.prepare(models[0], torch.optim.AdamW(models[0].parameters())))

    return {
        "load": heard(lambda: models.append(fsdp2.load("llama", checkpoint))),
        "prepare": heard(prepare),
        "report": [str(models[1].streaming_report.streamed)],
    }


def test_what_accelerates_fsdp2_says(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    """The weights are read when the model is prepared, and until then no bar counts nothing."""
    found, of_rank_1 = run_ranks(2, under_fsdp2, zoo_checkpoint("llama"), True)
    assert [*of_rank_1.values()] == [[], [], ["True"]]
    (line,) = found["load"]
    assert re.fullmatch(
        rf"hf_zero_stream: {BYTES} of weights will be read when accelerator.prepare\(\) shards it by FSDP2", line
    )
    (line,) = lines_of(found["prepare"])
    stock = rf"\(stock: the first rank of each node reads {BYTES}\)"
    assert re.fullmatch(rf"hf_zero_stream: loaded {BYTES} into shards on 2 ranks {REST} {stock}", line)
    assert bars_of(found["prepare"]) == {"Streaming weights"}


def by_the_trainer(checkpoint: Path, output: Path, quiet: bool) -> list[str]:
    join_as_launched()

    def train() -> None:
        with hf_zero_stream.streaming():
            args = arguments_of(output, **ZERO_3, max_steps=1, save_strategy="steps", save_steps=1, disable_tqdm=quiet)
            model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
            row = {"input_ids": torch.arange(5, 14), "labels": torch.arange(5, 14)}
            transformers.Trainer(model=model, args=args, train_dataset=[row] * 4).train()

    return [*heard(train)] if dist.get_rank() == 0 else [str(heard(train))]


def test_what_the_trainer_says(compiler: None, cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Its `disable_tqdm` silences our bars, and not the lines."""
    found, of_rank_1 = run_ranks(2, by_the_trainer, zoo_checkpoint("llama"), tmp_path, True)
    assert of_rank_1 == ["[]"] and not bars_of(found)
    said = [line.split()[:2] + line.split(" of ")[1:2] for line in lines_of(found)]
    assert [(words[1], words[2].partition(" in ")[0]) for words in said[1:]] == [
        ("saved", "weights"),
        ("saved", "training state"),
    ] and said[0][1] == "loaded"


def alone(checkpoint: Path) -> list[str]:
    with hf_zero_stream.streaming():
        model, _ = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
        with way(f"{log.LOG_VARIABLE}=info"):
            said = heard(lambda: transformers.AutoModelForCausalLM.from_pretrained(checkpoint, strict=True))
    return [str(model.streaming_report), *lines_of(said)]


def test_what_stock_loads_has_a_report_too(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    ((report, *said),) = run_ranks(1, alone, zoo_checkpoint("llama"))
    reason = "it is for one process, outside ZeRO-3, which shares the work with none"
    assert report == f"Stock transformers loaded this model: {reason}."
    assert said == [f"hf_zero_stream: stock transformers loaded this model: {reason}"]
