"""Sets of versions that people have, each in an environment of its own, and what works in it.

An environment lies on top of the one that runs this: what a set does not name is taken from there, so that torch, of
which one version is several gigabytes, is installed once.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from benchmarks.venvs import environment_of
from tests.support.cluster import ROOT


STACKS: dict[str, dict[str, str]] = {
    "oldest": {"transformers": "5.1.0", "accelerate": "1.4.0", "deepspeed": "0.18.9", "peft": "0.18.0"},
    "LLaMA-Factory's": {"transformers": "5.6.2", "accelerate": "1.11.0"},
    "axolotl's": {"transformers": "5.16.1", "deepspeed": "0.18.9"},
    "ms-swift's": {"transformers": "5.19.0"},
    "one before the newest": {"transformers": "5.23.0"},
    "newest": {"transformers": "5.24.0", "accelerate": "1.15.0", "deepspeed": "0.19.8", "peft": "0.21.2"},
    "newest, torch for CUDA and no driver": {
        "torch": "2.15.0",
        "transformers": "5.24.0",
        "accelerate": "1.15.0",
        "deepspeed": "0.19.8",
        "peft": "0.21.2",
    },
    "newest, transformers held back": {"transformers": "5.17.0"},
    "newest, accelerate held back": {"transformers": "5.24.0", "accelerate": "1.11.0"},
    "newest, deepspeed held back": {"transformers": "5.24.0", "deepspeed": "0.18.9"},
}
"""What is not named is what the tests are run with."""

SHOWN = ("torch", "transformers", "accelerate", "deepspeed", "peft")


def python_of(name: str) -> Path:
    """The Python of the environment, made at the first call."""
    folder = ROOT / ".drift" / "".join(letter if letter.isalnum() else "-" for letter in name)
    python = folder / "bin" / "python"
    if not (folder / "installed").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        site = next((folder / "lib").glob("python*/site-packages"))
        (site / "below.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
        wanted = [f"{package}=={version}" for package, version in STACKS[name].items()]
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *wanted], check=True)
        (folder / "installed").touch()
    return python


def versions_in(python: Path) -> dict[str, str]:
    code = f"import json, importlib.metadata as m; print(json.dumps({{name: m.version(name) for name in {SHOWN}}}))"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def outcomes(name: str) -> tuple[dict[str, str], dict[str, str]]:
    """What was tried in a set, and what came of it: each home of :mod:`.smoke`, and each type of models."""
    python = python_of(name)
    environment = environment_of(python.parents[1])
    own = versions_in(python)
    # What DeepSpeed compiles is not shared between versions of it and of torch.
    compiled = {package: own[package].partition("+")[0] for package in ("deepspeed", "torch")}
    shares = all(importlib.metadata.version(package).partition("+")[0] == own for package, own in compiled.items())
    folder = os.environ.get("TORCH_EXTENSIONS_DIR") if shares else None
    own_folder = ROOT / ".drift" / "-".join(["extensions", *compiled.values()])
    environment["TORCH_EXTENSIONS_DIR"] = folder or str(own_folder)
    command = [str(python), "-W", "ignore", "-m", "tests.drift", "here"]
    with (python.parents[1] / "errors.txt").open("w") as errors:
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
    found: dict[str, dict[str, str]] = {"home": {}, "type": {}}
    for line in done.stdout.splitlines():
        if line.startswith(('{"home"', '{"type"')):
            (kind, what), (_, outcome) = json.loads(line).items()
            found[kind][what] = outcome
    if done.returncode:
        found["home"]["the rest"] = f"exit code {done.returncode}, see {errors.name}"
    return found["home"], found["type"]
