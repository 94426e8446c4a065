"""A small script that shows one finding, to run without the generator."""

from pathlib import Path
from typing import Any

from tests.situations import hosts, places, trial
from tests.situations.axes import Situation


TEMPLATE = '''\
"""{kinds}

Run in the root of the repository: python {name}
"""

import sys
import tempfile
from pathlib import Path

from tests.situations.models import make
from {module} import {kind}, trial

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder, "checkpoints"))
        result = trial({kind}.parse("{situation}"), Path(folder, "trial"), Path(folder, "checkpoints"))
    for finding in result.findings:
        print(finding.kind, finding.text, sep="\\n")
    sys.exit(bool(result.findings))
'''


def module_of(situation: Any) -> Any:
    """What tries a situation."""
    return {Situation: trial, places.Place: places, hosts.Hosts: hosts}[type(situation)]


def write_script(folder: Path, number: int, situation: Any, kinds: list[str]) -> Path:
    """Write the script of a situation into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"finding_{number:02}.py"
    where = {"module": module_of(situation).__name__, "kind": type(situation).__name__}
    path.write_text(TEMPLATE.format(kinds="; ".join(kinds), name=path.name, situation=situation, **where))
    return path
