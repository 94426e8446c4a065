"""Runs the steps of a command in processes of their own, watches them, and keeps what they find."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from .steps import COMMANDS, TRANSPORTS
from .wheels import collect


ROOT = Path(__file__).parents[2]

MINUTES = 8.0
"""A command begins no step after it."""

STEP_S = 150.0
"""A step that takes longer hangs."""

TRANSPORT_S = 60.0
"""The same of the first collective, imports included."""

ALONE_S = 20.0
"""How long ranks go on after another one has ended."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.gpu", description="What only a GPU can show.")
    parser.add_argument("command", choices=[*COMMANDS, "wheels"])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("gpu-day"), help="for results, or for wheels")
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of the checkpoint of `speed`")
    parser.add_argument("--only", default="", help="names of steps, with commas between")
    settings = parser.parse_args(arguments)
    settings.folder.mkdir(parents=True, exist_ok=True)
    if settings.command == "wheels":
        return collect(settings.folder)
    import torch

    if not torch.cuda.is_available():
        print(
            f"scripts.gpu needs a machine with an NVIDIA GPU, and a build of torch for CUDA. Here torch is "
            f"{torch.__version__}, and torch.cuda.is_available() is false. Nothing was run.",
            file=sys.stderr,
        )
        return 1
    names = [*filter(None, settings.only.split(","))] or [*COMMANDS[settings.command]]
    world_size = 2 if settings.command == "ranks" else 1
    day = Day(settings.command, settings.folder, world_size, settings.gigabytes)
    if world_size > 1 and torch.cuda.device_count() < world_size:
        day.choose_transport()
    day.run(names)
    print("\n".join(table(settings.command, day.results)))
    return int(any(not result["ok"] for result in day.results))


class Day:
    """One command: its processes, and what they have found so far."""

    def __init__(self, command: str, folder: Path, world_size: int, gigabytes: float) -> None:
        self._command, self._folder, self._world_size, self._gigabytes = command, folder, world_size, gigabytes
        self._until = time.monotonic() + 60 * MINUTES
        self._environment: dict[str, str] = {}
        self.results: list[dict[str, Any]] = []

    def choose_transport(self) -> None:
        """Try to reduce something over each of :data:`TRANSPORTS`, and keep to the first that works."""
        for name, environment in TRANSPORTS.items():
            self._environment = environment
            (result,) = self._together([name], TRANSPORT_S)
            if result["ok"]:
                return

    def run(self, names: Sequence[str]) -> None:
        left = list(names)
        while left:
            if time.monotonic() > self._until:
                self._keep(*({"step": name, "ok": False, "error": "no time was left"} for name in left))
                return
            done = self._together(left, STEP_S)
            left = left[len(done) :]

    def _together(self, names: Sequence[str], patience_s: float) -> list[dict[str, Any]]:
        """Run steps, up to the first that fails, in new processes; a last entry says why these ended early."""
        stem = self._folder / f"{self._command}.{len(self.results)}"
        for rank in range(self._world_size):
            Path(f"{stem}.{rank}").unlink(missing_ok=True)  # of an earlier day
        ranks = [self._start(rank, names, stem) for rank in range(self._world_size)]
        found: list[dict[str, Any]] = []
        changed, ended = time.monotonic(), 0.0
        while len(found) < len(names):
            codes = [rank.poll() for rank in ranks]
            new = _lines(Path(f"{stem}.0"))[len(found) :]
            if new:
                found += new
                self._keep(*new)
                changed = time.monotonic()
                if not new[-1]["ok"]:
                    break
            if any(code is not None for code in codes):
                ended = ended or time.monotonic()
            late = time.monotonic() > changed + patience_s or time.monotonic() > self._until + patience_s
            if None not in codes or late or (ended and time.monotonic() > ended + ALONE_S):
                if not new and len(found) < len(names):
                    why = f"hung for {patience_s:.0f} s" if late else f"ended with exit codes {codes}"
                    lost = {"step": names[len(found)], "ok": False, "error": f"{why}\n{_tail(stem, ranks)}"}
                    found.append(lost)
                    self._keep(lost)
                    break
            time.sleep(0.1)
        _end(ranks)
        return found

    def _start(self, rank: int, names: Sequence[str], stem: Path) -> subprocess.Popen[bytes]:
        import torch

        local = rank % torch.cuda.device_count()
        environment = {
            **os.environ,
            "DS_ACCELERATOR": "cuda",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # without it products are not the same twice
            "HF_HUB_OFFLINE": "1",
            "RANK": str(rank),
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": str(self._world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._port(rank)),
            **self._environment,
        }
        if environment.pop("GPU_DAY_HOSTS", ""):
            environment["NCCL_HOSTID"] = f"host{rank}"
        task = {
            "command": self._command,
            "names": list(names),
            "results": f"{stem}.{rank}",
            "folder": str(self._folder),
        }
        task["gigabytes"] = self._gigabytes
        with open(f"{stem}.{rank}.log", "wb") as log:
            command = [sys.executable, "-m", "scripts.gpu.worker", json.dumps(task)]
            return subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)

    def _port(self, rank: int) -> int:
        if rank == 0:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self._of_rank0 = int(probe.getsockname()[1])
        return self._of_rank0

    def _keep(self, *results: dict[str, Any]) -> None:
        for result in results:
            self.results.append(result)
            print(line(result), flush=True)
        path = self._folder / f"{self._command}.json"
        path.write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")


def _lines(path: Path) -> list[dict[str, Any]]:
    """What is whole in a file of lines of JSON."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(each) for each in text.splitlines(keepends=True) if each.endswith("\n")]


def _tail(stem: Path, ranks: Sequence[Any]) -> str:
    logs = (Path(f"{stem}.{rank}.log").read_text(errors="replace")[-1500:] for rank in range(len(ranks)))
    return "\n".join(logs)


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        try:
            rank.wait(timeout=ALONE_S if rank.poll() is None else 0)
        except subprocess.TimeoutExpired:
            os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()


def line(result: dict[str, Any]) -> str:
    """A result in one line, and an error below it."""
    figures = ", ".join(f"{name} {value}" for name, value in result.get("figures", {}).items())
    seconds = f" ({result['seconds']:.0f} s)" if "seconds" in result else ""
    error = f"\n{result['error']}" if "error" in result else ""
    return f"{'ok  ' if result['ok'] else 'FAIL'} {result['step']}{seconds}: {figures}{error}"


def table(command: str, results: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The results, as benchmarks/README.md shows them."""
    yield f"\n## On a GPU, {date.today().isoformat()}: `python -m scripts.gpu {command}`\n"
    yield "| step | | figures |"
    yield "|---|---|---|"
    for result in results:
        figures = ", ".join(f"{name} {value}" for name, value in result.get("figures", {}).items())
        why = result.get("error", "").strip().splitlines()
        yield f"| {result['step']} | {'ok' if result['ok'] else 'FAIL'} | {figures}{why[-1] if why else ''} |"


if __name__ == "__main__":
    sys.exit(main())
