"""Our log has a level of its own between INFO and WARNING, which all usual switches reach; reports go to a file."""

import json
import logging

import pytest

from hf_zero_stream.errors import ConfigError
from hf_zero_stream.reports import closing
from hf_zero_stream.settings import log
from hf_zero_stream.settings.config import REPORT_VARIABLE, StreamingConfig, unknown_variables, values_in


@pytest.fixture(autouse=True)
def as_it_comes(monkeypatch):
    """Starts with loggers as a new process has them; puts back what there was."""
    loggers = [logging.getLogger(name) for name in ("hf_zero_stream", "transformers", "")]
    before = [(logger.level, list(logger.handlers)) for logger in loggers]
    monkeypatch.setattr(log, "_own_level", logging.NOTSET)
    monkeypatch.delenv(log.LOG_VARIABLE, raising=False)
    for logger, level in zip(loggers, (logging.NOTSET, logging.WARNING, logging.WARNING), strict=True):
        logger.setLevel(level)
    loggers[0].handlers = []
    yield dict(zip(("ours", "transformers", "root"), loggers, strict=True))
    for logger, (level, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.handlers = handlers


def shown(capsys, *handlers) -> list[str]:
    """The levels whose lines come to stderr, each once, and nothing to stdout; with these `handlers` of the root."""
    logging.getLogger().handlers = [*handlers]  # pytest has some
    log.follow_levels()
    for level in (logging.DEBUG, logging.INFO, log.NOTICE, logging.WARNING, logging.ERROR):
        logging.getLogger("hf_zero_stream.saving.save").log(level, logging.getLevelName(level))
    found = capsys.readouterr()
    assert found.out == ""
    return found.err.splitlines()


ALL = [f"hf_zero_stream: {level}" for level in ("DEBUG", "INFO", "NOTICE", "WARNING", "ERROR")]


@pytest.mark.parametrize(
    ("variable", "transformers", "root", "first"),
    [
        (None, logging.WARNING, logging.WARNING, 2),
        ("info", logging.WARNING, logging.WARNING, 1),
        ("Warning", logging.INFO, logging.WARNING, 3),
        (None, logging.NOTSET, logging.WARNING, 2),
        (None, logging.INFO, logging.WARNING, 1),
        (None, logging.DEBUG, logging.ERROR, 0),
        (None, logging.ERROR, logging.WARNING, 4),
        (None, logging.CRITICAL, logging.INFO, 5),
        (None, logging.WARNING, logging.INFO, 1),
        (None, logging.WARNING, logging.ERROR, 4),
    ],
)
def test_levels(capsys, monkeypatch, as_it_comes, variable, transformers, root, first):
    if variable:
        monkeypatch.setenv(log.LOG_VARIABLE, variable)
    as_it_comes["transformers"].setLevel(transformers)
    as_it_comes["root"].setLevel(root)
    assert shown(capsys) == ALL[first:]
    as_it_comes["transformers"].setLevel(logging.ERROR)  # a later load sees what has changed
    assert variable or shown(capsys) == ALL[4:]


def test_the_application_decides(capsys, as_it_comes):
    as_it_comes["ours"].setLevel(logging.ERROR)
    assert shown(capsys) == ALL[4:]
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    for at_root in (True, False):
        as_it_comes["ours"].setLevel(logging.NOTSET)
        if not at_root:
            as_it_comes["ours"].addHandler(handler)
        assert shown(capsys, *[handler] * at_root) == []
        assert [record.levelname for record in records] == ["NOTICE", "WARNING", "ERROR"]
        records.clear()


def test_a_level_that_there_is_not(monkeypatch):
    for environ in ({log.LOG_VARIABLE: "loud"}, {log.LOG_VARIABLE: ""}):
        with pytest.raises(ConfigError, match="HF_ZERO_STREAM_LOG: expected one of debug, info, notice, .* got"):
            values_in(environ)
    monkeypatch.setenv(log.LOG_VARIABLE, "loud")
    with pytest.raises(ConfigError, match="got 'loud'"):
        StreamingConfig.resolve(StreamingConfig())  # code's own settings say nothing of the log
    assert unknown_variables({log.LOG_VARIABLE: "info", REPORT_VARIABLE: "x", "HF_ZERO_STREAM_REPRT": ""}) == {
        "HF_ZERO_STREAM_REPRT": REPORT_VARIABLE
    }


def test_reports_are_added_to_a_file(capsys, monkeypatch, tmp_path):
    assert shown(capsys)
    monkeypatch.setenv(REPORT_VARIABLE, str(tmp_path / "reports"))
    for number in range(2):
        closing.tell("load", "done", lambda number=number: {"bytes": number})
    with closing.resuming() as figures:
        closing.note_read(7)
        closing.tell("load", "a part of a resume", dict)
    assert figures.bytes_read == 7 and figures.seconds > 0
    found = [json.loads(line) for line in (tmp_path / "reports").read_text().splitlines()]
    assert [(each["kind"], each["bytes"]) for each in found] == [("load", 0), ("load", 1)]
    assert all(each["process"] and each["host"] and each["time"] for each in found)
    assert capsys.readouterr().err == "hf_zero_stream: done\n" * 2
    monkeypatch.setenv(REPORT_VARIABLE, str(tmp_path / "absent" / "reports"))
    closing.tell("load", "done", dict)
    assert "absent/reports: cannot be written: No such file" in capsys.readouterr().err
