"""What needs the plug-in ``pickled`` where it is not there: an error that names it, before anything is changed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers

import hf_zero_stream
from hf_zero_stream.errors import MissingPluginError
from tests.support.checkpoint_files import differing
from tests.support.cli import run
from tests.support.cluster import run_ranks
from tests.support.plugins import without_plugin
from tests.support.training_state import all_in_one_group, engine_of, state_config, train
from tests.support.whole import whole_values
from tests.support.zoo import Checkpoint


NAMED = "needs the plug-in 'pickled' of hf_zero_stream"


def as_bin(model: Any, folder: Path) -> None:
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


def as_indexed_bin(model: Any, folder: Path) -> None:
    torch.save(model.state_dict(), folder / "all.pt")
    weight_map = dict.fromkeys(model.state_dict(), "all.pt")
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def as_distributed(model: Any, folder: Path) -> None:
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder, no_dist=True)


@pytest.mark.parametrize("save", [as_bin, as_indexed_bin, as_distributed])
def test_weights(zoo_checkpoint: Checkpoint, tmp_path: Path, save: Callable[[Any, Path], None]) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(zoo_checkpoint("llama"))
    model.config.save_pretrained(tmp_path)
    save(model, tmp_path)
    with without_plugin("pickled"):
        with pytest.raises(MissingPluginError, match=NAMED):
            hf_zero_stream.load_into(model, str(tmp_path))
        with pytest.raises(MissingPluginError, match=NAMED):
            hf_zero_stream.plan(str(tmp_path), world_size=2)
        for command in (("inspect",), ("verify",), ("plan", "--world-size", "2")):
            assert NAMED in run(*command, str(tmp_path), code=1).stderr, command
    if save is not as_distributed:  # which stock cannot load
        assert type(model).from_pretrained(tmp_path).state_dict().keys() == model.state_dict().keys()


def test_convert(zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    with without_plugin("pickled"):
        message = str(run("convert", str(zoo_checkpoint("llama")), str(tmp_path / "new"), code=1).stderr)
    assert "hf-zero-stream convert" in message and NAMED in message and not (tmp_path / "new").exists()


def save_by_deepspeed(folder: Path, target: Path, stage: int) -> None:
    engine = engine_of(folder, state_config(stage), all_in_one_group)
    train(engine, (0,))
    engine.save_checkpoint(str(target))


def resume_without(folder: Path, source: Path, stage: int, by_engine: bool) -> tuple[str, list[str]]:
    """The error, and the names of what is another value after it."""
    engine = engine_of(folder, state_config(stage), all_in_one_group)
    before = whole_values(engine)
    with without_plugin("pickled"), hf_zero_stream.streaming(), pytest.raises(MissingPluginError) as caught:
        if by_engine:
            engine.load_checkpoint(str(source))
        else:
            hf_zero_stream.load_state(engine, source)
    return str(caught.value), differing(whole_values(engine), before)


@pytest.mark.parametrize("by_engine", [False, True])
def test_resuming_from_deepspeed(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, by_engine: bool) -> None:
    """Of another stage, which DeepSpeed does not load either."""
    run_ranks(2, save_by_deepspeed, zoo_checkpoint("llama"), tmp_path, 3)
    for message, changed in run_ranks(2, resume_without, zoo_checkpoint("llama"), tmp_path, 2, by_engine):
        assert NAMED in message and "global_step1" in message and changed == []
    with without_plugin("pickled"):
        for command in ("inspect", "verify"):
            assert NAMED in run(command, str(tmp_path / "global_step1"), code=1).stderr


def save_state(folder: Path, target: Path) -> list[float]:
    engine = engine_of(folder, state_config(3), all_in_one_group)
    with without_plugin("pickled"), hf_zero_stream.streaming():
        train(engine, (0,))
        engine.save_checkpoint(str(target))
        expected = train(engine, (1,))
        again = engine_of(folder, state_config(3), all_in_one_group)
        again.load_checkpoint(str(target))
        assert train(again, (1,)) == expected
    return expected


def test_states_of_ours_need_none(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    run_ranks(2, save_state, zoo_checkpoint("llama"), tmp_path)
    assert not [*tmp_path.rglob("*.pt"), *tmp_path.rglob("*.py")]
