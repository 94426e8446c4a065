"""The Trainer inside ``streaming()``: what is kept, uploaded and resumed from is what it would be without us."""

import errno
import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
import transformers
from transformers import trainer as trainers
from transformers.trainer_callback import ExportableState, TrainerCallback
from transformers.trainer_utils import rotate_checkpoints

import hf_zero_stream
from hf_zero_stream import StreamingConfig
from hf_zero_stream.checkpoint.formats import UNFINISHED
from hf_zero_stream.errors import SaveError
from hf_zero_stream.saving.pending import finish_pending
from hf_zero_stream.saving.publication import is_unfinished
from hf_zero_stream.state import hooks
from tests.state.test_fsdp2_hooks import trainer_of
from tests.support.cluster import run_ranks, run_ranks_expecting_errors
from tests.support.training_state import TrainerRun
from tests.support.zoo import Checkpoint


class Counter(TrainerCallback, ExportableState):
    """Counts steps, and is restored."""

    def __init__(self, steps: int = 0) -> None:
        self.steps = steps

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.steps += 1

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"steps": self.steps}}


def train(
    folder: Path, output: Path, run: TrainerRun, config: StreamingConfig | None = None, dies_in: str = ""
) -> dict[str, Any]:
    """Six steps, or what is left of them; the process ends at step 4 in the Trainer's method `dies_in`."""
    with hf_zero_stream.streaming(config):
        trainer, taken = trainer_of(folder, output, run)
        trainer.args.remove_unused_columns = False
        trainer.add_callback(Counter())
        if dies_in:
            original = getattr(trainer, dies_in)

            def dying(*args: Any, **kwargs: Any) -> Any:
                return os._exit(1) if trainer.state.global_step == 4 else original(*args, **kwargs)

            setattr(trainer, dies_in, dying)
        trainer.train(resume_from_checkpoint=run.resume if run.resume in (None, True) else str(run.resume))
        at_the_end = trainer.evaluate()["eval_loss"]
    (counter,) = (each for each in trainer.callback_handler.callbacks if isinstance(each, Counter))
    history, best = trainer.state.log_history, trainer.state.best_model_checkpoint
    return {
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "taken": taken,
        "steps": counter.steps,
        "best": None if best is None else Path(best).name,
        "at the end": at_the_end,
        "kept": sorted(path.name for path in output.glob("checkpoint-*")),
    }


def names_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


ARGUMENTS: dict[str, dict[str, Any]] = {
    "only the model": {"save_only_model": True, "save_total_limit": 2},
    "the best one": {"load_best_model_at_end": True, "save_total_limit": 1},
    "the best and the last": {"load_best_model_at_end": True, "save_total_limit": 2},
}
STOCK = StreamingConfig(training_state=False)


@pytest.mark.parametrize("zero", [True, False], ids=["ZeRO-3", "FSDP2"])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_what_is_kept(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, zero: bool, name: str) -> None:
    """The same checkpoints, losses and best model as with the Trainer's own saves, gradients accumulated."""
    folder, run = zoo_checkpoint("llama"), TrainerRun(zero=zero, accumulation=3, arguments=ARGUMENTS[name])
    found = run_ranks(2, train, folder, tmp_path / "ours", run)
    assert found == run_ranks(2, train, folder, tmp_path / "stock", run, STOCK)
    for kept in found[0]["kept"]:
        ours, stock = (tmp_path / of / kept for of in ("ours", "stock"))
        assert ours.joinpath("model.safetensors").read_bytes() == stock.joinpath("model.safetensors").read_bytes()
        has_state = any(ours.glob("global_step*/training_state.json"))
        assert has_state is not run.arguments.get("save_only_model", False)
        if not has_state:
            assert names_in(ours) == names_in(stock)


# ---------------------------------------------------------------------------------------- the newest one, or the last


DIES_IN = ["_save_optimizer_and_scheduler", "_save_rng_state"]


