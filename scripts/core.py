"""``make core``: the tests pass without plug-ins. Takes them away from a copy of this checkout, and runs what is left.

``python -m scripts.core`` takes all away and runs the core's tests. ``--each`` leaves each alone, and runs its tests.
``python -m scripts.core NAME ... -- TESTS`` takes these away together. What stands behind ``--`` goes to pytest.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from hf_zero_stream.registry import OURS


ROOT = Path(__file__).parent.parent

DOCUMENTS = ("tests/docs", "tests/cli/test_docs.py")
"""Tests of documents, which show everything; and the package as a whole is none without its plug-ins."""


def copied(target: Path) -> None:
    """Copy what git knows of this checkout, as it is now, and what is new there and not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def passes_without(taken: list[str], tests: list[str], options: list[str]) -> bool:
    """Whether `tests` pass where these plug-ins are gone."""
    print(f"== without {', '.join(taken)}: {' '.join(tests)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="core-") as folder:
        copy = Path(folder)
        copied(copy)
        # The package of all plug-ins stays: an editable installation would give that of this checkout in its place.
        for name in taken:
            shutil.rmtree(copy / "hf_zero_stream" / "plugins" / name)
        ignored = [f"--ignore={path}" for path in DOCUMENTS]
        # Hypothesis draws inputs once, in make test.
        chosen = ["-m", "not slow and not hypothesis"]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen, *ignored]
        environment = {**os.environ, "PYTHONPATH": folder}
        return subprocess.run([*command, *options, *tests], cwd=copy, env=environment).returncode == 0


def main() -> int:
    arguments = sys.argv[1:]
    at = arguments.index("--") if "--" in arguments else len(arguments)
    names, options = arguments[:at], arguments[at + 1 :]
    if names == ["--each"]:
        alone = [([other for other in OURS if other != name], f"tests/{name}") for name in OURS]
        return not all([passes_without(others, [tests], options) for others, tests in alone])
    return not passes_without(names or [*OURS], [] if names else ["tests"], options)


if __name__ == "__main__":
    sys.exit(main())
