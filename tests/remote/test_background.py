"""States that go to a bucket in the background: those of the call, whatever the training does meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hf_zero_stream
from hf_zero_stream.errors import PlaceTakenError, SaveError
from hf_zero_stream.plugins.remote.objects import StreamedObject
from tests.remote import test_two_writers as two_writers
from tests.remote.test_saves import found_in
from tests.remote.test_states import URL, resume_engine, resume_plain_at
from tests.remote.test_states import bucket as bucket
from tests.state.test_refused import message_of
from tests.support.cluster import ROOT, run_ranks
from tests.support.training_state import (
    all_in_one_group,
    engine_of,
    plain_training,
    state_config,
    train,
    train_plain,
)
from tests.support.zoo import Checkpoint


@contextmanager
def held_uploads() -> Iterator[threading.Event]:
    """Inside, nothing is sent until the event is set."""
    original, goes_on = StreamedObject.write, threading.Event()

    def write(self: StreamedObject, data: memoryview) -> None:
        goes_on.wait()
        original(self, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StreamedObject, "write", write)
        try:
            yield goes_on
        finally:
            goes_on.set()


def save_engine(folder: Path, local: Path, environment: dict[str, str], stage: int) -> Any:
    """The losses of steps that are made before anything is sent; what each rank did."""
    os.environ.update(environment)
    engine = engine_of(folder, state_config(stage), all_in_one_group)
    train(engine, range(3))
    hf_zero_stream.save_state(engine, local, data={"position": 7}, max_shard_size="20KB")
    with held_uploads() as goes_on, hf_zero_stream.streaming(verify="full"):
        pending = hf_zero_stream.save_state(
            engine, URL, data={"position": 7}, max_shard_size="20KB", asynchronous=True
        )
        losses = train(engine, (3, 4))
        assert not pending.done
        goes_on.set()
        report = pending.wait()
    return losses, report.asynchronous, [(rank.bytes_written, rank.bytes_copied) for rank in report.ranks]


@pytest.mark.plugin("verify")
@pytest.mark.parametrize(("stage", "later"), [(3, (3, 1)), pytest.param(2, (3, 2), marks=pytest.mark.slow)])
def test_an_engine(
    cluster: None,
    zoo_checkpoint: Checkpoint,
    bucket: dict[str, str],
    tmp_path: Path,
    stage: int,
    later: tuple[int, int],
) -> None:
    checkpoint, local = zoo_checkpoint("llama"), tmp_path / "local"
    for losses, is_asynchronous, of_ranks in run_ranks(2, save_engine, checkpoint, local, bucket, stage):
        assert is_asynchronous and all(copied > written > 0 for written, copied in of_ranks)
    next_stage, world_size = later
    from_url = run_ranks(world_size, resume_engine, checkpoint, URL, bucket, next_stage)
    assert from_url == run_ranks(world_size, resume_engine, checkpoint, local, bucket, next_stage)
    assert from_url[0] == pytest.approx(losses, rel=1e-2)


def save_plain(folder: Path, environment: dict[str, str]) -> Any:
    """A state, one that cannot be sent by rank 1, and the losses after the first; the messages of errors."""
    os.environ.update(environment)
    model, optimizer, scheduler = training = plain_training(folder, {"fsdp_size": 2})
    how = {"optimizer": optimizer, "scheduler": scheduler, "asynchronous": True}
    train_plain(*training, range(3))
    hf_zero_stream.save_state(model, URL, data={"position": 7}, **how)
    losses = train_plain(*training, (3, 4))
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:

            def finish(self: StreamedObject) -> None:
                raise SaveError("the store has gone away")

            patch.setattr(StreamedObject, "finish", finish)
        pending = hf_zero_stream.save_state(model, URL, **how)
        train_plain(*training, (5,))
        failed = message_of(pending.wait)
    return losses, failed


def test_what_fails_leaves_the_older_state(cluster: None, zoo_checkpoint: Checkpoint, bucket: dict[str, str]) -> None:
    checkpoint = zoo_checkpoint("llama")
    found = run_ranks(2, save_plain, checkpoint, bucket)
    losses = found[0][0]
    for _, failed in found:
        assert "the store has gone away" in failed and "SaveError" in failed
    assert {name.partition("/")[0] for name in found_in(URL) if "/" in name} == {"global_step3"}
    for world_size, sizes in ((1, None), (2, {"fsdp_size": 2})):
        assert run_ranks(world_size, resume_plain_at, checkpoint, URL, bucket, sizes)[0] == pytest.approx(
            losses, rel=1e-5
        )


def test_one_process(zoo_checkpoint: Checkpoint, bucket: dict[str, str], tmp_path: Path) -> None:
    model, optimizer, scheduler = training = plain_training(zoo_checkpoint("llama"), None)
    train_plain(*training, range(2))
    how = {"optimizer": optimizer, "scheduler": scheduler}
    hf_zero_stream.save_state(model, tmp_path, **how)
    with held_uploads() as goes_on:
        pending = hf_zero_stream.save_state(model, URL, asynchronous=True, **how)
        losses = train_plain(*training, range(2, 4))
        goes_on.set()
        pending.wait()
    for place in (URL, tmp_path):
        model, optimizer, scheduler = again = plain_training(zoo_checkpoint("llama"), None)
        hf_zero_stream.load_state(model, place, optimizer=optimizer, scheduler=scheduler)
        assert train_plain(*again, range(2, 4)) == losses


def test_the_save_that_began_later_stays(bucket: dict[str, str]) -> None:
    """It is another process's, and comes to its end while nothing of the older one has been sent."""
    trained = two_writers.model(1.0)
    optimizer = torch.optim.AdamW(trained.parameters())
    with held_uploads() as goes_on:
        pending = hf_zero_stream.save_state(trained, URL, optimizer=optimizer, tag="t", asynchronous=True)
        code = "from tests.remote.test_two_writers import save_training; save_training(2.0)"
        subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=os.environ | bucket)
        goes_on.set()
        with pytest.raises(PlaceTakenError):
            pending.wait()
    assert two_writers.loaded_training(1) == {2.0}
    shards = {name for name in found_in(URL) if name.endswith(".safetensors")}
    assert len({name.rpartition("/")[2].split("-")[1] for name in shards if name.count("-") > 1}) == 1, shards
