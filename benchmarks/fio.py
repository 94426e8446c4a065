"""What the disk gives at best: fio's rate for the same files, past the page cache, with many requests in flight."""

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_zero_stream.sources.page_cache import drop_from_cache


REQUEST_BYTES, REQUESTS = 2 * 2**20, 32
MISSING = "fio is not installed (Debian and Ubuntu: apt-get install fio), so its rate is left out."


def is_installed() -> bool:
    return shutil.which("fio") is not None


def fio_seconds(paths: Sequence[Path]) -> float:
    """Seconds in which fio reads all of `paths` once, one after the other.

    Direct reads through libaio; where the file system has none, through the page cache, from which the files are
    dropped before. fio's own start does not count.
    """
    for is_direct in (1, 0):
        drop_from_cache(list(paths))
        done = subprocess.run(_command(paths, is_direct), capture_output=True, text=True, check=False)
        if done.returncode == 0:
            break
    else:
        raise SystemExit(f"fio failed:\n{done.stderr[-2000:]}")
    jobs: list[dict[str, Any]] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    return sum(float(job["read"]["runtime"]) for job in jobs) / 1e3


def _command(paths: Sequence[Path], is_direct: int) -> list[str]:
    common = {
        "rw": "read",
        "bs": REQUEST_BYTES,
        "iodepth": REQUESTS,
        "ioengine": "libaio",
        "direct": is_direct,
        "readonly": None,
        "thread": None,
        "output-format": "json",
    }
    options = [f"--{name}" if value is None else f"--{name}={value}" for name, value in common.items()]
    # One job after the other: a job's last request may be shorter than the others, and its file is read to the end.
    jobs = [option for path in paths for option in (f"--name={path.name}", f"--filename={path}", "--stonewall")]
    return ["fio", *options, *jobs]


def in_words(seconds: Sequence[float], nbytes: int) -> str:
    """The rate that fio has found, over its repeats."""
    rates = sorted(nbytes / each / 1e6 for each in seconds)
    middle, spread = rates[len(rates) // 2], f"{rates[0]:.0f} - {rates[-1]:.0f}"
    how = f"direct reads, {REQUESTS} requests of {REQUEST_BYTES // 2**20} MiB in flight"
    return f"fio: {middle:.0f} MB/s ({spread}), {how}; the files in {nbytes / middle / 1e6:.2f} s"
