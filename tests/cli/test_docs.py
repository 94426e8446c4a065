"""What docs/cli.md shows of the command line is what it prints.

``python -m tests.cli.test_docs`` writes the present output into it, but for what is this machine's. A line of dots
stands for others: it leaves out what the block has left out.
"""

import contextlib
import os
import re
import shlex
import subprocess
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.moe_checkpoint import make_moe_checkpoint
from hf_zero_stream.cli import app
from tests.cli.test_cli import NAMES
from tests.support.cluster import ROOT
from tests.support.commands import link_repository


DOCUMENT = (ROOT / "docs" / "cli.md").read_text()
LOOSE = ("doctor", "demo")
"""Commands whose output is this machine's: numbers may differ."""
DOTS = re.compile(r"^\.\.\.\n", re.MULTILINE)


def blocks(text: str) -> list[str]:
    return re.findall(r"^```console\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands(block: str) -> list[tuple[str, str]]:
    """(command, what the document says that it prints) of a block."""
    parts = re.split(r"^\$ (.*)\n", block, flags=re.MULTILINE)
    assert parts[0] == ""
    return list(zip(parts[1::2], parts[2::2], strict=True))


def is_exact(block: str) -> bool:
    return commands(block)[0][0].split()[1] not in LOOSE


EXACT = [block for block in blocks(DOCUMENT) if is_exact(block)]


def make_workplace(folder: Path) -> None:
    """Give `folder` the repository's folders and the documents' checkpoint."""
    link_repository(folder)
    make_moe_checkpoint(folder / "tiny-moe", 0.01 * 1e9, num_layers=2, num_experts=8)


@pytest.fixture
def as_in_the_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_workplace(tmp_path)
    monkeypatch.chdir(tmp_path)


def printed(command: str, last_code: int) -> tuple[str, int]:
    """(stdout, exit code) of a command."""
    words = shlex.split(command)
    if words[0] == "hf-zero-stream":
        result = CliRunner().invoke(app, words[1:])
        return result.stdout, result.exit_code
    if words == ["echo", "$?"]:
        return f"{last_code}\n", 0
    subprocess.run(words, check=True)
    return "", 0


def regenerated(block: str) -> str:
    """A block with what its commands print now; they run in the working folder."""
    text, code = "", 0
    for command, _ in commands(block):
        output, code = printed(command, code)
        text += f"$ {command}\n{output}"
    return text


@pytest.mark.plugin("tools")
@pytest.mark.parametrize("number", range(len(EXACT)))
def test_output_is_as_shown(as_in_the_documents: None, number: int) -> None:
    output = regenerated(EXACT[number])
    shown = r"(.*\n)+?".join(map(re.escape, DOTS.split(EXACT[number])))
    assert re.fullmatch(shown, output), f"{EXACT[number]}\nis not\n{output}"


def test_doctor_is_as_shown(as_in_the_documents: None) -> None:
    (block,) = [block for block in blocks(DOCUMENT) if "doctor" in block]
    ((command, shown),) = commands(block)
    text, code = printed(command, 0)
    assert code == 0
    assert_shown(shown, text)


def assert_shown(shown: str, text: str) -> None:
    """Every line of a cut output in a document is in `text`, in this order; numbers, bars and widths may differ."""
    lines = iter(map(loosely, text.splitlines()))
    expected = [loosely(line) for line in shown.splitlines() if line != "..."]
    assert len(expected) > 4
    for line in expected:
        assert line in lines, f"{line!r} is not in\n{text}"


def loosely(line: str) -> str:
    without_numbers = re.sub(r"\d+(\.\d+)*( [KMGT]?i?B\b)?", "#", line)
    return re.sub(r" +", " ", re.sub(r"-+", "-", re.sub(r"#+", "#", without_numbers)))


def test_documents_show_every_command() -> None:
    shown = {command.split()[1] for block in blocks(DOCUMENT) for command, _ in commands(block) if "hf-" in command}
    assert shown | {"run"} == set(NAMES)  # which has a page of its own
    listed = re.findall(r"^\| `(\w+)(?: \[?(?:PATH|COMMAND)\]?(?: DST)?)?` \|", DOCUMENT, re.MULTILINE)
    assert listed == NAMES


def test_documents_name_every_option() -> None:
    """Options that are in the document exist."""
    existing = {"--version"}  # of no command: tests/cli/test_cli.py
    for name in NAMES:
        result = CliRunner().invoke(app, [name, "--help"])
        existing |= set(re.findall(r"--[a-z0-9-]+", result.stdout))
    without_make = re.sub(r"^python -m benchmarks.*$", "", DOCUMENT, flags=re.MULTILINE)
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", without_make))
    assert named <= existing
    assert os.path.exists(ROOT / "docs" / "cli.md")


def cut_as(block: str, output: str) -> str:
    """`output` without the lines that `block` has dots for."""
    if not DOTS.search(block):
        return output
    kept = set(keys(block))
    lines = [line if key in kept else "..." for line, key in zip(output.splitlines(), keys(output), strict=True)]
    return re.sub(r"\.\.\.\n(\n*\.\.\.\n)+", "...\n", "".join(f"{line}\n" for line in lines))


def keys(text: str) -> list[str]:
    """What each line is about: a table's row by its first cell, a rule by the row above, others by their words."""
    found = [""]
    for line in text.splitlines():
        is_rule = line.startswith("|--")
        found.append(f"{found[-1]} rule" if is_rule else line.split("|")[1].strip() if "|" in line else loosely(line))
    return found[1:]


def main() -> None:
    document = ROOT / "docs" / "cli.md"
    text = document.read_text()
    for block in filter(is_exact, blocks(text)):
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            make_workplace(Path(folder))
            text = text.replace(block, cut_as(block, regenerated(block)))
    document.write_text(text)


if __name__ == "__main__":
    main()
