"""Commands on a repository of the Hub, which is a server in this process: headers are fetched, and nothing else."""

import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import hf_zero_stream
from benchmarks.moe_checkpoint import make_moe_checkpoint
from tests.support.cli import run, run_json


Store = Callable[[], str]
REPOSITORY, COMMIT = "someone/tiny-moe", "a" * 40
ITS_PATH = "(?:someone/)?tiny-moe"
"""In requests; the one without an organisation has the same files."""


class Hub(BaseHTTPRequestHandler):
    """As much of the Hub as downloads need: a listing, files, and ranges of files; shards lie at `store`, if given."""

    def __init__(self, folder: Path, sent: dict[str, int], ranges: bool, store: Store | None, *args: Any) -> None:
        self.folder, self.sent, self.ranges, self.store = folder, sent, ranges, store
        super().__init__(*args)

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        resolved = re.fullmatch(rf"/{ITS_PATH}/resolve/[^/]+/(.+)", self.path)
        if re.match(rf"/api/models/{ITS_PATH}(/revision/[^/]+)?(\?.*)?$", self.path):
            files = [{"rfilename": path.name} for path in sorted(self.folder.iterdir())]
            text = json.dumps({"id": REPOSITORY, "sha": COMMIT, "siblings": files}).encode()
            self.reply(200, text, {"Content-Type": "application/json"}, body)
        elif self.path.startswith(f"/api/models/{REPOSITORY}/tree/"):
            paths = sorted(self.folder.iterdir())
            tree = [{"type": "file", "path": path.name, "size": path.stat().st_size, "oid": COMMIT} for path in paths]
            self.reply(200, json.dumps(tree).encode(), {"Content-Type": "application/json"}, body)
        elif resolved and (self.folder / resolved[1]).is_file():
            self.file(resolved[1], body)
        else:
            self.reply(404, b"", {"X-Error-Code": "RepoNotFound"}, body)

    def file(self, name: str, body: bool) -> None:
        data = (self.folder / name).read_bytes()
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(data).hexdigest()}"'}
        if self.store is not None and name.endswith(".safetensors"):
            linked = {"X-Linked-Etag": headers["ETag"], "X-Linked-Size": str(len(data))}
            headers |= {**linked, "Location": f"{self.store()}/{name}?Signature=a%2Fb&Expires=1"}
            self.reply(302, b"", headers, body)
            return
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not wanted or not self.ranges:
            self.reply(200, data, headers, body, name)
            return
        start, stop = int(wanted[1]), min(int(wanted[2]) + 1, len(data))
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        self.reply(206, data[start:stop], headers, body, name)

    def reply(self, status: int, data: bytes, headers: dict[str, str], body: bool, name: str = "") -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(data)
            self.sent[name] = self.sent.get(name, 0) + len(data)


