"""Tracebacks that users see: without our frames, and of an error that another rank has had one line."""

import logging
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import transformers

import hf_zero_stream
from hf_zero_stream.bindings import install
from hf_zero_stream.errors import PACKAGE, HfZeroStreamError, PeerError
from hf_zero_stream.ranks.store import Verdict


def files() -> list[str]:
    """Those in the traceback of an error that leaves a block, the last is where it was raised."""
    with pytest.raises(OSError) as caught, hf_zero_stream.streaming():
        transformers.AutoModelForCausalLM.from_pretrained("/absent/folder")
    return [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)]


def test_frames_of_ours_are_cut() -> None:
    """The script's stay, and those of transformers; at level DEBUG all do."""
    found = files()
    assert found[0] == __file__ and "/transformers/" in found[-1]
    assert not [each for each in found if f"/{PACKAGE}/" in each]
    logging.getLogger(PACKAGE).setLevel(logging.DEBUG)
    try:
        assert len([each for each in files() if f"/{PACKAGE}/" in each]) > 2
    finally:
        logging.getLogger(PACKAGE).setLevel(logging.NOTSET)


@pytest.mark.parametrize("name", ["load_into", "load_state", "save_pretrained", "save_state"])
def test_nor_have_those_of_functions_that_scripts_call(name: str, tmp_path: Path) -> None:
    with pytest.raises(HfZeroStreamError) as caught:
        getattr(hf_zero_stream, name)(torch.nn.Linear(1, 1), str(tmp_path / "absent"))
    assert [frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)] == [__file__]


@contextmanager
def through_contextlib() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise Verdict.of_failure(3, error).error() from error


def test_an_error_of_another_rank_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shown by what was there to show errors; where ranks wait for each other, each shows where."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with pytest.raises(PeerError) as caught, hf_zero_stream.streaming(), through_contextlib():
        raise ValueError("no weights")
    sys.excepthook(PeerError, caught.value, caught.value.__traceback__)
    line = "hf_zero_stream.errors.PeerError: rank 3 failed, so this rank gives up too: ValueError: no weights\n"
    assert capsys.readouterr().err == line
    for error in (KeyError("of the script's"), Verdict(-1, True, "PeerError", "all wait").error()):
        with pytest.raises(type(error)), hf_zero_stream.streaming():
            raise error
        sys.excepthook(type(error), error, error.__traceback__)
        assert "Traceback" in (shown := capsys.readouterr().err) and "raise error" in shown and str(error) in shown
    assert sys.excepthook.func is install._show and sys.excepthook.args == (sys.__excepthook__,)  # type: ignore[attr-defined]
