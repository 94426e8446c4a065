"""Code of users that calls the public functions passes ``mypy --strict``, with the types that it expects."""

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hf_zero_stream.auto import STREAMING_CLASSES
from hf_zero_stream.saving.arguments import SIGNATURE, SaveArguments
from tests.support.cluster import ROOT


USES = """\
from pathlib import Path
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
        loaded = hf_zero_stream.StreamingAutoModel.from_pretrained("folder", dtype="auto", strict=True, ds_config={})
    except LoadError as error:
        print(error, either)
    reveal_type(loaded)
    print(loaded.streaming_report.table(), loaded.config)
    generator = hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(Path("folder"))
    generator.generate(max_new_tokens=3)
    reveal_type(load_into(generator, Path("folder")))
    reveal_type(StreamingConfig(staging_bytes="64MiB").verify)
    with streaming(verify="full", staging_bytes="64MiB"):
        plan(Path("folder"), world_size=2, dtype="bf16", ds_config=Path("ds.json"))
"""

MISUSES = """\
from hf_zero_stream import StreamingAutoModel, StreamingAutoModle, StreamingConfig, save_pretrained

def use(model: object) -> None:
    save_pretrained(model, "folder", dtyp="float32")
    save_pretrained(model, "folder", variant=1)
    StreamingConfig(verify="ful")
    StreamingAutoModel.from_pretrained(model)
    StreamingAutoModel.from_pretrained("folder", strict="yes")
"""


def check(folder: Path, source: str) -> tuple[int, str]:
    """(exit code, output) of ``mypy --strict`` on a user's script."""
    pytest.importorskip("mypy")
    (folder / "uses.py").write_text(source)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", folder / "cache", "uses.py"]
    # mypy does not see packages that are installed in editable mode by a hook on imports.
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return done.returncode, done.stdout


def test_the_stub_names_what_there_is() -> None:
    stub = ast.parse((ROOT / "hf_zero_stream" / "auto.pyi").read_text())
    classes = {node.name: node for node in stub.body if isinstance(node, ast.ClassDef)}
    assert {name for name in classes if name.startswith("Streaming")} == set(STREAMING_CLASSES)
    (written,) = (node for node in classes["_Streaming"].body if getattr(node, "name", "") == "from_pretrained")
    shown = inspect.signature(STREAMING_CLASSES["StreamingAutoModel"].from_pretrained)
    assert (
        str(shown).partition(" ->")[0].replace("'", "").replace(" = ", "=")
        == f"({ast.unparse(written.args).removeprefix('cls, ')})"
    )
    taken = set(SIGNATURE.parameters) - {"self", "save_directory", "max_shard_size", "kwargs"}
    assert set(SaveArguments.__annotations__) == taken


@pytest.mark.plugin("forecast")
@pytest.mark.slow
def test_the_public_surface_is_typed(tmp_path: Path) -> None:
    code, text = check(tmp_path, USES)
    assert code == 0, text
    assert [revealed.split(".")[-1] for revealed in re.findall(r'Revealed type is "([\w.]+)"', text)] == [
        *(
            "int",
            "float",
            "LoadReport",
            "SaveReport",
            "SaveReport",
            "SaveReport",
            "Resumed",
            "StreamedModel",
            "LoadReport",
        )
    ]


@pytest.mark.slow
def test_misuses_are_errors(tmp_path: Path) -> None:
    code, text = check(tmp_path, MISUSES)
    assert code == 1
    assert [int(line) for line in re.findall(r"^uses.py:(\d+): error", text, re.MULTILINE)] == [1, 4, 5, 6, 7, 8], text
