"""There is one bar per node, or one in a log file, in bytes, and every usual switch silences it."""

import sys
import threading

import huggingface_hub.utils
import pytest
import torch.distributed as dist
import transformers
from transformers.utils import logging

from hf_zero_stream import streaming
from hf_zero_stream.reports import measures
from hf_zero_stream.reports.measures import progress_bar


@pytest.fixture(autouse=True)
def bars_on(monkeypatch):
    """Starts each test with bars that all libraries allow, and puts their switches back after it."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    # The library reads the variable once, at import; under the module's name in its package there is a class.
    monkeypatch.setattr(sys.modules["huggingface_hub.utils.tqdm"], "HF_HUB_DISABLE_PROGRESS_BARS", None)
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_warning()
    logging.enable_progress_bar()
    yield
    logging.set_verbosity(verbosity)
    logging.enable_progress_bar() if bars else logging.disable_progress_bar()


def shown(capsys, enabled=True):
    with progress_bar(3 * 2**20, "Streaming", enabled, 3 * 2**20) as advance:
        advance(2**20)
        advance(2**21)
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_bar_counts_bytes(capsys):
    text = shown(capsys)
    assert text.rstrip().splitlines()[-1].split("\r")[-1].startswith("Streaming: 100%")
    assert "3.00M/3.00M" in text
    assert "B/s" in text


def test_bar_counts_bytes_of_all_ranks(capsys):
    with progress_bar(3 * 2**20, "Streaming", True, 2**30) as advance:
        for _ in range(3):
            advance(2**20)
    assert "1.00G/1.00G" in capsys.readouterr().err


def test_there_is_no_bar_of_nothing(capsys):
    with progress_bar(0, "Streaming", True, 2**30) as advance:
        advance(0)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("disable_tqdm", [True, False])
def test_follows_the_arguments_of_a_trainer(capsys, monkeypatch, tmp_path, disable_tqdm):
    monkeypatch.setattr(measures, "_trainer_is_quiet", False)
    with streaming():
        transformers.TrainingArguments(output_dir=str(tmp_path), disable_tqdm=disable_tqdm, use_cpu=True, report_to=[])
    assert bool(shown(capsys)) is not disable_tqdm


def test_a_log_file_gets_whole_lines_and_few(capsys):
    with progress_bar(1000, "Streaming", True, 1000) as advance:
        for _ in range(1000):
            advance(1)
    text = capsys.readouterr().err
    assert "\r" not in text and text.isascii()
    first, last = text.splitlines()
    assert first.startswith("Streaming:   0%") and last.startswith("Streaming: 100%")
    assert max(map(len, (first, last))) <= 80 and text.endswith("\n")


@pytest.mark.parametrize(("local_rank", "visible"), [("0", True), ("1", False), ("7", False)])
def test_only_on_the_local_main_process(capsys, monkeypatch, local_rank, visible):
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert bool(shown(capsys)) is visible


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize(("rank", "node_shows"), [(0, (True, True)), (8, (True, False))])
def test_nodes_share_one_bar_in_a_log_file(capsys, monkeypatch, rank, node_shows, is_terminal):
    """Rank 8 is the local main process of the second node."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    in_terminal, in_log = node_shows
    assert bool(shown(capsys)) is (in_terminal if is_terminal else in_log)


def test_silent_if_not_enabled(capsys):
    assert shown(capsys, enabled=False) == ""


def test_silent_if_hub_bars_are_disabled(capsys):
    huggingface_hub.utils.disable_progress_bars()
    try:
        assert shown(capsys) == ""
    finally:
        huggingface_hub.utils.enable_progress_bars()


def test_silent_if_transformers_bars_are_disabled(capsys):
    logging.disable_progress_bar()
    assert shown(capsys) == ""


def test_silent_if_the_hub_variable_is_set(capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["huggingface_hub.utils.tqdm"], "HF_HUB_DISABLE_PROGRESS_BARS", True)
        assert shown(capsys) == ""


@pytest.mark.parametrize(("verbosity", "visible"), [(logging.INFO, True), (logging.ERROR, False)])
def test_follows_transformers_verbosity(capsys, verbosity, visible):
    logging.set_verbosity(verbosity)
    assert bool(shown(capsys)) is visible


def test_update_from_many_threads_loses_nothing(capsys):
    with progress_bar(8 * 500, "Streaming", True, 8 * 500) as advance:
        threads = [threading.Thread(target=lambda: [advance(1) for _ in range(500)]) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert "3.91k/3.91k" in capsys.readouterr().err


def test_bar_is_closed_after_an_error(capsys):
    with pytest.raises(OSError):
        with progress_bar(100, "Streaming", True, 100) as advance:
            advance(10)
            raise OSError("disk")
    assert capsys.readouterr().err.endswith("\n")
