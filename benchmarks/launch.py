"""Starts one fresh process per rank and collects what they measured."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist


ROOT = Path(__file__).resolve().parents[1]

ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    # The store below lives in this process, not in rank 0.
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}

# Once a rank has failed, how long the others may take to notice before they are killed.
GRACE_SECONDS = 15.0


class ArmFailed(Exception):
    """A rank ended with an error; the message holds the end of its output."""


def run(
    task: str, world_size: int, timeout_seconds: float, module: str = "benchmarks.rank", **environment: str
) -> list[dict[str, Any]]:
    """Run one task on `world_size` ranks; returns every rank's figures, in the order of the ranks.

    Args:
        task: what each rank does, in the words of `module`.
        module: run as ``python -m module TASK FILE`` on each rank; writes its figures to FILE as JSON.
        environment: variables on top of `ENVIRONMENT` and of the rank's own.

    Raises:
        ArmFailed: a rank failed, or was still running at the time limit.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        processes = [
            _start([module, task], rank, world_size, store.port, folder, environment) for rank in range(world_size)
        ]
        try:
            late = _wait(processes, timeout_seconds)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
        failed = [rank for rank in range(world_size) if not (folder / f"{rank}.json").exists()]
        if failed:
            # The first to fail is rarely the one that hung.
            first = min(failed, key=lambda rank: (rank in late, rank))
            what = "was still running at the time limit" if first in late else "failed"
            output = (folder / f"{first}.log").read_text(errors="replace").strip()[-2000:]
            raise ArmFailed(f"rank {first} of {world_size} {what}:\n{output}")
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]


def write_figures(path: str | Path, figures: Any) -> None:
    """Write a rank's figures to the FILE that it was given; one that dies meanwhile leaves nothing there."""
    partial = Path(path).with_suffix(".partial")
    partial.write_text(json.dumps(figures))
    os.replace(partial, path)


def _start(
    module_and_task: list[str], rank: int, world_size: int, port: int, folder: Path, variables: dict[str, str]
) -> "subprocess.Popen[bytes]":
    search_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "PYTHONPATH": search_path,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        **variables,
    }
    command = [sys.executable, "-m", *module_and_task, str(folder / f"{rank}.json")]
    with open(folder / f"{rank}.log", "wb") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def _wait(processes: list["subprocess.Popen[bytes]"], timeout_seconds: float) -> list[int]:
    """Wait for all ranks; returns those that were still running when waiting had no more sense."""
    deadline, failed = time.monotonic() + timeout_seconds, False
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if None not in codes:
            return []
        if any(codes) and not failed:
            deadline, failed = min(deadline, time.monotonic() + GRACE_SECONDS), True
        time.sleep(0.05)
    return [rank for rank, process in enumerate(processes) if process.poll() is None]
