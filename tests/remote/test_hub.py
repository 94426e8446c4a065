"""``hf://`` loads from a server that imitates the Hub, and redirects to a store by addresses with signatures."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.remote.test_hub_commands import COMMIT, REPOSITORY, hub, on_hub
from tests.support.cluster import ROOT, free_port
from tests.support.http_files import http_files
from tests.support.zoo import make_checkpoint


SCRIPT = """
import json, sys, torch, transformers
from transformers import AutoModelForCausalLM
import hf_zero_stream
from tests.support.parity import differences, ds_config
repository, folder = sys.argv[1:]
how = {"dtype": torch.bfloat16}
plain = AutoModelForCausalLM.from_pretrained(folder, **how)
found = []
for path, more in (
    (f"hf://{repository}", {}),
    (f"hf://{repository}@main", {"token": "hf_secret"}),
    (f"hf://{repository}", {"revision": "main"}),
):
    with hf_zero_stream.streaming(hf_zero_stream.StreamingConfig(progress=False)):
        model = AutoModelForCausalLM.from_pretrained(path, ds_config=ds_config(torch.bfloat16), **how, **more)
    found += [f"{path}: {each}" for each in differences(model, plain, torch.bfloat16)]
for path, more in ((f"hf://{repository}@main", {"revision": "v2"}), ("hf://a b", {})):
    try:
        hf_zero_stream.plan(path, world_size=2, **more)
    except hf_zero_stream.errors.ConfigError as error:
        found.append(str(error))
print(json.dumps(found))
"""


@pytest.mark.plugin("tools", "forecast")
def test_equals_plain_loading_and_nothing_is_stored(tmp_path: Path) -> None:
    folder, home = make_checkpoint("qwen3_moe", tmp_path / "moe", torch.bfloat16), tmp_path / "home"
    with http_files(folder) as store, hub(folder, store=lambda: store.address) as (address, sent):
        store.tag = lambda path: "of the store"
        environment = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
        environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        environment |= {"PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1", "DS_ACCELERATOR": "cpu"}
        command = [sys.executable, "-c", SCRIPT, REPOSITORY, str(folder)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        verified = on_hub(address, home, "verify", f"hf://{REPOSITORY}", "--format", "json")
    assert len(found) == 2 and "expected one revision" in found[0] and "hf://organisation/name" in found[1], found
    shards = sorted(path.name for path in folder.glob("*.safetensors"))
    assert {path.lstrip("/") for path, _, _ in store.requests} == set(shards)
    assert not [name for name in sent if name.endswith(".safetensors")], "weights come from the store"
    assert not list(home.rglob("*.safetensors")) and COMMIT
    assert json.loads(verified.stdout)["shards"] == len(shards), verified.stdout + verified.stderr
    assert verified.returncode == 0


@pytest.mark.plugin("tools")
def test_a_redirect_to_a_file_is_refused(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3_moe", tmp_path / "moe")
    with hub(folder, store=lambda: f"file://{folder}") as (address, _):
        done = on_hub(address, tmp_path / "home", "inspect", f"hf://{REPOSITORY}", "--no-model")
    assert done.returncode == 1 and "redirects from http to file:, which is not followed" in done.stderr, done.stderr
