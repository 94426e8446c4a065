"""The GRPO example runs as its docstring says, with a real vLLM server that it starts."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.support.cluster import ROOT
from tests.support.commands import command_environment


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_it_learns_and_saves(vllm: str, tmp_path: Path) -> None:
    (command,) = re.findall(r"^    (torchrun .*)$", (ROOT / "examples" / "grpo_vllm.py").read_text(), re.MULTILINE)
    words = [vllm if word.endswith("bin/vllm") else word for word in shlex.split(command)]
    words = [str(ROOT / word) if word.endswith(".py") else word for word in words]
    words[1:1] = ["--standalone"]
    done = subprocess.run(words, cwd=tmp_path, env=command_environment(), capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"^step (\d): loss -?\d\.\d+, reward (\d\.\d+)$", done.stdout, re.MULTILINE)
    assert [step for step, _ in found] == ["1", "2", "3"] and all(0 < float(reward) < 1 for _, reward in found)
    log = (tmp_path / "outputs" / "grpo" / "server" / "vllm.log").read_text()
    assert log.count('"POST /finish_weight_update HTTP/1.1" 200') == 3
    assert (tmp_path / "outputs" / "grpo" / "trained" / "model.safetensors").is_file()
