"""Runs the groups of a call, watches them, and prints what they find."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from .calls import CALLS, TWO_ON_ONE
from .setting import Group
from .wheels import collect
from .worker import keep


ROOT = Path(__file__).parents[2]

MINUTES = {"a": 4.0, "b": 7.0, "c": 10.0}

ALONE_S = 30.0
"""How long ranks go on after another one has ended."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.gpu", description="What only a GPU can show.")
    parser.add_argument("call", choices=[*CALLS, "wheels"])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("gpu-day"), help="for results, or for wheels")
    parser.add_argument("--data", type=Path, help="for checkpoints; default: a new folder, removed at the end")
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of the checkpoints that are timed")
    parser.add_argument("--minutes", type=float, help="after which everything is ended")
    parser.add_argument("--jobs", type=int, help="groups at once; default: one for each three CPUs")
    parser.add_argument("--only", default="", help="names of groups, or of steps, with commas between")
    parser.add_argument("--wheels", help="a folder on sys.path for all groups but those with the machine's own")
    settings = parser.parse_args(arguments)
    settings.folder.mkdir(parents=True, exist_ok=True)
    if settings.call == "wheels":
        return collect(settings.folder)
    import torch

    if not torch.cuda.is_available():
        print(
            f"scripts.gpu needs a machine with an NVIDIA GPU, and a build of torch for CUDA. Here torch is "
            f"{torch.__version__}, and torch.cuda.is_available() is false. Nothing was run.",
            file=sys.stderr,
        )
        return 1
    with tempfile.TemporaryDirectory(prefix="gpu-day-") as data:
        settings.data = settings.data or Path(data)
        day = Day(settings, torch.cuda.device_count())
        day.run()
    print("\n".join(table(settings.call, day.found)))
    return int(any(not found["ok"] for found in day.found))


class Running:
    """The processes of one group, which have started."""

    def __init__(self, group: Group, ranks: list[subprocess.Popen[bytes]], logs: list[Path]) -> None:
        self.group, self._ranks, self._logs = group, ranks, logs
        self._first_end = 0.0

    def has_ended(self) -> bool:
        """Whether it has; ranks that go on long after another one has ended are killed."""
        codes = [rank.poll() for rank in self._ranks]
        if None not in codes:
            return True
        if any(code is not None for code in codes):
            self._first_end = self._first_end or time.monotonic()
            if time.monotonic() > self._first_end + ALONE_S:
                self.kill()
                return True
        return False

    def kill(self) -> None:
        for rank in self._ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()

    def log(self) -> str:
        """Exit codes, and the end of what each rank printed."""
        codes = [rank.poll() for rank in self._ranks]
        return "\n".join([f"exit codes {codes}", *(log.read_text(errors="replace")[-1500:] for log in self._logs)])


class Day:
    """One call: its groups, and what they have found so far."""

    def __init__(self, settings: argparse.Namespace, devices: int) -> None:
        self._settings, self._devices = settings, devices
        self._results = settings.folder / f"{settings.call}.jsonl"
        self._results.unlink(missing_ok=True)
        self._until = time.monotonic() + 60 * (settings.minutes or MINUTES[settings.call])
        self._jobs = settings.jobs or max(1, len(os.sched_getaffinity(0)) // 3)
        self._only = [*filter(None, settings.only.split(","))]
        self.found: list[dict[str, Any]] = []

    def run(self) -> None:
        groups = [each for each in CALLS[self._settings.call] if self._steps(each)]
        for group in groups:
            if group.alone:
                self._run_beside([group])
        self._run_beside([group for group in groups if not group.alone])

    def _steps(self, group: Group) -> list[str]:
        return [step for step in group.steps if not self._only or group.name in self._only or step in self._only]

    def _run_beside(self, groups: list[Group]) -> None:
        left, running = list(groups), list[Running]()
        while left or running:
            while left and len(running) < self._jobs:
                running.append(self._start(left.pop(0)))
            is_late = time.monotonic() > self._until
            for each in list(running):
                if is_late:
                    each.kill()
                if is_late or each.has_ended():
                    running.remove(each)
                    self._look()
                    self._name_lost(each, "no time was left" if is_late else "ended before it")
            if is_late:
                for group in left:
                    for step in self._steps(group):
                        keep(str(self._results), _lost(group, step, "no time was left"))
                left.clear()
            self._look()
            time.sleep(0.1)

    def _name_lost(self, run: Running, why: str) -> None:
        """Write a line about each step that left none."""
        seen = {found["step"] for found in self.found if found["group"] == run.group.name}
        for step in self._steps(run.group):
            if step not in seen:
                keep(str(self._results), _lost(run.group, step, f"{why}\n{run.log()}"))
                return

    def _look(self) -> None:
        """Print what has come since the last time."""
        for found in _lines(self._results)[len(self.found) :]:
            self.found.append(found)
            print(line(found), flush=True)

    def _start(self, group: Group) -> Running:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        folder = (self._settings.data / group.name).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        task = {
            "call": self._settings.call,
            "name": group.name,
            "results": str(self._results.resolve()),
            "folder": str(folder),
            "gigabytes": self._settings.gigabytes,
            "only": self._steps(group),
        }
        ranks, logs = [], []
        for rank in range(group.world_size or 1):
            environment = {
                **os.environ,
                "DS_ACCELERATOR": "cuda",
                "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # without it products are not the same twice
                "HF_HUB_OFFLINE": "1",
                "PYTHONUNBUFFERED": "1",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank % self._devices),
                "WORLD_SIZE": str(group.world_size or 1),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            if group.world_size > self._devices:
                environment |= {**TWO_ON_ONE, "NCCL_HOSTID": f"host{rank}"}
            if self._settings.wheels and not group.own_transformers:
                paths = (self._settings.wheels, os.environ.get("PYTHONPATH"))
                environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
            logs.append(folder / f"rank{rank}.log")
            with open(logs[-1], "wb") as log:
                command = [sys.executable, "-m", "scripts.gpu.worker", json.dumps(task)]
                ranks.append(
                    subprocess.Popen(
                        command, env=environment, cwd=ROOT, stdout=log, stderr=log, start_new_session=True
                    )
                )
        return Running(group, ranks, logs)


def _lost(group: Group, step: str, why: str) -> dict[str, Any]:
    return {"group": group.name, "step": step, "ok": False, "figures": {}, "error": why}


def _lines(path: Path) -> list[dict[str, Any]]:
    """What is whole in a file of lines of JSON."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(each) for each in text.splitlines(keepends=True) if each.endswith("\n")]


def _figures(found: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in found["figures"].items())


def line(found: dict[str, Any]) -> str:
    """A result in one line, and an error below it."""
    seconds = f" ({found['seconds']:.0f} s)" if "seconds" in found else ""
    rank = f" on rank {found['rank']}" if "rank" in found else ""
    error = f"\n{found['error']}" if "error" in found else ""
    name = f"{found['group']}: {found['step']}{rank}{seconds}"
    return f"{'ok  ' if found['ok'] else 'FAIL'} {name}: {_figures(found)}{error}"


def table(call: str, results: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The results, as benchmarks/README.md shows them."""
    yield f"\n## On a GPU, {date.today().isoformat()}: `python -m scripts.gpu {call}`\n"
    yield "| group | step | | figures |"
    yield "|---|---|---|---|"
    for found in results:
        why = found.get("error", "").strip().splitlines()
        said = f"{_figures(found)}{why[-1] if why else ''}"
        yield f"| {found['group']} | {found['step']} | {'ok' if found['ok'] else 'FAIL'} | {said} |"


if __name__ == "__main__":
    sys.exit(main())
