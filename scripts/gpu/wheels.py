"""Collects, where there is a network, the wheels that a GPU machine without one may lack."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


NEEDED = (
    *("deepspeed", "einops", "hjson", "msgpack", "ninja", "obstore", "packaging", "psutil", "py-cpuinfo", "pydantic"),
    *("pydantic-core", "annotated-types", "typing-inspection", "typing-extensions", "tqdm", "typer"),
    *("click", "shellingham", "annotated-doc", "rich", "markdown-it-py", "mdurl"),
    *("accelerate", "pytest", "iniconfig", "pluggy", "pygments"),
)
"""What this package and its steps import beside torch, transformers and what these bring."""

PYTHON = "3.12"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64", "any")


def collect(folder: Path) -> int:
    """Put the wheels into `folder`, for ``pip install --no-index --no-deps --find-links``; returns pip's exit code.

    DeepSpeed comes as its source, of which pip makes a wheel without compiling anything.
    """
    constraints = (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()
    versions = dict(line.split("==") for line in constraints if "==" in line and not line.startswith("#"))
    wanted = [f"{name}=={versions[name]}" if name in versions else name for name in NEEDED]
    pip = [sys.executable, "-m", "pip"]
    target = ["--python-version", PYTHON, "--implementation", "cp", "--abi", "cp312", "--abi", "none", "--abi", "abi3"]
    target += [word for platform in PLATFORMS for word in ("--platform", platform)]
    binary = [each for each in wanted if not each.startswith("deepspeed")]
    codes = [
        subprocess.call([*pip, "download", "--no-deps", "--only-binary=:all:", *target, "-d", str(folder), *binary]),
        subprocess.call([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), wanted[0]]),
    ]
    return max(codes)