@contextmanager
def hub(folder: Path, ranges: bool = True, store: Store | None = None) -> Iterator[tuple[str, dict[str, int]]]:
    """(address, bytes of each file that were sent)."""
    sent: dict[str, int] = {}
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, folder, sent, ranges, store))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", sent
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def on_hub(address: str, home: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a command in a process of its own: huggingface_hub reads its settings when it is imported."""
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "0",
        "HF_ENDPOINT": address,
        "HF_HOME": str(home),
        "NO_PROXY": "127.0.0.1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    # Without DS_ACCELERATOR DeepSpeed says on stdout which it found, where only results may be.
    for name in ("HF_HUB_CACHE", "HF_TOKEN", "DS_ACCELERATOR"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "hf_zero_stream", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


@pytest.fixture
def on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run a command in this process; what huggingface_hub has read from the environment is replaced."""

    def on_the_hub(address: str, *arguments: str, code: int = 0) -> Any:
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        for name, value in {
            "ENDPOINT": address,
            "HF_HUB_OFFLINE": False,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_CACHE": str(tmp_path / "home" / "hub"),
            "HUGGINGFACE_CO_URL_TEMPLATE": address + "/{repo_id}/resolve/{revision}/{filename}",
        }.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        return run(*arguments, code=code)

    return on_the_hub


@pytest.mark.plugin("forecast")
@pytest.mark.slow
def test_plan_of_a_repository_reads_headers_only(tmp_path: Path) -> None:
    folder = make_moe_checkpoint(tmp_path / "moe", 1e7, num_layers=2, num_experts=8)
    with hub(folder) as (address, sent):
        done = on_hub(address, tmp_path / "home", "plan", REPOSITORY, "--world-size", "3", "--format", "json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    local = hf_zero_stream.plan(str(folder), world_size=3, device="cuda")
    needed = local.load.cost.bytes_needed
    assert found["load"]["bytes_needed"] == needed <= found["load"]["bytes_read"] <= 1.01 * needed
    assert found["memory"] == asdict(local.memory)
    shards = {os.path.basename(shard.path): shard for shard in local.load.shards}
    assert {name for name in sent if name.endswith(".safetensors")} == shards.keys()
    for name, shard in shards.items():
        assert sent[name] <= 200_000 < shard.size_bytes / 5  # once for our plan, once for stock's
    assert not [path for path in (tmp_path / "home").rglob("*") if path.is_file()], "nothing stays in the cache"


@pytest.mark.plugin("tools")
def test_long_header_of_a_single_file(tmp_path: Path, on_the_hub: Callable[..., Any]) -> None:
    """A second request for the rest of the header; and what was looked at is not taken for a download."""
    folder, size = tmp_path / "one", 400_000
    folder.mkdir()
    tensors = {f"block.{number}.a_rather_long_name.weight": torch.zeros(1) for number in range(2000)}
    save_file({**tensors, "big": torch.zeros(size)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("not asked for")
    with hub(folder) as (address, sent):
        done = on_the_hub(address, "inspect", REPOSITORY, "--no-model", "--format", "json")
        verified = on_the_hub(address, "verify", REPOSITORY, code=1)
    found = json.loads(done.stdout)
    lines = {line["name"]: line["count"] for line in found["tensors"]}
    assert lines == {"big": 1, "block.{0...1999}.a_rather_long_name.weight": 2000}
    assert found["bytes"] == (folder / "model.safetensors").stat().st_size > 4 * size
    assert 100_000 < sent["model.safetensors"] < 4 * size / 2 and "tokenizer.json" not in sent
    assert "no such repository in the Hub's cache" in verified.stderr


@pytest.mark.plugin("tools")
def test_server_without_ranges(tmp_path: Path, on_the_hub: Callable[..., Any]) -> None:
    save_file({"big": torch.zeros(9)}, tmp_path / "model.safetensors")
    with hub(tmp_path, ranges=False) as (address, _):
        done = on_the_hub(address, "inspect", REPOSITORY, code=1)
    assert "does not give ranges" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.plugin("tools")
def test_repository_that_is_not_there(tmp_path: Path, on_the_hub: Callable[..., Any]) -> None:
    with hub(tmp_path) as (address, _):
        for name in ("nobody/nothing", "nothing"):
            done = on_the_hub(address, "inspect", name, code=1)
            assert f"ReadError: {name}: there is no such file or folder, and on the Hub: " in done.stderr


@pytest.mark.plugin("tools")
@pytest.mark.parametrize("path", ["tiny-moe", "hf://tiny-moe"])
def test_an_id_without_an_organisation(path: str, tmp_path: Path, on_the_hub: Callable[..., Any]) -> None:
    folder = make_moe_checkpoint(tmp_path / "moe", 1e6, num_layers=1, num_experts=2)
    with hub(folder) as (address, _):
        found = json.loads(on_the_hub(address, "inspect", path, "--format", "json").stdout)
    assert found["model"]["class"] == "Qwen3MoeForCausalLM" and found["path"] == path


@pytest.mark.plugin("tools")
def test_what_the_cache_holds_is_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository's id means its snapshot in the cache; there is no network here."""
    repository = tmp_path / "models--someone--tiny-moe"
    snapshot = make_moe_checkpoint(repository / "snapshots" / COMMIT, 1e6, num_layers=1, num_experts=2)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for command in (["inspect", "--no-model"], ["verify"]):
        found = run_json(*command, REPOSITORY)
        assert found["bytes"] == sum(path.stat().st_size for path in snapshot.glob("*.safetensors"))
        assert run_json(*command, REPOSITORY, "--revision", COMMIT) == found
    next(snapshot.glob("*.safetensors")).unlink()
    assert [fault["kind"] for fault in run_json("verify", REPOSITORY, code=1)["faults"]] == ["missing"]
    assert "the Hub does not give" in run("inspect", REPOSITORY, code=1).stderr
