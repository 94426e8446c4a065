"""`make` finds what the system lacks and installs it if it may; tests are skipped only where it may not."""

import os
from pathlib import Path

import pytest

from scripts import system_packages
from scripts.system_packages import ASYNC_IO, COMPILER, MPICH
from tests.conftest import skip_if_lacking
from tests.support.cluster import ROOT


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the whole PATH of a root without a compiler; its apt-get would install one there."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(system_packages, "NEEDS", (COMPILER, ASYNC_IO))
    program(
        tmp_path / "apt-get",
        f'echo "$@" >>{tmp_path}/calls\n'
        f'case "$*" in *install*) echo "#!/bin/sh" >{tmp_path}/c++; /bin/chmod +x {tmp_path}/c++;; esac',
    )
    return tmp_path


def program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_installs_only_what_is_lacking(bare: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert COMPILER in system_packages.lacking()
    system_packages.main()
    update, install = (bare / "calls").read_text().splitlines()
    assert update.endswith(" update") and " install -y " in install and install.split()[-1].startswith(("g++", "lib"))
    assert not system_packages.lacking(COMPILER)
    system_packages.main()
    assert len((bare / "calls").read_text().splitlines()) == 2, "nothing is lacking any more"
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("why", ["not root", "no apt-get", "apt-get fails"])
def test_names_what_cannot_be_installed(
    bare: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], why: str
) -> None:
    if why == "not root":
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
    elif why == "no apt-get":
        (bare / "apt-get").unlink()
    else:
        program(bare / "apt-get", f"echo failed >>{bare}/calls; exit 100")
    system_packages.main()
    assert (bare / "calls").exists() == (why == "apt-get fails")
    said = capfd.readouterr().err
    assert "This system lacks g++ (DeepSpeed's communication between CPUs" in said
    assert "apt-get install g++" in said


def test_headers_are_looked_for_by_the_compiler(bare: Path) -> None:
    program(bare / "c++", "exit 1")
    assert ASYNC_IO in system_packages.lacking() and COMPILER not in system_packages.lacking()
    program(bare / "c++", "exit 0")
    assert ASYNC_IO not in system_packages.lacking()


def test_skips_only_where_nothing_could_be_installed(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_if_lacking(COMPILER)  # it could be: so the test runs, and fails
    (bare / "apt-get").unlink()
    with pytest.raises(pytest.skip.Exception, match=r"lacks g\+\+ .*apt-get install g\+\+"):
        skip_if_lacking(COMPILER)
    with pytest.raises(pytest.skip.Exception, match=r"lacks mpich .*apt-get install mpich"):
        skip_if_lacking(MPICH)
    monkeypatch.setenv("CI", "true")
    skip_if_lacking(COMPILER, MPICH)


def test_ci_installs_nothing_of_its_own() -> None:
    commands = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line and not line.startswith("#")]
    assert commands[:2] == ["set -euo pipefail", 'cd "$(dirname "${BASH_SOURCE[0]}")/.."']
    assert [line.split()[:2] for line in commands[2:]] == [
        ["make", name] for name in ("quality", "demo", "test", "core")
    ]
