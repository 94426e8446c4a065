"""The command line: its frame and `inspect`. Exit codes: 0 ok, 1 the check failed, 2 wrong usage."""

import importlib
import itertools
import json
import logging
import os
import pty
import random
import re
import shutil
import subprocess
import sys
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import deepspeed  # noqa: F401 - first, because its logger keeps the stdout that it finds when it is imported
import pytest
import typer.main

from hf_zero_stream.cli import OF_PLUGINS, app, commands, frame
from hf_zero_stream.reports.text import fold, folded_names
from tests.support.cli import USAGE, run, unfolded
from tests.support.commands import command_environment
from tests.support.parity import ds_config


NAMES = list(commands())


# --------------------------------------------------------------------------------------------------- the frame


@pytest.mark.parametrize("name", NAMES)
def test_help_has_an_example(name: str) -> None:
    text = re.sub(r"\s+", " ", run(name, "--help").stdout)
    assert f"Example: hf-zero-stream {name} " in text and ("--format" in text or name == "run")


@pytest.mark.parametrize("name", NAMES)
def test_examples_are_understood(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(ds_config()))
    monkeypatch.chdir(tmp_path)
    program, command_name, *arguments = importlib.import_module(commands()[name], "hf_zero_stream").EXAMPLE.split()
    assert (program, command_name) == ("hf-zero-stream", name)
    group: Any = typer.main.get_command(app)
    command = group.get_command(None, name)
    assert command.make_context(name, arguments).params