@pytest.mark.slow
@pytest.mark.parametrize("zero", [True, False], ids=["ZeRO-3", "FSDP2"])
@pytest.mark.parametrize("dies_in", DIES_IN)
def test_a_save_that_died(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, zero: bool, dies_in: str) -> None:
    """``resume_from_checkpoint=True`` goes on from the checkpoint before, callbacks' states and data too."""
    folder = zoo_checkpoint("llama")
    run = TrainerRun(zero=zero, arguments={"restore_callback_states_from_checkpoint": True})
    whole = run_ranks(2, train, folder, tmp_path / "whole", run)
    died = run_ranks_expecting_errors(2, train, folder, tmp_path / "died", run, None, dies_in)
    assert [outcome.error_type for outcome in died] == ["Died", "Died"]
    assert (tmp_path / "died" / "checkpoint-4" / "model.safetensors").exists()
    resumed = run_ranks(2, train, folder, tmp_path / "died", TrainerRun(True, zero, arguments=run.arguments))
    for mine, expected in zip(resumed, whole, strict=True):
        assert mine["taken"][-4:] == expected["taken"][-4:]
        assert {**mine, "taken": None} == {**expected, "taken": None} and mine["steps"] == 6


def train_with_failures(
    folder: Path, output: Path, run: TrainerRun, fails_at: int, config: StreamingConfig | None = None
) -> dict[str, Any]:
    """The same; what rank 1 writes in the background of the checkpoint of this step is not written."""

    class Failing(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            failing = state.global_step == fails_at and dist.get_rank() == 1
            os.pwritev = refuse if failing else pwritev

    pwritev = os.pwritev

    def refuse(*args: Any) -> int:
        if threading.current_thread() is threading.main_thread():
            return pwritev(*args)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    try:
        with hf_zero_stream.streaming(config):
            trainer, _ = trainer_of(folder, output, run)
            trainer.args.remove_unused_columns = False
            trainer.add_callback(Failing())
            error = ""
            try:
                trainer.train(resume_from_checkpoint=run.resume)
            except SaveError as raised:
                error = str(raised)
    finally:
        os.pwritev = pwritev
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"error": error, "losses": losses, "kept": sorted(path.name for path in output.glob("checkpoint-*"))}


@pytest.mark.parametrize("zero", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["ZeRO-3", "FSDP2"])
def test_a_save_in_the_background_that_failed(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, zero: bool
) -> None:
    """It ends the training, at the next checkpoint or the end; the one before stays, and a new process takes it."""
    folder, output = zoo_checkpoint("llama"), tmp_path / "run"
    run = TrainerRun(zero=zero, arguments={"save_total_limit": 1})
    again = replace(run, resume=True)
    config = StreamingConfig(asynchronous_save=True, snapshot_bytes=0)
    (whole, _) = run_ranks(2, train_with_failures, folder, tmp_path / "whole", run, 0)
    for fails_at, resume in ((4, run), (6, again)):
        found = run_ranks(2, train_with_failures, folder, output, resume, fails_at, config)
        assert all("No space left" in of_rank["error"] for of_rank in found), fails_at
        assert found[0]["kept"] == [f"checkpoint-{fails_at - 2}", f"checkpoint-{fails_at}"]
        assert (output / f"checkpoint-{fails_at}" / "model.safetensors").exists()
        assert is_unfinished(output / f"checkpoint-{fails_at}")
    resumed = run_ranks(2, train_with_failures, folder, output, again, 0, config)
    assert resumed[0] == {"error": "", "losses": whole["losses"], "kept": ["checkpoint-6"]}  # rank 0 removes
    assert not is_unfinished(output / "checkpoint-6")


def test_none_is_removed_beside_a_later_one_that_failed(tmp_path: Path) -> None:
    folders = [tmp_path / f"checkpoint-{step}" for step in (2, 3, 4)]
    for folder in folders:
        folder.mkdir()
        (folder / "trainer_state.json").write_text("{}")
    mark = folders[2] / f"{UNFINISHED}x"
    mark.mkdir()
    finish_pending()
    for is_failed in (True, False):
        hooks.rotate_checkpoints(rotate_checkpoints, output_dir=str(tmp_path), save_total_limit=1)
        assert [folder.exists() for folder in folders] == ([True] * 3 if is_failed else [False, False, True])
        if is_failed:
            mark.rmdir()


