"""``make gpu``: what only a machine with CUDA can show. Runs the tests marked gpu and benchmarks/gpu.py.

    python -m scripts.gpu                    # prints a block of results for benchmarks/README.md
    python -m scripts.gpu --gigabytes 40

The exit code is 1 without a CUDA device, or if a test or a benchmark fails. This has not run on a GPU so far.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from datetime import date
from importlib.util import find_spec

import torch


NOWHERE = """\
make gpu needs a machine with an NVIDIA GPU, and a build of torch for CUDA.
Here torch is {torch}, and torch.cuda.is_available() is false. Nothing was run.
For a CPU there are `make test` and `make bench`.
"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run what only a machine with CUDA can show.")
    parser.add_argument("--gigabytes", type=float, default=10.0, help="size of the checkpoint, in 10^9 bytes")
    settings = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(NOWHERE.format(torch=torch.__version__), end="", file=sys.stderr)
        return 1
    tested = subprocess.run([sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests"], check=False)
    # Each of the ranks of the second run has half of the one device, if DeepSpeed is there to divide the model.
    runs = {
        world: subprocess.run(
            [sys.executable, "-m", "benchmarks.gpu", f"--gigabytes={settings.gigabytes}", f"--world={world}"],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        for world in ((1, 2) if find_spec("deepspeed") else (1,))
    }
    print("\n".join(block(settings.gigabytes, tested.returncode, {world: run.stdout for world, run in runs.items()})))
    return int(any(done.returncode for done in (tested, *runs.values())))


def block(gigabytes: float, tests: int, printed: dict[int, str]) -> Iterator[str]:
    """The results, as benchmarks/README.md shows them."""
    yield f"\n## On a GPU, {date.today().isoformat()}\n"
    yield f"`make gpu`: the tests marked gpu {'pass' if tests == 0 else f'FAIL (exit code {tests})'}."
    for world, text in printed.items():
        yield f"\n`python -m benchmarks.gpu --gigabytes {gigabytes:g} --world {world}`:\n"
        yield f"```text\n{text.strip() or 'failed'}\n```"


if __name__ == "__main__":
    sys.exit(main())
