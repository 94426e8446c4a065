"""What `make drift` reads out of sources, on a distribution of a few lines."""

import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from hf_zero_stream.registry import Row, Severity
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
class Record:
    field: int
    def __init__(self): self.made = self._new_name = 1
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


def test_names_that_a_module_of_ours_requires() -> None:
    text = """
from library.part import Own as Taken
from .near import Other
require_names("library", Taken, "method", *("gone", "more"), purpose="what it does")
require_names("library", Other, "method")
"""
    of = [row.of for row in contracts.required(text)]
    assert of == [f"library.part:Own.{name}" for name in ("method", "gone", "more")]
    names = {row.of.partition(":")[2] for row in contracts.required_names()}
    assert {"Init._aligned_size", "FSDPParam.init_dtype_attrs"} < names


def test_a_module_that_is_gone(sources: contracts.Sources) -> None:
    assert contracts.lacking(sources, Row("library.absent:act", "", severity=Severity.SPEED)) == "absent.act"


def test_parts_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "PAGE", tmp_path / "page.md")
    command.PAGE.write_text("before\n<!-- one -->\nold\n<!-- end of one -->\nafter\n")
    command.write("one", command.table(("a", "b"), [("1", "2")]))
    assert "| a | b |\n| --- | --- |\n| 1 | 2 |" in command.PAGE.read_text() and "old" not in command.PAGE.read_text()
    assert command.allowed("transformers").specifier.contains("5.23.0")


def test_attributes_that_are_read_of_a_class(sources: contracts.Sources) -> None:
    """FSDP2 of torch 2.11 has another name for one of them, which no row of the table showed."""
    wanted = ("field", "made", "_new_name|_old_name", "gone", "gone|never_there")
    found = contracts.without_attributes(sources, "library.part", "Record", wanted)
    assert found == ["Record.gone", "Record.gone|never_there"]
    assert contracts.without_attributes(sources, "library.part", "Nothing", wanted) == ["library.part:Nothing"]


@pytest.mark.parametrize(
    ("what", "is_allowed"),
    [
        ("right", True),
        ("equal", True),
        ("right, by stock", True),
        ("cannot be built: needs a package: timm", True),
        ("fsdp2 refused", True),
        ("fsdp2 raises: VersionError: transformers 6 has no act", True),
        ("zero3x2 refused", False),
        ("fsdp2 wrong values: head", False),
        ("zero3x2 raises: KeyError: 'act'", False),
        ("wrong values are saved: head", False),
        ("resumed on 3 ranks: losses [1.0], not [2.0]", False),
        ("RankTimeout: VersionError", False),
    ],
)
def test_what_a_set_of_versions_may_come_to(what: str, is_allowed: bool) -> None:
    assert bool(command.ALLOWED.match(what)) == is_allowed


def test_the_rows_of_sets_that_were_not_tried_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: dict[str, tuple[dict[str, str], dict[str, str]]] = {
        "oldest": ({"ZeRO-3": "right", "ZeRO-2": "right"}, {"bert": "equal", "new": "cannot be built: a | b"}),
        "newest": ({"ZeRO-3": "wrong values: head", "TP": "VersionError: at length"}, dict.fromkeys("abcde", "equal")),
    }
    monkeypatch.setattr(command, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(command.stacks, "outcomes", outcomes.__getitem__)
    monkeypatch.setattr(command.stacks, "STACKS", {"oldest": {"torch": "1", "peft": "2"}, "newest": {"torch": "3"}})
    command.PAGE.write_text("<!-- stacks -->\n<!-- end of stacks -->\n")
    assert not command.run_stacks(["newest"]) and command.run_stacks(["oldest"])
    oldest = "| oldest | torch 1, peft 2 | right: ZeRO-3, ZeRO-2 | equal: bert; cannot be built: a / b: new |"
    newest = "| newest | torch 3 | wrong values: head: ZeRO-3; VersionError: TP | equal: 5 |"
    assert command.PAGE.read_text().splitlines()[3:6] == ["| --- " * 4 + "|", oldest, newest]


@pytest.mark.parametrize("name", ["_unsharded_dtensor_spec", "_tp_spec"])
def test_the_spec_of_a_given_dtensor_under_both_names(name: str) -> None:
    from hf_zero_stream.holdings.fsdp import inner_spec

    spec = object()
    assert inner_spec(SimpleNamespace(**{name: spec})) is spec
    assert inner_spec(SimpleNamespace()) is None, "torch 2.11 has none for a plain tensor"
