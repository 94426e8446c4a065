"""What a save in the background leaves behind: its error, a mark, nothing in memory or in forked processes."""

from __future__ import annotations

import errno
import gc
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import hf_zero_stream
from hf_zero_stream import StreamingConfig
from hf_zero_stream.errors import SaveError
from hf_zero_stream.saving import pending
from hf_zero_stream.saving.publication import is_unfinished
from hf_zero_stream.state import callers
from tests.support.commands import command_environment
from tests.support.forks import Forks
from tests.support.messages import listen


def training() -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.Linear(48, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: Any) -> None:
    model(torch.ones(2, 64)).square().sum().backward()
    optimizer.step()


@contextmanager
def full_disk() -> Iterator[None]:
    """Inside, threads beside the main one cannot write; afterwards none is under way."""
    original = os.pwritev

    def pwritev(*args: Any) -> int:
        if threading.current_thread() is threading.main_thread():
            return original(*args)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    os.pwritev = pwritev  # type: ignore[assignment]
    try:
        yield
        pending.finish_pending(raises=False)
    finally:
        os.pwritev = original


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_error_stops_no_save_to_another_place(tmp_path: Path, asynchronous: bool) -> None:
    """It is said; where nobody knows yet whether the new save succeeds, it is raised, too, once that has begun."""
    model, optimizer = training()
    said = listen()
    with full_disk():
        hf_zero_stream.save_state(model, tmp_path / "full", optimizer=optimizer, asynchronous=True)
    where = {"folder": tmp_path / "other", "optimizer": optimizer, "asynchronous": asynchronous}
    if asynchronous:
        with pytest.raises(SaveError, match="No space left"):
            hf_zero_stream.save_state(model, **where)
    else:
        assert hf_zero_stream.save_state(model, **where).bytes_written
    pending.finish_pending()
    assert (tmp_path / "other" / "latest").exists() and not (tmp_path / "full" / "latest").exists()
    assert len(said) == 2 and all(f"{tmp_path / 'full'}: " in each and "No space left" in each for each in said)
    hf_zero_stream.save_state(model, tmp_path / "full", optimizer=optimizer)  # it was said, and is not said again


def test_an_error_at_the_same_place_and_before_a_load(tmp_path: Path) -> None:
    model, optimizer = training()
    hf_zero_stream.save_state(model, tmp_path / "whole", optimizer=optimizer)
    for call in (
        lambda: hf_zero_stream.save_state(model, tmp_path / "full", optimizer=optimizer),
        lambda: hf_zero_stream.load_state(model, tmp_path / "whole", optimizer=optimizer),
    ):
        with full_disk():
            hf_zero_stream.save_state(model, tmp_path / "full", optimizer=optimizer, asynchronous=True)
        with pytest.raises(SaveError, match="No space left"):
            call()
        call()


@pytest.mark.parametrize("fails", [True, False])
def test_a_failed_save_leaves_a_mark(tmp_path: Path, fails: bool) -> None:
    """For a caller that writes beside it, where it would look whole; until the next save there."""
    model, optimizer = training()

    def save() -> None:
        with hf_zero_stream.streaming(StreamingConfig(asynchronous_save=True)):
            callers.save(model, tmp_path, pytest.fail, optimizer=optimizer)

    with full_disk() if fails else nullcontext():
        save()
        (tmp_path / "beside").touch()
        pending.finish_pending(raises=False)
    assert is_unfinished(tmp_path) == fails == (not list(tmp_path.rglob("*.safetensors")))
    with pytest.raises(SaveError) if fails else nullcontext():
        pending.finish_pending()
    save()
    pending.finish_pending()
    assert not is_unfinished(tmp_path) and (tmp_path / "latest").exists()


@pytest.mark.parametrize("room", [None, "all"])
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_stays_alive(tmp_path: Path, room: Literal["all"] | None, fails: bool) -> None:
    model, optimizer = training()
    how = {"optimizer": optimizer, "asynchronous": True, "snapshot_bytes": room}
    with full_disk() if fails else nullcontext():
        saved = hf_zero_stream.save_state(model, tmp_path, **how)
    pending.finish_pending(raises=False)
    moment = optimizer.state[model[0].weight]["exp_avg"]  # type: ignore[index]
    alive = [weakref.ref(each) for each in (model, model[0].weight, moment)]  # type: ignore[index]
    del model, optimizer, moment, how
    gc.collect()
    assert [each() is not None for each in alive] == [False] * 3
    assert saved.done
    with pytest.raises(SaveError, match="No space left") if fails else nullcontext():
        saved.wait()


FORKING = """
import os
import sys
from pathlib import Path

import torch

import hf_zero_stream
from hf_zero_stream.errors import SaveError
from tests.support.held_writer import held_writer

folder = Path(sys.argv[-1])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 48), torch.nn.Linear(48, 8))
optimizer = torch.optim.AdamW(model.parameters())


def step():
    model(torch.ones(2, 64)).square().sum().backward()
    optimizer.step()


step()
hf_zero_stream.save_state(model, folder / "waited", optimizer=optimizer, tag="it")
with held_writer() as writer:
    writer.hold_at(0)
    saved = hf_zero_stream.save_state(model, folder / "saved", optimizer=optimizer, tag="it", asynchronous=True)
    assert writer.wait_until_held()
    child = os.fork()
    if not child:
        assert not saved.done
        try:
            saved.wait()
        except SaveError as error:
            print(error, flush=True)
        step()  # waits for no thread
        saved.take_values()
        hf_zero_stream.save_state(model, folder / "of child", optimizer=optimizer)
        os._exit(0)
    print(child, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    writer.let_go()
    saved.wait()
for path in (folder / "waited").rglob("*.safetensors"):
    if path.name != "rng.safetensors":
        assert path.read_bytes() == (folder / "saved" / path.relative_to(folder / "waited")).read_bytes()
"""


def test_a_forked_process(tmp_path: Path) -> None:
    """It has not the thread that saves, and waits neither for it nor for its values."""
    root = Path(__file__).parents[2]
    with Forks("import torch, transformers.modeling_utils", environment=command_environment()) as forks:
        printed = forks.start(FORKING, str(tmp_path), PYTHONPATH=str(root)).printed()
    said, ended = printed.splitlines()[-2:]
    assert "was forked without the thread that writes" in said and str(tmp_path / "saved") in said
    assert ended.split()[1] == "0"
    assert (tmp_path / "of child" / "latest").read_text() == "global_step2"
