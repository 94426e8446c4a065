"""One suite in one arm."""

import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from .compare import Result, read_results


ARMS = ("stock", "ours")

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


class Run(NamedTuple):
    """The results by test, and how often what was done by us: "load", "save", "state saved", "state loaded"."""

    results: dict[str, Result]
    events: Counter[str]


def run_arm(arm: str, tests: Path, folder: Path, paths: Sequence[Path], only: str, timeout: float) -> Run:
    """Run the file `tests` by pytest in `folder`, which is made anew; `paths` come to PYTHONPATH.

    Tests that the time is over for are in no result, which is a difference of the arms.
    """
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "tmp").mkdir(parents=True)
    package = folder / "package"  # hf_zero_stream alone: our own tests/ would hide theirs
    package.mkdir()
    (package / "hf_zero_stream").symlink_to(ROOT / "hf_zero_stream")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "FSDP_"))}
    environment |= {
        "PEERS_ARM": arm,
        "PEERS_RESULTS": str(folder / "results.jsonl"),
        "PEERS_EVENTS": str(folder / "events"),
        "PYTHONPATH": os.pathsep.join(map(str, [HERE / "site", package, *paths])),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TMPDIR": str(folder / "tmp"),
        "HF_HOME": str(folder / "home"),
        "HF_HUB_OFFLINE": "1",
        "HF_ZERO_STREAM_PROGRESS": "false",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "peers_plugin", "-p", "no:cacheprovider", "-c", os.devnull]
    command += ["--rootdir", str(tests.parent), str(tests), *(["-k", only] if only else [])]
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # ranks too, that it may have left
            process.wait()
    events = folder / "events"
    return Run(
        read_results(folder / "results.jsonl"), Counter(events.read_text().split("\n")[:-1] if events.exists() else ())
    )
