"""Source distributions of installed packages, as pip finds them."""

import subprocess
import sys
import tarfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


class Unavailable(Exception):
    """Why a suite cannot be run here."""


def source_of(package: str, cache: Path) -> Path:
    """The folder of the source distribution of the installed version of `package`, fetched once.

    Raises:
        Unavailable: it is not installed, or pip cannot fetch it.
    """
    try:
        name = f"{package}-{version(package).partition('+')[0]}"
    except PackageNotFoundError as error:
        raise Unavailable(f"{package} is not installed") from error
    folder = cache / name
    if folder.is_dir():
        return folder
    specifier = name.replace(f"{package}-", f"{package}==")
    _pip("download", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "--dest", str(cache), specifier)
    archives = list(cache.glob(f"{name}.tar.gz"))
    if not archives:
        raise Unavailable(f"pip found no source distribution of {specifier}")
    with tarfile.open(archives[0]) as archive:
        archive.extractall(cache, filter="data")
    return folder


def installed_to(folder: Path, *packages: str) -> Path:
    """`folder` with pure Python `packages` that only these suites need, installed once; raises Unavailable."""
    if not folder.is_dir():
        _pip("install", "--no-deps", "--target", str(folder), *packages)
    return folder


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise Unavailable(f"pip {arguments[0]} {arguments[-1]}: {lines[0] if lines else 'failed'}")
