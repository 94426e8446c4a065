"""Checkpoints of the Trainer, accelerate and DeepSpeed's engine in buckets: what they are in a folder."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hf_zero_stream
from hf_zero_stream import StreamingConfig
from hf_zero_stream.errors import UrlError
from hf_zero_stream.plugins.remote import objects
from hf_zero_stream.plugins.remote.lists import LIST
from hf_zero_stream.plugins.remote.objects import RemoteFolder
from tests.state.test_fsdp2_hooks import trainer_of
from tests.support.buckets import ACCOUNT, BUCKET, azure_container, s3_bucket, writable_gcs_bucket
from tests.support.cluster import run_ranks, run_ranks_expecting_errors
from tests.support.training_state import TrainerRun, all_in_one_group, engine_of, state_config
from tests.support.training_state import train as train_engine
from tests.support.zoo import Checkpoint


SERVERS = {
    f"s3://{BUCKET}/run": s3_bucket,
    f"gs://{BUCKET}/run": writable_gcs_bucket,
    f"az://{ACCOUNT}/{BUCKET}/run": azure_container,
}


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> Iterator[dict[str, str]]:
    """What processes need to reach the empty bucket of `url`, as this one does."""
    (tmp_path / "nothing").mkdir()
    with SERVERS[url](tmp_path / "nothing") as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        objects._store.cache_clear()
        yield environment
    objects._store.cache_clear()


S3, GS, AZ = SERVERS
EACH = (S3, GS, pytest.param(AZ, marks=pytest.mark.slow))


def prepare(environment: dict[str, str], work: Path) -> None:
    """Each rank has temporary files of its own, and works in an empty folder."""
    os.environ.update(environment)
    own = work / f"rank-{dist.get_rank()}"
    for name in ("temporary", "here"):
        (own / name).mkdir(parents=True, exist_ok=True)
    tempfile.tempdir = str(own / "temporary")
    os.chdir(own / "here")


def train(folder: Path, output: Any, run: TrainerRun, environment: dict[str, str], work: Path) -> dict[str, Any]:
    """Six steps, or what is left of them: what a Trainer logs, and what is left on this host."""
    prepare(environment, work)
    with hf_zero_stream.streaming():
        trainer, taken = trainer_of(folder, output, run)
        trainer.args.remove_unused_columns = False
        trainer.train(resume_from_checkpoint=run.resume)
        at_the_end = trainer.evaluate()["eval_loss"]
    history, best = trainer.state.log_history, trainer.state.best_model_checkpoint
    return {
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "taken": taken,
        "best": None if best is None else best.removeprefix(str(output)),
        "at the end": at_the_end,
        "left": [str(path) for path in work.joinpath(f"rank-{dist.get_rank()}").rglob("*") if path.is_file()],
    }


def names_below(url: str) -> set[str]:
    return {name for name in RemoteFolder(url).below("") if not name.endswith(LIST)}


def names_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def unsharded(names: set[str]) -> set[str]:
    """Without weights, which have other names in a bucket: shards bear an id, and an index names them."""
    return {name for name in names if ".safetensors" not in name and not name.endswith("hf_zero_stream")}


BEST = {"load_best_model_at_end": True, "save_total_limit": 2}


@pytest.mark.parametrize(
    ("url", "stage", "in_background", "arguments"),
    [
        (S3, 3, False, {"save_total_limit": 2}),
        (GS, 2, True, {"save_total_limit": 2}),
        (S3, None, True, BEST),
        (S3, 2, False, {"save_total_limit": 2}),
        (S3, None, False, {"save_total_limit": 2}),
        (S3, 3, False, BEST),
        (S3, None, False, BEST),
        (S3, 3, False, {"save_only_model": True, "save_total_limit": 1}),
        (S3, 3, True, {"save_total_limit": 2}),
        (S3, 3, True, BEST),
        (GS, 3, False, {"save_total_limit": 2}),
        (GS, None, False, BEST),
        pytest.param(AZ, 3, False, {"save_total_limit": 2}, marks=pytest.mark.slow),
        pytest.param(AZ, 2, True, {"save_total_limit": 2}, marks=pytest.mark.slow),
        pytest.param(AZ, None, False, BEST, marks=pytest.mark.slow),
        pytest.param(AZ, 3, False, {"save_only_model": True, "save_total_limit": 1}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.sample(1)
def test_a_trainer(
    cluster: None,
    zoo_checkpoint: Checkpoint,
    bucket: dict[str, str],
    tmp_path: Path,
    url: str,
    stage: int | None,
    in_background: bool,
    arguments: dict[str, Any],
) -> None:
    """Losses, the best and kept checkpoints and files are those in a folder; so are resumes, of the newest too."""
    folder, run = zoo_checkpoint("llama"), TrainerRun(zero=stage is not None, stage=stage or 3, arguments=arguments)
    environment = bucket | {"HF_ZERO_STREAM_ASYNCHRONOUS_SAVE": str(int(in_background))}
    mine = RemoteFolder(url)
    for name in ("checkpoint-1/notes.txt", "other/checkpoint-2/trainer_state.json", "checkpoint-0/trainer_state.json"):
        mine.put(name, b"of somebody else")
    at_url = run_ranks(2, train, folder, url, run, environment, tmp_path / "work", timeout=240)
    local = tmp_path / "local"
    in_folder = run_ranks(2, train, folder, local, run, bucket, tmp_path / "work", timeout=240)
    assert at_url == in_folder and at_url[0]["left"] == []
    others = {name for name in names_below(url) if mine.read(name) == b"of somebody else"}
    assert len(others) == 3, "a rotation removes what is its own"
    assert unsharded(names_below(url) - others) == unsharded(names_in(local))
    states = (mine.read("checkpoint-6/trainer_state.json"), (local / "checkpoint-6/trainer_state.json").read_bytes())
    at, to = (json.loads(state) for state in states)
    assert (at["best_model_checkpoint"] or "").replace(url, str(local)) == (to["best_model_checkpoint"] or "")
    assert (at["global_step"], at["best_global_step"]) == (to["global_step"], to["best_global_step"])
    if arguments.get("save_only_model"):
        return
    kept = sorted(path.name for path in local.glob("checkpoint-*"))
    for resume in (True, kept[0]):
        resumed = []
        for output in (url, local):
            again = replace(run, resume=resume if resume is True else f"{output}/{resume}")  # type: ignore[arg-type]
            resumed.append(run_ranks(3, train, folder, output, again, bucket, tmp_path / "work", timeout=240))
        assert resumed[0] == resumed[1]


def save_engine(folder: Path, place: Any, environment: dict[str, str], work: Path) -> list[float]:
    prepare(environment, work)
    with hf_zero_stream.streaming():
        engine = engine_of(folder, state_config(3), all_in_one_group)
        train_engine(engine, range(2))
        engine.save_checkpoint(place, client_state={"position": 7})
        engine.save_checkpoint(place, tag="named")
        return train_engine(engine, (2, 3))


def load_engine(folder: Path, place: Any, tag: Any, environment: dict[str, str], work: Path) -> Any:
    prepare(environment, work)
    with hf_zero_stream.streaming():
        engine = engine_of(folder, state_config(3), all_in_one_group)
        path, client = engine.load_checkpoint(place, tag=tag)
        return str(path).removeprefix(str(place)), client, train_engine(engine, (2, 3))


@pytest.mark.parametrize("url", EACH)
def test_an_engine(
    cluster: None, zoo_checkpoint: Checkpoint, bucket: dict[str, str], tmp_path: Path, url: str
) -> None:
    folder, work, local = zoo_checkpoint("llama"), tmp_path / "work", tmp_path / "local"
    losses = run_ranks(2, save_engine, folder, url, bucket, work)
    assert losses == run_ranks(2, save_engine, folder, local, bucket, work)
    for tag, ranks in (("global_step2", 2), ("named", 2), (None, 3)):
        found = run_ranks(ranks, load_engine, folder, url, tag, bucket, work)
        assert found == run_ranks(ranks, load_engine, folder, local, tag, bucket, work)
        assert found[0][1] == ({"position": 7} if tag == "global_step2" else {})
        if ranks == 2:
            assert [each[2] for each in found] == losses


def accelerate_steps(folder: Path, output: Any, resumes: bool, environment: dict[str, str], work: Path) -> Any:
    """Two steps, a save, and two more; or a load and these."""
    from tests.state.test_accelerate import announce, force_fsdp_on_cpu  # sets variables of accelerate

    prepare(environment, work)
    announce(cpu_ram_efficient_loading=True, state_dict_type="SHARDED_STATE_DICT")
    force_fsdp_on_cpu()
    from accelerate import Accelerator

    accelerator, losses = Accelerator(), []
    with hf_zero_stream.streaming():
        torch.manual_seed(2)
        import transformers

        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        if resumes:
            accelerator.load_state(output)
        for number in range(2 if resumes else 0, 4):
            ids = torch.randint(5, 300, (2, 9), generator=torch.Generator().manual_seed(number))
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append((loss.item(), scheduler.get_last_lr(), torch.rand(1).item() if number == 3 else 0))
            if number == 1:
                assert str(accelerator.save_state(output)) == output
    return losses


@pytest.mark.parametrize("url", EACH)
def test_accelerate(
    cluster: None, zoo_checkpoint: Checkpoint, bucket: dict[str, str], tmp_path: Path, url: str
) -> None:
    folder, work, local = zoo_checkpoint("llama"), tmp_path / "work", str(tmp_path / "local")
    for output in (url, local):
        first = run_ranks(2, accelerate_steps, folder, output, False, bucket, work)
        again = run_ranks(2, accelerate_steps, folder, output, True, bucket, work)
        assert [rank[2:] for rank in first] == again, output
    assert unsharded(names_below(url)) == unsharded(names_in(Path(local)))


def save_as_stock(folder: Path, url: str, environment: dict[str, str], work: Path) -> None:
    prepare(environment, work)
    with hf_zero_stream.streaming(StreamingConfig(training_state=False)):
        engine_of(folder, state_config(3), all_in_one_group).save_checkpoint(url)


@pytest.mark.parametrize("url", [S3])
def test_stock_saves_to_no_url(
    cluster: None, zoo_checkpoint: Checkpoint, bucket: dict[str, str], tmp_path: Path, url: str
) -> None:
    outcomes = run_ranks_expecting_errors(2, save_as_stock, zoo_checkpoint("llama"), url, bucket, tmp_path / "work")
    assert [outcome.error_type for outcome in outcomes] == [UrlError.__name__] * 2
    assert all("save_checkpoint, with training_state=False" in str(outcome.error_message) for outcome in outcomes)
    assert names_below(url) == set()
