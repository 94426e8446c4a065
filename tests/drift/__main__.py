"""See :mod:`tests.drift`."""

from __future__ import annotations

import argparse
import re
import sys

from packaging.requirements import Requirement

from hf_zero_stream.bindings.install import Weight
from tests.drift import contracts, stacks
from tests.support.cluster import ROOT


ALLOWED = ("right", "not in this version", "VersionError", "UnsupportedError")
"""How the outcomes of a smoke run may begin."""

PAGE = ROOT / "docs" / "support.md"


def write(part: str, text: str) -> None:
    """Put a part of the page in the place of what was there."""
    page = PAGE.read_text()
    marks = f"<!-- {part} -->\n", f"<!-- end of {part} -->\n"
    pattern = re.escape(marks[0]) + ".*" + re.escape(marks[1])
    PAGE.write_text(re.sub(pattern, lambda _: f"{marks[0]}\n{text}\n{marks[1]}", page, flags=re.DOTALL))


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def allowed(package: str) -> Requirement:
    text = (ROOT / "pyproject.toml").read_text()
    found = re.search(rf'"({package}[><=][^";]*)"', text)
    assert found is not None, package
    return Requirement(found[1])


def read_sources() -> bool:
    rows, is_sound = [], True
    for package in contracts.PACKAGES:
        versions = contracts.released(package, allowed(package).specifier)
        for version in versions:
            found = contracts.faults(package, version)
            print(package, version, {weight.name: names for weight, names in found.items()} or "all", flush=True)
            is_sound = is_sound and Weight.ESSENTIAL not in found
            if found:
                lacks = "; ".join(f"{weight.name.lower()}: {', '.join(names)}" for weight, names in found.items())
                rows.append((package, version, lacks))
        rows.append((package, f"{versions[0]} to {versions[-1]}, {len(versions)} versions", "nothing else"))
    write("contracts", table(("package", "version", "lacks"), rows))
    return is_sound


def run_stacks(only: list[str]) -> bool:
    rows, is_right = [], True
    for name in only or stacks.STACKS:
        found = dict(stacks.outcomes(name))
        print(name, found, flush=True)
        is_right = is_right and all(what.startswith(ALLOWED) for what in found.values())
        versions = stacks.versions_in(stacks.python_of(name))
        rows.append((name, *versions.values(), "; ".join(f"{home}: {what}" for home, what in found.items())))
    if not only:
        write("stacks", table(("set", *stacks.SHOWN, "loads, trains and resumes"), rows))
    return is_right


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.drift", description=__doc__)
    parser.add_argument("what", nargs="?", choices=("contracts", "stacks"), help="default: both")
    parser.add_argument("--only", action="append", default=[], choices=stacks.STACKS, help="one of the sets")
    options = parser.parse_args()
    results = []
    if options.what in (None, "contracts"):
        results.append(read_sources())
    if options.what in (None, "stacks"):
        results.append(run_stacks(options.only))
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
