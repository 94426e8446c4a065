"""Build the paper GPU, once for each version of torch and of its sources.

    python -m tests.paper_gpu.build       # as `make test` does before the first test; about a minute

This module imports no torch: the library must be loaded before torch is (see :mod:`.cuda`).
"""

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path


SOURCES = Path(__file__).parent / "csrc"

KNOWN = ("2.13",)
"""Versions of torch whose internals this is written for."""

NAME = "paper_gpu_c"


def why_not() -> str:
    """Why there can be no paper GPU here; "" if there can."""
    version = importlib.metadata.version("torch")
    if ".".join(version.split(".")[:2]) not in KNOWN:
        return f"the paper GPU knows torch {', '.join(KNOWN)}, and this is {version}"
    if (_torch() / "lib" / "libtorch_cuda.so").exists():
        return "the paper GPU takes the place of CUDA in builds of torch for CPUs, and this one is for CUDA"
    if sys.platform != "linux" or shutil.which(_compiler()) is None or not _headers().joinpath("Python.h").exists():
        return "the paper GPU needs Linux, g++ and Python's headers"
    return ""


def build() -> Path:
    """The library, which is compiled if it is not there. Raises a RuntimeError with what the compiler says."""
    sources = sorted(SOURCES.iterdir())
    what = [
        importlib.metadata.version("torch").encode(),
        sys.version.encode(),
        *(each.read_bytes() for each in sources),
    ]
    folder = _root() / "paper_gpu" / hashlib.sha256(b"\0".join(what)).hexdigest()[:16]
    library = folder / f"{NAME}.so"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "guard.flock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of tests that run at once, one compiles
        if not library.exists():
            _compile(library)
    return library


def _compile(library: Path) -> None:
    torch, new = _torch(), library.with_suffix(".new")
    command = [
        *(_compiler(), "-O0", "-std=c++20", "-shared", "-fPIC", "-w"),
        *("-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO", f"-DTORCH_EXTENSION_NAME={NAME}", "-DTORCH_API_INCLUDE_EXTENSION_H"),
        *(f"-I{folder}" for folder in (torch / "include", torch / "include/torch/csrc/api/include", _headers())),
        *(str(SOURCES / "paper_gpu.cpp"), "-o", str(new)),
        *(f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}", "-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the paper GPU does not compile:\n{done.stderr}")
    new.rename(library)


def _root() -> Path:
    """Beside what DeepSpeed compiles."""
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")


def _torch() -> Path:
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent


def _headers() -> Path:
    return Path(sysconfig.get_paths()["include"])


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


if __name__ == "__main__":
    lacking = why_not()
    if lacking:
        print(f"{lacking}: tests that need it are skipped.", flush=True)
    else:
        print("Compiling the paper GPU, once; that takes a minute", flush=True)
        build()
