"""Try the package as others get it: in new environments, outside the checkout.

    python -m scripts.check_package             # builds wheel and sdist, checks them, and tries the wheel alone
    python -m scripts.check_package --stranger  # a clone, what pip brings today, and what README.md shows, as pasted
    python -m scripts.check_package --stranger --cuda  # the same with pip's own torch, a build for CUDA: gigabytes

The first gets the versions in constraints.txt. It runs `hf-zero-stream doctor`, `inspect` and a load. A stranger gets
the newest versions of everything, but of torch only with `--cuda`, and loads also without DeepSpeed.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
LOAD = """\
from importlib.util import find_spec
import torch
from transformers import AutoModel, BertConfig, BertModel
import hf_zero_stream
assert "site-packages" in hf_zero_stream.__file__, hf_zero_stream.__file__
config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=99)
BertModel(config).save_pretrained("bert")
how = {} if find_spec("deepspeed") else {"distributed_config": {"fsdp_size": 2}}
plan = hf_zero_stream.plan("bert", world_size=2, rank=1, **how)
assert plan.load.cost.bytes_read > 0
plain = AutoModel.from_pretrained("bert")
with hf_zero_stream.streaming():
    streamed = AutoModel.from_pretrained("bert")
    target = BertModel(config)
    hf_zero_stream.load_into(target, "bert")
for name, value in plain.state_dict().items():
    assert torch.equal(value, streamed.state_dict()[name]) and torch.equal(value, target.state_dict()[name]), name
print("loaded:", hf_zero_stream.__version__)
"""


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command, and show what it printed if it fails."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env={**kept, **environment}, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}: exit code {done.returncode}\n{done.stdout}")
    return done.stdout


QUIET = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
SHOWN = ("README.md", "docs/index.md")
NOT_PASTED = "hf-zero-stream run "
"""A script to run is the reader's."""


def pasted() -> list[str]:
    """The commands that a reader pastes into a shell, in their order, each once."""
    text = "\n".join((ROOT / name).read_text() for name in SHOWN)
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    shown = [block for language, block in blocks if language not in ("python", "diff")]
    lines = dict.fromkeys(line for block in shown for line in block.splitlines())
    return [line for line in lines if not line.startswith(NOT_PASTED)]


def try_as_stranger(folder: Path, *, cuda: bool) -> None:
    run("git", "clone", "--quiet", ROOT, folder / "clone", cwd=folder)
    venv.create(folder / "env", with_pip=True)
    python = folder / "env" / "bin" / "python"
    (torch,) = re.findall(r"^torch==\S+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    if not cuda:  # the one thing that a reader need not type: pip brings gigabytes else, also where there is no GPU
        run(python, "-m", "pip", "install", "--quiet", torch, cwd=folder)
    path = {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}", "VIRTUAL_ENV": str(folder / "env")}
    for command in pasted():
        print(f"$ {command}", flush=True)
        run("bash", "-ec", command, cwd=folder / "clone", **path, **QUIET)
    print(run(python, "-c", LOAD, cwd=folder, **QUIET).splitlines()[-1])
    run(python, "-m", "pip", "uninstall", "--quiet", "--yes", "deepspeed", cwd=folder)
    print(run(python, "-c", LOAD, cwd=folder, **QUIET).splitlines()[-1], "without DeepSpeed")
    run(python.parent / "hf-zero-stream", "plan", "bert", "--fsdp", "2", cwd=folder, **QUIET)
    assert "No problem found." in run(python.parent / "hf-zero-stream", "doctor", cwd=folder, **QUIET)
    print(run(python, "-m", "pip", "list", "--format", "freeze", cwd=folder), end="")


def main() -> None:
    parser = argparse.ArgumentParser(description="Try the package as others get it.")
    parser.add_argument("--stranger", action="store_true", help="paste what README.md shows")
    parser.add_argument("--cuda", action="store_true", help="as a stranger, with a torch for CUDA")
    options = parser.parse_args()
    if options.stranger:
        with tempfile.TemporaryDirectory(prefix="hf_zero_stream-stranger-") as name:
            try_as_stranger(Path(name), cuda=options.cuda)
        return
    out = ROOT / "dist"
    shutil.rmtree(out, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", out, ROOT, cwd=ROOT)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    print(run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist, cwd=ROOT), end="")
    names = zipfile.ZipFile(wheel).namelist()
    for name in ("py.typed", "auto.pyi", "site/sitecustomize.py"):
        assert f"hf_zero_stream/{name}" in names, f"{name} is not in the wheel"
    foreign = {name.split("/")[0] for name in names} - {"hf_zero_stream"}
    assert all(name.endswith(".dist-info") for name in foreign), f"the wheel has more than the package: {foreign}"
    with tempfile.TemporaryDirectory(prefix="hf_zero_stream-package-") as name:
        folder = Path(name)
        venv.create(folder / "env", with_pip=True)
        python = folder / "env" / "bin" / "python"
        constraints = ROOT / "constraints.txt"
        # torch goes first: pinned, so that the rest of the resolution cannot choose another build of it.
        run(python, "-m", "pip", "install", "--quiet", "-c", constraints, "torch", cwd=folder)
        run(python, "-m", "pip", "install", "--quiet", "-c", constraints, f"{wheel}[deepspeed]", cwd=folder)
        print(run(python, "-c", LOAD, cwd=folder, **QUIET).splitlines()[-1])
        command = folder / "env" / "bin" / "hf-zero-stream"
        assert "encoder.layer" in run(command, "inspect", "bert", cwd=folder, **QUIET)
        assert "No problem found." in run(command, "doctor", "bert", cwd=folder, **QUIET)
        assert "usage: " in run(python, "-m", "hf_zero_stream.run", "--help", cwd=folder, **QUIET)
    print(f"{wheel.name} and {sdist.name} are as they should be.")


if __name__ == "__main__":
    main()
