"""Training states in buckets: saved there, and gone on from at another number of ranks, as from a folder."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import hf_zero_stream
from hf_zero_stream.plugins.remote import objects
from tests.remote.test_saves import found_in
from tests.support.buckets import BUCKET, s3_bucket, s3_client
from tests.support.cluster import run_ranks, run_ranks_expecting_errors
from tests.support.training_state import (
    all_in_one_group,
    engine_of,
    plain_training,
    resume,
    resume_plain,
    state_config,
    train,
    train_plain,
)


Checkpoint = Callable[..., Path]
URL = f"s3://{BUCKET}/run"
NAME = "llama"


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """An empty bucket; also this process can read from it."""
    (tmp_path / "nothing").mkdir()
    with s3_bucket(tmp_path / "nothing") as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        objects._store.cache_clear()
        yield environment
    objects._store.cache_clear()


def save_engine(folder: Path, local: Path, environment: dict[str, str], stage: int) -> list[float]:
    """Into a folder, to a URL, and once more there under the same name; the losses of two steps after that."""
    os.environ.update(environment)
    engine = engine_of(folder, state_config(stage), all_in_one_group)
    train(engine, range(3))
    for place in (local, URL, URL):
        hf_zero_stream.save_state(engine, place, data={"position": 7}, max_shard_size="20KB")
        if place == URL and dist.get_rank() == 0:
            found_in(URL)  # looks whether the save is done
    return train(engine, (3, 4))


def resume_engine(folder: Path, source: Any, environment: dict[str, str], stage: int) -> list[float]:
    os.environ.update(environment)
    return resume(folder, source, state_config(stage), all_in_one_group, "ours")


@pytest.mark.parametrize(("stage", "later"), [(3, (3, 1)), (2, (3, 2))])
def test_an_engine(
    cluster: None,
    zoo_checkpoint: Checkpoint,
    bucket: dict[str, str],
    tmp_path: Path,
    stage: int,
    later: tuple[int, int],
) -> None:
    checkpoint = zoo_checkpoint(NAME)
    losses = run_ranks(2, save_engine, checkpoint, tmp_path / "local", bucket, stage)
    next_stage, world_size = later
    from_url = run_ranks(world_size, resume_engine, checkpoint, URL, bucket, next_stage)
    from_folder = run_ranks(world_size, resume_engine, checkpoint, tmp_path / "local", bucket, next_stage)
    assert from_url == from_folder
    assert from_url[0] == pytest.approx(losses[0], rel=1e-2)


def save_plain(folder: Path, url: str, environment: dict[str, str], sizes: dict[str, Any] | None) -> list[float]:
    os.environ.update(environment)
    model, optimizer, scheduler = training = plain_training(folder, sizes)
    train_plain(*training, range(3))
    hf_zero_stream.save_state(model, url, optimizer=optimizer, scheduler=scheduler, data={"position": 7})
    return train_plain(*training, (3, 4))


def resume_plain_at(folder: Path, url: str, environment: dict[str, str], sizes: dict[str, Any] | None) -> list[float]:
    os.environ.update(environment)
    return resume_plain(folder, url, sizes)  # type: ignore[arg-type]


def test_fsdp2_and_one_process(
    cluster: None, zoo_checkpoint: Checkpoint, bucket: dict[str, str], tmp_path: Path
) -> None:
    checkpoint = zoo_checkpoint(NAME)
    losses = run_ranks(2, save_plain, checkpoint, URL, bucket, {"fsdp_size": 2})
    for world_size, sizes in ((1, None), (2, {"fsdp_size": 2})):
        found = run_ranks(world_size, resume_plain_at, checkpoint, URL, bucket, sizes)
        assert found[0] == pytest.approx(losses[0], rel=1e-5)


def save_each_step(
    folder: Path, environment: dict[str, str], steps: int, dies_at: int | None, keep: bool, url: str = URL
) -> int:
    """Save after each step; rank 0 dies at request number `dies_at` of those that write, of the last of them."""
    os.environ.update(environment)
    engine = engine_of(folder, state_config(3), all_in_one_group)
    count = 0
    for step in range(steps):
        train(engine, [step])
        if step == steps - 1 and dist.get_rank() == 0:
            for name in ("put", "remove"):
                original = getattr(objects.RemoteFolder, name)

                def counted(self: Any, *args: Any, original: Any = original, **kwargs: Any) -> Any:
                    nonlocal count
                    if count == dies_at:
                        os.kill(os.getpid(), signal.SIGKILL)
                    count += 1
                    return original(self, *args, **kwargs)

                setattr(objects.RemoteFolder, name, counted)
        hf_zero_stream.save_state(engine, url, keep_older=keep, tag=None if keep else "last")
    return count


def resumed_step(folder: Path, environment: dict[str, str], saves_too: bool) -> int:
    os.environ.update(environment)
    engine = engine_of(folder, state_config(3), all_in_one_group)
    hf_zero_stream.load_state(engine, URL)
    step = int(engine.global_steps)
    if saves_too:
        train(engine, [step])
        hf_zero_stream.save_state(engine, URL)
    return step


@pytest.mark.plugin("watch")
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("at", [0, 1, 2, 5, -1])
def test_a_save_that_is_killed(
    cluster: None, zoo_checkpoint: Checkpoint, bucket: dict[str, str], at: int, keep: bool
) -> None:
    """By the number of a request that writes: the list, the list of all, the small files, and what is removed."""
    checkpoint = zoo_checkpoint(NAME)
    if at < 0:
        count, _ = run_ranks(2, save_each_step, checkpoint, bucket, 2, None, keep, f"{URL}-counted")
        at = count - 1
        assert at > 5
    outcomes = run_ranks_expecting_errors(2, save_each_step, checkpoint, bucket, 2, at, keep)
    assert outcomes[0].error_type == "Died", outcomes[0]
    assert outcomes[1].error_type == "PeerError" and outcomes[1].seconds < 30
    step = 1 if at <= 1 else 2
    assert run_ranks(1, resumed_step, checkpoint, bucket, True) == [step]
    assert run_ranks(1, resumed_step, checkpoint, bucket, False) == [step + 1]
    found_in(URL)  # looks whether the save is done
    assert not s3_client(bucket).list_multipart_uploads(Bucket=BUCKET).get("Uploads")
