"""Finds what this repository needs from the system; installs it with apt-get if run as root, else names it.

    python3 scripts/system_packages.py

``make`` runs this before everything else, so it needs nothing but Python. DeepSpeed compiles the parts that talk
between CPUs and to NVMe at their first use.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


__all__ = [
    "ASYNC_IO",
    "COMPILER",
    "FUSE",
    "HEADERS",
    "MPICH",
    "NEEDS",
    "Need",
    "VENV",
    "explanation",
    "lacking",
    "main",
    "may_install",
]


@dataclass(frozen=True)
class Need:
    """Something that a package of Debian's provides.

    Args:
        package: its name.
        purpose: what fails without it.
        is_there: whether the system has it, from that package or from elsewhere.
    """

    package: str
    purpose: str
    is_there: Callable[[], bool]


def _compiler() -> str | None:
    """The C++ compiler that torch calls, and DeepSpeed through it."""
    return shutil.which(shlex.split(os.environ.get("CXX") or "c++")[0])


def _has_libaio() -> bool:
    compiler = _compiler()
    if compiler is None:
        return Path("/usr/include/libaio.h").exists()
    preprocess = [compiler, "-E", "-x", "c++", "-"]
    done = subprocess.run(preprocess, input=b"#include <libaio.h>\n", capture_output=True)
    return done.returncode == 0


def _has_python_headers() -> bool:
    return Path(sysconfig.get_path("include", scheme="posix_prefix"), "Python.h").exists()


_PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"

VENV = Need(f"{_PYTHON}-venv", "python3 -m venv", lambda: importlib.util.find_spec("ensurepip") is not None)
COMPILER = Need(
    "g++", "DeepSpeed's communication between CPUs: the demo and most tests", lambda: _compiler() is not None
)
HEADERS = Need(f"{_PYTHON}-dev", "whatever DeepSpeed compiles: the demo and most tests", _has_python_headers)
ASYNC_IO = Need("libaio-dev", "DeepSpeed's offload to NVMe: its tests", _has_libaio)
MPICH = Need("mpich", "the test of mpirun", lambda: shutil.which("mpirun.mpich") is not None)
FUSE = Need("fuse3", "the test of a slow shared disk", lambda: shutil.which("fusermount3") is not None)
NEEDS = (VENV, COMPILER, HEADERS, ASYNC_IO, MPICH, FUSE)


def lacking(*needs: Need) -> list[Need]:
    """Those of `needs` that the system lacks; default: of all."""
    return [need for need in needs or NEEDS if not need.is_there()]


def may_install() -> bool:
    """Whether :func:`main` installs what is lacking."""
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def explanation(needs: list[Need]) -> str:
    """What is lacking, what for, and the command that installs it."""
    purposes = "; ".join(f"{need.package} ({need.purpose})" for need in needs)
    names = " ".join(need.package for need in needs)
    return f"This system lacks {purposes}. On Debian and Ubuntu: apt-get install {names}"


def main() -> None:
    """Install what is lacking, if that is possible; say what is lacking still."""
    needs = lacking()
    if needs and may_install():
        _install([need.package for need in needs])
        needs = lacking()
    if needs:
        print(explanation(needs), file=sys.stderr)


def _install(packages: list[str]) -> None:
    print(f"Installing {' '.join(packages)}", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    # A machine that has just started may be installing its updates.
    apt_get = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=120"]
    for command in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
        # What fails here is said by apt-get, and is found to be lacking still.
        subprocess.run([*apt_get, *command], env=environment, stdin=subprocess.DEVNULL, check=False)


if __name__ == "__main__":
    main()
