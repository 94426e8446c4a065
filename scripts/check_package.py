"""Build the wheel and the sdist, check them, and try the wheel alone: in a new environment, outside the checkout.

    python -m scripts.check_package

The new environment gets the versions in constraints.txt. It runs `hf-zero-stream doctor`, `inspect` and a load.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
LOAD = """\
import sys
from pathlib import Path
import torch
from transformers import AutoModel, BertConfig, BertModel
import hf_zero_stream
assert "site-packages" in hf_zero_stream.__file__, hf_zero_stream.__file__
config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=99)
BertModel(config).save_pretrained("bert")
plan = hf_zero_stream.plan("bert", world_size=2, rank=1)
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


def main() -> None:
    out = ROOT / "dist"
    shutil.rmtree(out, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", out, ROOT, cwd=ROOT)
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    print(run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist, cwd=ROOT), end="")
    names = zipfile.ZipFile(wheel).namelist()
    for name in ("py.typed", "site/sitecustomize.py"):
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
        run(python, "-m", "pip", "install", "--quiet", "-c", constraints, wheel, cwd=folder)
        quiet = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        print(run(python, "-c", LOAD, cwd=folder, **quiet).splitlines()[-1])
        command = folder / "env" / "bin" / "hf-zero-stream"
        assert "encoder.layer" in run(command, "inspect", "bert", cwd=folder, **quiet)
        assert "No problem found." in run(command, "doctor", "bert", cwd=folder, **quiet)
        assert "usage: " in run(python, "-m", "hf_zero_stream.run", "--help", cwd=folder, **quiet)
    print(f"{wheel.name} and {sdist.name} are as they should be.")


if __name__ == "__main__":
    main()
