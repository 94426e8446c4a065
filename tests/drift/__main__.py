"""See :mod:`tests.drift`."""

import argparse
import re
import subprocess
import sys

from packaging.requirements import Requirement

from hf_zero_stream.registry import Severity
from tests.drift import contracts, stacks
from tests.support.cluster import ROOT


ALLOWED = re.compile(
    r"(right|equal|not in this version|cannot be built|fsdp2 refused)\b"
    r"|((zero3x2|fsdp2) raises: )?(VersionError|UnsupportedError)\b"
)
"""How what was tried in a set of versions may end; see :func:`.stacks.outcomes`."""

HEADER = ("set", "versions", "loads, trains, saves and resumes", "types as in a plain load")

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
        for version in list(versions):
            try:
                found = contracts.faults(package, version)
            except subprocess.CalledProcessError:  # here pip may be held back from it
                print(package, version, "could not be downloaded", flush=True)
                versions.remove(version)
                continue
            print(package, version, {severity.name: names for severity, names in found.items()} or "all", flush=True)
            is_sound = is_sound and Severity.ESSENTIAL not in found
            if found:
                lacks = "; ".join(f"{severity.name.lower()}: {', '.join(names)}" for severity, names in found.items())
                rows.append((package, version, lacks))
        rows.append((package, f"{versions[0]} to {versions[-1]}, {len(versions)} versions", "nothing else"))
    write("contracts", table(("package", "version", "lacks"), rows))
    return is_sound


def grouped(found: dict[str, str]) -> str:
    """Which names came to the same end, in a cell of a table; more than four are counted."""
    names: dict[str, list[str]] = {}
    for name, what in found.items():
        names.setdefault(re.sub(r"(VersionError): .*", r"\1", what).replace("|", "/"), []).append(name)
    return "; ".join(f"{what}: {', '.join(each) if len(each) < 5 else len(each)}" for what, each in names.items())


def rows_of(page: str) -> dict[str, str]:
    """The lines of the table of sets that the page has, by the name of the set."""
    return {line.split(" | ")[0].removeprefix("| "): line for line in page.splitlines() if line.startswith("| ")}


def run_stacks(only: list[str]) -> bool:
    """The rows of sets that are not tried, or cannot be installed here, stay as they were."""
    is_right = True
    for name in only or stacks.STACKS:
        try:
            homes, types = stacks.outcomes(name)
        except subprocess.CalledProcessError:  # here pip may be held back from it
            print(name, "could not be installed", flush=True)
            continue
        print(name, grouped(homes), grouped(types), flush=True)
        is_right = is_right and all(ALLOWED.match(what) for what in {**homes, **types}.values())
        versions = ", ".join(map(" ".join, stacks.STACKS[name].items()))
        new = table(HEADER, [(name, versions, grouped(homes), grouped(types))])
        lines = {**rows_of(PAGE.read_text()), **rows_of(new)}
        write(
            "stacks",
            "\n".join([*new.splitlines()[:2], *(lines[each] for each in stacks.STACKS if each in lines)]) + "\n",
        )
    return is_right


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.drift", description=__doc__)
    parser.add_argument("what", nargs="?", choices=("contracts", "stacks", "here"), help="default: the first two")
    parser.add_argument("--only", action="append", default=[], choices=stacks.STACKS, help="one of the sets")
    options = parser.parse_args()
    if options.what == "here":
        from tests.drift import smoke  # imports what a set of versions may lack

        smoke.main(ROOT / "docs" / "models.csv")
        return
    results = []
    if options.what in (None, "contracts"):
        results.append(read_sources())
    if options.what in (None, "stacks"):
        results.append(run_stacks(options.only))
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
