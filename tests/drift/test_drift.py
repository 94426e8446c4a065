"""What `make drift` reads out of sources, on a distribution of a few lines."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from hf_zero_stream.bindings.install import Row, Weight
from tests.drift import __main__ as command
from tests.drift import contracts


MODULE = """\
from elsewhere import taken as other
value: int = 3
def act(first, *, second): ...
def take_all(**arguments): ...
class Base:
    def inherited(self, one): ...
class Own(Base):
    def method(self, one): ...
class Hidden(other.Base): ...
"""


@pytest.fixture
def sources(tmp_path: Path) -> contracts.Sources:
    with zipfile.ZipFile(tmp_path / "library-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("library/part/__init__.py", MODULE)
    return contracts.Sources(tmp_path / "library-1-py3-none-any.whl")


@pytest.mark.parametrize(
    ("of", "relies_on", "lacking"),
    [
        ("act", "first second", ""),
        ("act", "first third", "part.act(third)"),
        ("take_all", "anything", ""),
        ("other", "", ""),
        ("value", "", ""),
        ("gone", "", "part.gone"),
        ("Own.method", "one", ""),
        ("Own.inherited", "two", "part.Own.inherited(two)"),
        ("Own.gone", "", "part.Own.gone"),
        ("*.from_pretrained", "", ""),
    ],
)
def test_lacking(sources: contracts.Sources, of: str, relies_on: str, lacking: str) -> None:
    assert contracts.lacking(sources, Row(f"library.part:{of}", "", relies_on)) == lacking


def test_a_module_that_is_gone(sources: contracts.Sources) -> None:
    assert contracts.lacking(sources, Row("library.absent:act", "", weight=Weight.SPEED)) == "absent.act"


def test_parts_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "PAGE", tmp_path / "page.md")
    command.PAGE.write_text("before\n<!-- one -->\nold\n<!-- end of one -->\nafter\n")
    command.write("one", command.table(("a", "b"), [("1", "2")]))
    assert "| a | b |\n| --- | --- |\n| 1 | 2 |" in command.PAGE.read_text() and "old" not in command.PAGE.read_text()
    assert command.allowed("transformers").specifier.contains("5.23.0")
