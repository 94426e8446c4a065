"""``inspect``, ``plan`` and ``verify`` of a URL say what they say of a folder with the same files."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.support.cli import run, run_json
from tests.support.http_files import http_files
from tests.support.zoo import make_checkpoint


@pytest.mark.plugin("tools", "forecast")
def test_commands_on_a_url(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3_moe", tmp_path / "moe", torch.bfloat16)
    shards = sorted(folder.glob("*.safetensors"))
    with http_files(folder) as how:
        for command in (["inspect"], ["plan", "--world-size", "4"]):
            how.requests.clear()
            run_json(command[0], how.address, *command[1:])
            assert set(Counter(path for path, _, _ in how.requests).values()) == {1}, f"{command}: asked for once"
        for command in (["inspect"], ["verify"]):
            here, there = run_json(*command, str(folder)), run_json(*command, how.address)
            assert {**here, "path": how.address} == there, command
        needed = [
            run_json("plan", path, "--world-size", "4")["load"]["bytes_needed"] for path in (str(folder), how.address)
        ]
        assert needed[0] == needed[1]
        shards[1].unlink()
        found = run_json("verify", how.address, code=1)
        assert [(fault["file"], fault["kind"]) for fault in found["faults"]] == [(shards[1].name, "missing")]
        how.fault = lambda path, number: "403"
        assert "access is denied" in run("verify", how.address, code=1).stderr
        assert "https://" in run("inspect", "https:///nowhere", code=1).stderr