@pytest.mark.plugin("forecast", "tools")
@pytest.mark.parametrize("arguments", [("plan", "--world-size", "2", "--device", "cpu"), ("inspect",)])
def test_lines_fit_the_terminal(arguments: tuple[str, ...], tiny_moe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables and sentences; a pipe gets them whole."""
    name, *options = arguments
    monkeypatch.chdir(Path(tiny_moe).parent)
    whole = run(name, "tiny-moe", *options).stdout
    monkeypatch.setattr(frame, "_terminal_width", lambda: 80)
    folded = run(name, "tiny-moe", *options).stdout
    assert max(map(len, whole.splitlines())) > 80 >= max(map(len, folded.splitlines()))
    if name == "plan":
        rows, as_folded = ([line for line in text.splitlines() if line[:1] == "|"] for text in (whole, folded))
        assert rows == as_folded, "no cell needs a second line"


@pytest.mark.plugin("tools")
@pytest.mark.parametrize("no_color", [False, True])
def test_a_terminal_has_colours(tiny_moe: str, no_color: bool) -> None:
    environment = command_environment() | {"TERM": "xterm"} | ({"NO_COLOR": "1"} if no_color else {})
    ours, theirs = pty.openpty()
    for path, code, text, colour in ((tiny_moe, 0, "No fault found", 32), ("./nowhere", 1, "ReadError", 31)):
        done = subprocess.run(["hf-zero-stream", "verify", path], env=environment, stdout=theirs, stderr=theirs)
        shown = os.read(ours, 100_000).decode()
        assert done.returncode == code and (f"\x1b[{colour}m{text}\x1b[0m" in shown) is not no_color, shown
        assert ("\x1b" in shown) is not no_color and text in shown


def test_what_libraries_say_stays_out(caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder) -> None:
    with frame.quiet():
        logging.getLogger("bitsandbytes.backends.cpu.ops").warning("Failed to load CPU gemm_4bit_forward")
        warnings.warn_explicit("pattern", RuntimeWarning, "tuners_utils.py", 1, module="peft.tuners.tuners_utils")
    assert not caplog.records and not recwarn.list


@pytest.mark.plugin("forecast")
def test_a_size_needs_a_unit() -> None:
    """80 would be 80 bytes, and is meant as gigabytes."""
    result = run("plan", "x", "--world-size", "2", "--device-memory", "80", code=USAGE)
    assert re.search(r'--device-memory.*expected a size such as "80GiB"', result.output, re.DOTALL)


@pytest.mark.plugin("tools")
def test_completion_is_installed(tmp_path: Path) -> None:
    environment = command_environment() | {"HOME": str(tmp_path), "SHELL": "/bin/bash"}
    environment["_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"] = "1"  # there is no shell around this process
    subprocess.run(["hf-zero-stream", "--install-completion", "bash"], env=environment, check=True, timeout=60)
    assert (tmp_path / ".bash_completions" / "hf-zero-stream.sh").exists()
    asked = environment | {"_HF_ZERO_STREAM_COMPLETE": "complete_bash", "COMP_CWORD": "1"}
    asked["COMP_WORDS"] = "hf-zero-stream do"
    found = subprocess.run(["hf-zero-stream"], env=asked, capture_output=True, text=True, timeout=60)
    assert found.stdout.split() == ["doctor"]


def test_help_imports_no_torch() -> None:
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom hf_zero_stream.cli import app\n"
        f"for name in {NAMES}:\n    assert CliRunner().invoke(app, [name, '--help']).exit_code == 0\n"
        "assert not {'torch', 'transformers', 'deepspeed', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


LIGHT = """\
import sys
from typer.testing import CliRunner
from hf_zero_stream.cli import app
for path in ("/nowhere", "./nowhere"):
    assert CliRunner().invoke(app, ["plan", path, "--world-size", "2"]).exit_code == 1 and "torch" not in sys.modules
for arguments in (["--version"], ["inspect", PATH, "--no-model"], ["verify", PATH]):
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert "torch" not in sys.modules, arguments
"""


@pytest.mark.plugin("tools", "forecast")
def test_commands_do_not_pay_for_imports_that_they_do_not_need(tiny_moe: str) -> None:
    """More on it, where transformers is needed, in tests/core/test_imports.py."""
    subprocess.run([sys.executable, "-c", LIGHT.replace("PATH", repr(tiny_moe))], check=True)


def test_the_list_of_commands_fits_into_80_columns() -> None:
    listed = run("--help").stdout.partition("Commands:")[2]
    assert all(name in listed for name in NAMES)
    assert "..." not in listed and max(map(len, listed.splitlines())) <= 80


@pytest.mark.plugin("tools")
@pytest.mark.parametrize(
    "command",
    [["hf-zero-stream"], pytest.param([sys.executable, "-m", "hf_zero_stream"], marks=pytest.mark.slow)],
    ids=str,
)
def test_entry_points(tmp_path: Path, command: list[str]) -> None:
    """Errors of ours go to stderr, without a traceback."""
    arguments = [*command, "verify", str(tmp_path / "nowhere")]
    done = subprocess.run(arguments, env=command_environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("ReadError: ") and "nowhere" in done.stderr and "Traceback" not in done.stderr


def needing(arguments: list[str], message: str) -> Any:
    """A row of a test that needs the plug-in which brings its command."""
    return pytest.param(arguments, message, marks=pytest.mark.plugin(OF_PLUGINS.get(arguments[0], "")))


USAGES = [
    needing(*row)
    for row in [
        (["inspect"], "PATH"),
        (["frobnicate"], "frobnicate"),
        (["inspect", ".", "--format", "xml"], "xml"),
        (["plan", ".", "--rank", "1"], "--world-size: expected the number of ranks"),
        (["plan", ".", "--world-size", "0"], "world-size"),
        (["plan", ".", "--world-size", "2", "--rank", "2"], "below --world-size"),
        (["plan", ".", "--world-size", "2", "--device-memory", "much"], "much"),
        (["plan", ".", "--world-size", "2", "--lora-rank", "4"], "--lora-targets"),
        (["plan", ".", "--tp", "2", "--lora-rank", "4", "--lora-targets", "q_proj"], "expected ZeRO-3, or --fsdp"),
        (["plan", ".", "--world-size", "2", "--device", "cpu", "--device-memory", "1GiB"], "--host-memory"),
        (["plan", ".", "--world-size", "2", "--ds-config", "nowhere.json"], "nowhere.json"),
        (["plan", ".", "--world-size", "2", "--plot", "plan.doc"], "plan.doc"),
        (["plan", ".", "--world-size", "2", "--plot", "nowhere/plan.png"], "nowhere"),
        (["plan", ".", "--world-size", "2", "--write", "nowhere/zero3.yaml"], "there is no folder nowhere"),
        (["plan", ".", "--world-size", "2", "--suggest", "--device", "cpu"], "expected a GPU's --device-memory"),
        (["plan", ".", "--world-size", "64", "--fsdp", "16", "--tp", "2"], "--world-size: expected 32"),
        (["plan", ".", "--world-size", "2", "--fsdp", "0"], "fsdp"),
        (["plan", ".", "--world-size", "2", "--dtype", "bf17"], "expected bfloat16, float16 or float32 (bf16,"),
        (["convert", ".", "x", "--dtype", "bf17"], '"bfloat16"'),
        (["demo", "--nproc", "0"], "nproc"),
        (["doctor", "--ds-config", "nowhere.json"], "nowhere.json"),
        (["doctor", "--report", "nowhere.json"], "nowhere.json"),
        (["doctor", "--bundle", "nowhere/bundle.json"], "there is no folder nowhere"),
        (["plan", ".", "--json"], "say --format json"),
    ]
]


@pytest.mark.parametrize(
    ("arguments", "message"), USAGES, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_wrong_usage(arguments: list[str], message: str) -> None:
    result = run(*arguments, code=USAGE)
    assert message in re.sub(r"\s+", " ", result.stderr) and result.stdout == ""


def test_version() -> None:
    assert run("--version").stdout.split() == [metadata.version("hf_zero_stream")]


@pytest.mark.plugin("pickled")
def test_a_layout_needs_a_config(tiny_moe: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_moe, tmp_path / "model")
    (folder / "config.json").unlink()
    message = run("convert", str(folder), str(tmp_path / "new"), "--layout", "model", code=1).stderr
    assert f"CheckpointError: {folder}: no model can be made of it" in message
    assert not list((tmp_path / "new").iterdir())


# ----------------------------------------------------------------------------------------------------- folding


@pytest.mark.parametrize("seed", range(20))
def test_folding_loses_nothing(seed: int) -> None:
    """Any set of names: the families stand for each of them once, and say how many they are."""
    chosen = random.Random(seed)
    names = [
        f"layers.{layer}.experts.{expert}.{part}"
        for layer, expert, part in itertools.product(range(4), range(8, 12), ("w", "07", "1"))
        if chosen.random() < seed / 19
    ]
    families = fold((name, ("bf16",)) for name in names)
    assert sorted(itertools.chain.from_iterable(unfolded(name) for name, _, _ in families)) == sorted(names)
    assert all(size == len(unfolded(name)) for name, _, size in families)


def test_folding_is_thorough() -> None:
    names = [f"layers.{layer}.experts.{expert}.w" for layer in range(48) for expert in range(128)]
    assert folded_names(names) == ["layers.{0...47}.experts.{0...127}.w"]
    uneven = [f"{layer}.{expert}.w" for layer in (0, 2, 5) for expert in range(4)] + ["1.0.w", "1.1.w"]
    assert folded_names(uneven) == ["{0, 2, 5}.{0...3}.w", "1.{0...1}.w"]
