"""Code of users that calls the public functions passes ``mypy --strict``, with the types that it expects."""

import re
import subprocess
import sys
from pathlib import Path

import pytest


USES = """\
from typing import Any
import hf_zero_stream
from hf_zero_stream import Forecast, PendingSave, SaveReport, StreamingConfig, load_into, load_state, plan, save_state
from hf_zero_stream import save_pretrained, streaming
from hf_zero_stream.errors import LoadError

@streaming(StreamingConfig(verify="full"))
def train(model: Any, steps: int) -> float:
    return steps / 2

def use(model: Any, flag: bool) -> None:
    forecast: Forecast = plan("folder", world_size=2, rank=1, device="cuda", adamw="fused")
    if forecast.memory is not None:
        reveal_type(forecast.memory.held["cuda"] + forecast.load.cost.bytes_read)
    reveal_type(train(model, 3))
    reveal_type(load_into(model, "folder"))
    reveal_type(save_pretrained(model, "folder"))
    reveal_type(save_state(model, "folder", tag="now"))
    reveal_type(save_state(model, "folder", asynchronous=True).wait())
    either: SaveReport | PendingSave = save_state(model, "folder", asynchronous=flag)
    reveal_type(load_state(model, "folder"))
    try:
        hf_zero_stream.StreamingAutoModel.from_pretrained("folder")
    except LoadError as error:
        print(error, either)
"""


@pytest.mark.slow
def test_the_public_surface_is_typed(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "uses.py").write_text(USES)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", tmp_path / "cache", "uses.py"]
    done = subprocess.run(command, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout
    assert [revealed.split(".")[-1] for revealed in re.findall(r'Revealed type is "([\w.]+)"', done.stdout)] == [
        *("int", "float", "LoadReport", "SaveReport", "SaveReport", "SaveReport", "Resumed")
    ]
