"""The table of what is bent: each row is there in the installed versions, and leads to a function of ours."""

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from hf_zero_stream.bindings import install
from hf_zero_stream.bindings.install import Installation
from hf_zero_stream.bindings.streaming import streaming
from hf_zero_stream.bindings.table import TABLE, installed
from hf_zero_stream.errors import PACKAGE, MissingPluginError, VersionError
from hf_zero_stream.registry import OURS, PatchScope, Row, Severity
from tests.support.cluster import ROOT


ELSEWHERE = {"openrlhf", "verl"}
"""Packages in environments of their own: clients of ``make ecosystem`` look at their rows there."""

ROWS = [
    pytest.param(row, id=f"{scope.name}-{row.of}")
    for scope, rows in TABLE.items()
    for row in rows
    if row.package not in ELSEWHERE
]


@pytest.mark.parametrize("row", ROWS)
def test_it_is_there_and_leads_to_a_function(row: Row) -> None:
    importlib.import_module(row.module)
    assert row.lacking() == ""
    if row.is_imported():
        assert list(row.places())
    if row.leads_to:
        module, _, name = row.leads_to.partition(":")
        assert callable(getattr(importlib.import_module(module, PACKAGE), name))


@pytest.mark.parametrize("row", [row for rows in TABLE.values() for row in rows if row.package in ELSEWHERE])
def test_it_leads_to_a_function_and_a_client_looks_at_the_original(row: Row) -> None:
    """The client asserts in its environment what the test above asserts here."""
    if row.leads_to:
        module, _, name = row.leads_to.partition(":")
        assert callable(getattr(importlib.import_module(module, PACKAGE), name))
    texts = [path.read_text() for path in (ROOT / "benchmarks" / "clients").glob("*.py")]
    assert any(f'assert_rows("{row.package}")' in text for text in texts)


@pytest.mark.plugin(*OURS)
def test_the_page_is_made_from_the_table() -> None:
    """``python -m hf_zero_stream.plugins.tools.replaced > docs/replaced.md``."""
    from hf_zero_stream.plugins.tools.replaced import page

    assert (ROOT / "docs" / "replaced.md").read_text() == page()


@pytest.fixture
def library() -> Iterator[Any]:
    """A module of another library, with a function and a class."""
    module: Any = ModuleType("of_tests")
    exec("def act(first, second=2): return first, second\nclass Own:\n    def act(self): return 'stock'", vars(module))
    module.Own.__module__ = module.__spec__ = None
    module.__version__ = "3.1"
    sys.modules["of_tests"] = module
    yield module
    del sys.modules["of_tests"]


ESSENTIAL = Row("of_tests:act", ".errors:PACKAGE", "first second", Severity.ESSENTIAL)
FEATURES = [
    Row("of_tests:Own.act", ".errors:PACKAGE", feature="acts"),
    Row("of_tests:gone", ".errors:PACKAGE", feature="acts"),
]


def test_what_a_version_may_lack(library: Any) -> None:
    assert ESSENTIAL.lacking() == FEATURES[0].lacking() == ""
    assert ESSENTIAL._replace(relies_on="first third").lacking() == "act(third)"
    assert FEATURES[1].lacking() == "gone"
    assert FEATURES[1]._replace(since="3.2").lacking() == FEATURES[1]._replace(until="3.0").lacking() == ""
    assert FEATURES[1]._replace(since="3.1", until="4").lacking() == "gone"
    of_a_checkout = "(unknown version)"  # sources that nobody has installed
    assert FEATURES[1]._replace(since="3.2").exists_in(of_a_checkout)
    assert not FEATURES[1]._replace(until="3.0").exists_in(of_a_checkout)
    assert ESSENTIAL._replace(of="of_tests.absent:act").lacking() == ""  # nobody has imported it


def test_a_feature_goes_as_a_whole_and_with_a_word(
    library: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(TABLE, PatchScope.SAVE, [ESSENTIAL, *FEATURES])  # type: ignore[arg-type]
    act = library.Own.act
    with Installation(PatchScope.SAVE, TABLE) as installation:
        assert installation and library.Own.act is act and library.act is not None
    assert "of_tests 3.1 has no gone; left to it: acts" in caplog.text and not installation


def test_an_essential_function_that_is_gone_is_an_error(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TABLE, PatchScope.SAVE, [FEATURES[0], ESSENTIAL._replace(of="of_tests:gone")])  # type: ignore[arg-type]
    act = library.Own.act
    with pytest.raises(VersionError, match=r"of_tests .* has no gone"), Installation(PatchScope.SAVE, TABLE):
        pass
    assert library.Own.act is act


def test_nothing_of_ours_is_called_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may be inside: what this one calls is stock's, and imports nothing."""
    lead = install.LazyReplacement(Row("os:getcwd", "absent.room:function"), PatchScope.BLOCK)
    assert lead(lambda: "stock") == "stock"
    with streaming(), pytest.raises(MissingPluginError, match="absent.room, which a plug-in"):
        lead(lambda: "stock")
    assert not installed(PatchScope.BLOCK)


def first(original: Any) -> str:
    return f"first, {original()}"


def second(original: Any) -> str:
    return f"second, {original()}"


def test_two_rows_of_one_function(library: Any) -> None:
    """Of two plug-ins, for instance: each calls what was there before it."""
    library.say = stock = lambda: "stock"
    rows = [Row("of_tests:say", f"{__name__}:{name}") for name in ("first", "second")]
    for _ in range(2):
        with Installation(PatchScope.SAVE, {PatchScope.SAVE: rows}):
            assert library.say() == "second, first, stock"
        assert library.say is stock


def test_a_row_waits_until_it_is_needed() -> None:
    """Its module is not imported before."""
    row = Row("os:fspath", "absent.room:function", when=".sources.base:has_url_argument")
    lead = install.LazyReplacement(row, PatchScope.BLOCK)
    with streaming():
        assert lead(lambda *args, **kwargs: "stock", "folder", name="x") == "stock"
        for args, kwargs in ((("s3://bucket",), {}), ((), {"path": "s3://bucket"})):
            with pytest.raises(MissingPluginError, match="absent"):
                lead(lambda *args, **kwargs: "stock", *args, **kwargs)
