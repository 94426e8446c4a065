"""A web server in a process of its own, which gives ranges of a folder's files over a link of known speed and latency.

python -m benchmarks.slow_server FOLDER --prefix /bucket --rate 400 --latency 50 --fault-every 100

It prints its address, and at the end of its input, as JSON, what was asked of it: a list of
[seconds of the monotonic clock, path, first byte, one past the last].
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.launch import ROOT


class Served:
    """A server that runs elsewhere; `requests` is known once it has ended."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.requests: list[tuple[float, str, int, int]] = []

    @property
    def nbytes(self) -> int:
        return sum(stop - start for _, _, start, stop in self.requests)


@contextmanager
def slow_server(
    folder: Path, *, rate: float, latency: float, prefix: str = "", fault_every: int = 0
) -> Iterator[Served]:
    """The server of `folder`; all connections share `rate` million bytes a second, requests wait `latency` ms each."""
    options = ["--rate", rate, "--latency", latency, "--prefix", prefix, "--fault-every", fault_every]
    command: list[Any] = [sys.executable, "-m", "benchmarks.slow_server", folder, *options]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    with subprocess.Popen(list(map(str, command)), **pipes) as process:
        assert process.stdin is not None and process.stdout is not None
        served = Served(process.stdout.readline().strip())
        try:
            yield served
        finally:
            process.stdin.close()
            served.requests = [tuple(each) for each in json.loads(process.stdout.read() or "[]")]


def main() -> None:
    from tests.support.http_files import Behaviour, http_files

    parser = argparse.ArgumentParser(description="Give ranges of files over a link of known speed and latency.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prefix", default="", help="what all paths begin with, such as a bucket")
    parser.add_argument("--rate", type=float, default=400, help="of all connections together, 10^6 bytes per second")
    parser.add_argument("--latency", type=float, default=50, help="of each request, in milliseconds")
    parser.add_argument("--fault-every", type=int, default=0, help="every so manieth request gets 503")
    settings = parser.parse_args()
    times: list[float] = []

    def fault(path: str, number: int) -> str:
        times.append(time.monotonic())
        return "503" if settings.fault_every and number % settings.fault_every == settings.fault_every // 2 else ""

    how = Behaviour(latency_s=settings.latency / 1e3, bytes_per_second=settings.rate * 1e6, fault=fault)
    with http_files(settings.folder, how, prefix=settings.prefix):
        print(how.address, flush=True)
        sys.stdin.read()
    print(json.dumps([(seconds, *asked) for seconds, asked in zip(times, how.requests, strict=True)]))


if __name__ == "__main__":
    main()
