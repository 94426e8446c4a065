"""What the figures were measured on, in words that name no host and no folder."""

import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import Any

from hf_zero_stream.sources.local import kind_of_file_system


LIBRARIES = (
    "hf_zero_stream",
    "torch",
    "transformers",
    "deepspeed",
    "safetensors",
    "fastsafetensors",
    "runai-model-streamer",
)


def describe(folder: Path) -> dict[str, Any]:
    """This machine, the file system that holds `folder`, and the versions of the libraries in question."""
    cpu = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return {
        "cpu": cpu[1] if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": f"{platform.system()} {platform.release()}",
        "file_system": kind_of_file_system(str(folder)) or "unknown file system",
        "python": platform.python_version(),
        "versions": {name: version for name in LIBRARIES if (version := _version(name))},
    }


def in_words(machine: dict[str, Any]) -> str:
    """The machine in one line."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB, {machine['kernel']}, "
        f"{machine['file_system']}; Python {machine['python']}, {versions}"
    )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
