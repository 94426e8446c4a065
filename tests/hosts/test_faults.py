"""The disk of a host fails at each call of a save or a load: an error of ours, and the older state stays."""

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import hf_zero_stream
from hf_zero_stream.errors import CheckpointError, ReadError, SaveError
from tests.support.training_state import plain_training
from tests.support.zoo import Checkpoint


def fails_at(patch: pytest.MonkeyPatch, call: str, number: int, inside: Path) -> Callable[[], int]:
    """Have the n-th call of this name that is about something `inside` a folder fail; returns what counts them."""
    original, calls = getattr(os, call), 0

    def failing(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if not isinstance(path, int) and os.fspath(path).startswith(str(inside)):
            calls += 1
            if calls == number:
                raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        return original(path, *args, **kwargs)

    patch.setattr(os, call, failing)
    return lambda: calls


@pytest.mark.parametrize("call", ["mkdir", "scandir", "rename", "open", "unlink", "lstat"])
def test_each_call(zoo_checkpoint: Checkpoint, tmp_path: Path, call: str) -> None:
    model, optimizer, _ = plain_training(zoo_checkpoint("llama"), None)
    number, failed = 0, 0
    while True:
        number += 1
        states = hf_zero_stream.HostStates(tmp_path / str(number), copies=0, job="mine")
        states.save(model, optimizer=optimizer, data="older")
        with pytest.MonkeyPatch.context() as patch:
            count = fails_at(patch, call, number, tmp_path / str(number))
            with suppress(SaveError):
                states.save(model, optimizer=optimizer, data="newer")
            in_save = count()
            if in_save < number:
                with suppress(SaveError, ReadError, CheckpointError):
                    states.load(model, optimizer=optimizer)
            all_calls = count()
        failed += all_calls >= number
        resumed = states.load(model, optimizer=optimizer)
        assert resumed is not None and resumed.data in ("older", "newer")
        if all_calls < number:
            break
    assert failed > 0
