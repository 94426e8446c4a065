"""Processes that run a script each, forked from one of their own that has imported torch and what else takes seconds.

What that one has imported is up to the test: nothing of this package where a test is about what this package imports.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType


PARENT = """\
import gc, json, os, sys
{imports}
gc.freeze()
for line in sys.stdin:
    request = json.loads(line)
    if "wait" in request:
        print(os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1]), flush=True)
        continue
    child = os.fork()
    if not child:
        break
    print(child, flush=True)
else:
    sys.exit()
for number, path in enumerate((os.devnull, request["out"], request["err"])):
    os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
os.environ.update(request["variables"])
sys.argv[1:] = request["arguments"]
exec(compile(request["script"], "script.py", "exec"), {{"__name__": "__main__"}})
"""


class Fork:
    """One that runs."""

    def __init__(self, parent: Forks, pid: int, out: Path, err: Path) -> None:
        self.parent, self.pid, self.out, self.err = parent, pid, out, err

    def ended(self) -> tuple[int, str, str]:
        """Wait for its end: the exit code, and what it has printed."""
        return self.parent.ask({"wait": self.pid}), self.out.read_text(), self.err.read_text()

    def printed(self) -> str:
        """The same of a good end; fails the test if it is none."""
        code, out, err = self.ended()
        assert code == 0, f"exit code {code}\n{out[-3000:]}\n{err[-12000:]}"
        return out


class Forks:
    """The process that they are forked from, and that has run `imports`."""

    def __init__(
        self, imports: str, command: Sequence[str] = (sys.executable,), environment: dict[str, str] | None = None
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="forks-")
        self._count = 0
        self._process = subprocess.Popen(
            [*command, "-c", PARENT.format(imports=imports)],
            env={**os.environ, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, request: dict[str, object]) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def start(self, script: str, *arguments: str, **variables: str) -> Fork:
        self._count += 1
        out, err = (Path(self._folder.name) / f"{name}-{self._count}" for name in ("out", "err"))
        what = {"script": script, "arguments": arguments, "variables": variables, "out": str(out), "err": str(err)}
        return Fork(self, self.ask(what), out, err)

    def run(self, script: str, *arguments: str, **variables: str) -> str:
        return self.start(script, *arguments, **variables).printed()

    def __enter__(self) -> Forks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()
        self._folder.cleanup()