def test_the_newest_complete_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a checkpoint lacks: files that come later, the end of the last one, what is still being written."""
    said: list[str] = []
    monkeypatch.setattr(hooks.logger, "warning", said.append)
    contents: dict[int, str | None] = {2: "{}", 10: "{}", 30: '{"global_st', 40: None, 50: "{}"}
    for step, content in contents.items():
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"")
        if content is not None:
            (folder / "trainer_state.json").write_text(content)
    (tmp_path / "checkpoint-50" / f"{UNFINISHED}x").mkdir()
    assert hooks._last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
    assert len(said) == 1 and "checkpoint-50: its save was interrupted" in said[0]
    (tmp_path / "checkpoint-50" / f"{UNFINISHED}x").rmdir()
    assert hooks._last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-50")
    (tmp_path / "checkpoint-50" / "trainer_state.json").unlink()
    assert hooks._last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
    for step in (2, 10):
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").unlink()
    with pytest.raises(ValueError, match="No valid checkpoint found"):
        hooks._last_checkpoint(tmp_path)


@pytest.mark.parametrize(("limit", "metric", "waits"), [(1, "loss", True), (1, None, False), (2, "loss", False)])
def test_what_the_trainer_removes_at_its_end_is_complete(
    monkeypatch: pytest.MonkeyPatch, limit: int, metric: str | None, waits: bool
) -> None:
    finished: list[bool] = []
    monkeypatch.setattr(hooks, "finish_pending", lambda **_: finished.append(True))
    args = SimpleNamespace(save_total_limit=limit, metric_for_best_model=metric, output_dir="run")
    trainer = SimpleNamespace(args=args, _push_from_checkpoint=None)
    with hf_zero_stream.streaming():
        hooks.trainer_save(lambda trainer: finished.clear(), trainer)
    assert finished == [True] * waits and vars(trainer) == {"args": args, "_push_from_checkpoint": None}


# ------------------------------------------------------------------------------------------------------------- uploads


def train_and_push(folder: Path, output: Path, zero: bool, config: StreamingConfig) -> list[Any]:
    """What is in the folders that rank 0 uploads, at that moment; there is no hub."""
    uploaded: list[Any] = []

    def upload_folder(folder_path: str, path_in_repo: str = "", **_: Any) -> Any:
        place = Path(folder_path)
        own = {name for name in names_in(place) if not name.startswith("checkpoint-")}
        state = json.loads((place / "trainer_state.json").read_text()) if "trainer_state.json" in own else {}
        weights = (place / "model.safetensors").read_bytes()
        uploaded.append((path_in_repo, own, state.get("global_step"), weights))
        return SimpleNamespace(is_done=lambda: True, done=lambda: True, result=lambda: None)

    trainers.hf_api = lambda: SimpleNamespace(upload_folder=upload_folder)  # type: ignore[attr-defined]
    no_repo = {"hub_model_id": "me/it", "push_in_progress": None}
    transformers.Trainer.init_hf_repo = lambda self, token=None: vars(self).update(no_repo)  # type: ignore[assignment]
    arguments = {"push_to_hub": True, "hub_strategy": "all_checkpoints"}
    train(folder, output, TrainerRun(zero=zero, arguments=arguments), config)
    return uploaded


@pytest.mark.slow
@pytest.mark.parametrize("zero", [True, False], ids=["ZeRO-3", "FSDP2"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_uploads(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, zero: bool, asynchronous: bool) -> None:
    folder, config = zoo_checkpoint("llama"), StreamingConfig(asynchronous_save=asynchronous)
    ours = run_ranks(2, train_and_push, folder, tmp_path / "ours", zero, config)
    stock = run_ranks(2, train_and_push, folder, tmp_path / "stock", zero, STOCK)
    assert ours[1] == stock[1] == [] and len(ours[0]) == len(stock[0]) > 4
    for mine, theirs in zip(ours[0], stock[0], strict=True):
        assert (mine[0], mine[2], mine[3]) == (theirs[0], theirs[2], theirs[3])
        if mine[0].startswith("checkpoint"):
            assert f"global_step{mine[2]}/training_state.json" in mine[1] and "latest" in mine[1]
        else:
            assert mine[1] == theirs[1]
