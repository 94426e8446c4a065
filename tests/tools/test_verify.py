"""`verify` and soundness.py: every kind of fault is found and named, and several of them together."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hf_zero_stream.checkpoint.index import shards_of
from hf_zero_stream.errors import CheckpointError
from hf_zero_stream.plugins.tools.soundness import check_soundness
from tests.support.cli import run, run_json
from tests.support.zoo import ZOO, Checkpoint


SHARDS = {
    "model-00001-of-00003.safetensors": ["a", "b"],
    "model-00002-of-00003.safetensors": ["c"],
    "model-00003-of-00003.safetensors": ["d", "e"],
}
FIRST, SECOND, THIRD = SHARDS
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound checkpoint of three shards."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for number, (shard, names) in enumerate(SHARDS.items()):
        write(folder / shard, names, number)
    write_index(folder)
    return folder


def write(path: Path, names: list[str], seed: int = 0) -> None:
    save_file({name: torch.full((5, 3), seed + 0.5) for name in names}, path, metadata={"format": "pt"})


def write_index(folder: Path, **changes: Any) -> None:
    weight_map = {name: shard for shard, names in SHARDS.items() for name in names} | changes
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 300}, "weight_map": weight_map}))


# --------------------------------------------------------------------------------------------- what may be wrong


def lose_shard(folder: Path) -> None:
    (folder / SECOND).unlink()


def dangle(folder: Path) -> None:
    (folder / SECOND).unlink()
    (folder / SECOND).symlink_to(folder / "not-downloaded")


def make_unreadable(folder: Path) -> None:
    (folder / SECOND).unlink()
    (folder / SECOND).mkdir()  # permissions do not stop a test that is run by root


def truncate(folder: Path) -> None:
    os.truncate(folder / SECOND, (folder / SECOND).stat().st_size - 7)


def append(folder: Path) -> None:
    with open(folder / SECOND, "ab") as file:
        file.write(b"more")


def replace_by_text(folder: Path) -> None:
    (folder / SECOND).write_text("version https://git-lfs.github.com/spec/v1\n")


def lie_about_shape(folder: Path) -> None:
    data = (folder / SECOND).read_bytes()
    (folder / SECOND).write_bytes(data.replace(b"[5,3]", b"[5,4]"))


def lose_tensor(folder: Path) -> None:
    write(folder / FIRST, ["a"])


def move_tensor(folder: Path) -> None:
    write_index(folder, d=FIRST)


def double_tensor(folder: Path) -> None:
    write(folder / THIRD, ["d", "e", "b"])


def break_index(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": ')


def empty_index(folder: Path) -> None:
    (folder / INDEX).write_text('{"metadata": {}, "weight_map": {}}')


def leave_folder(folder: Path) -> None:
    write_index(folder, c="../outside.safetensors", x="/etc/passwd.safetensors")


def link_to_a_folder(folder: Path) -> None:
    (folder / SECOND).unlink()
    (folder / SECOND).symlink_to(folder.parent)


def lose_index(folder: Path) -> None:
    (folder / INDEX).unlink()


def cut_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "lla')


def double_key_of_config(folder: Path) -> None:
    (folder / "config.json").write_text('\n{"model_type": "llama", "model_type": "bert"}')


def lose_all(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


FAULTS: list[tuple[Callable[[Path], None], list[tuple[str, str, str]]]] = [
    (cut_config, [("config.json", "config", "expected a JSON object")]),
    (double_key_of_config, [("config.json", "config", "'model_type' occurs twice")]),
    (lose_shard, [(SECOND, "missing", "not there")]),
    (dangle, [(SECOND, "missing", "link to a file that is not there")]),
    (make_unreadable, [(SECOND, "unreadable", "found a folder")]),
    (truncate, [(SECOND, "header", "truncated")]),
    (append, [(SECOND, "header", "belong to no tensor")]),
    (replace_by_text, [(SECOND, "header", "header length")]),
    (lie_about_shape, [(SECOND, "header", "'c'")]),
    (lose_tensor, [(FIRST, "missing", "'b'")]),
    (move_tensor, [(FIRST, "misplaced", "'d'")]),
    (double_tensor, [(THIRD, "duplicate", "'b'")]),
    (break_index, [(INDEX, "index", "JSON")]),
    (empty_index, [(INDEX, "index", "weight_map")]),
    (leave_folder, [(INDEX, "index", "../outside"), (INDEX, "index", "/etc/passwd")]),
    (link_to_a_folder, [(SECOND, "link", "found a folder")]),
    (lose_index, [(INDEX, "missing", FIRST)]),
    (lose_all, [("model.safetensors", "missing", "nor any safetensors")]),
]


@pytest.mark.parametrize(("damage", "expected"), FAULTS, ids=[damage.__name__ for damage, _ in FAULTS])
def test_each_fault_is_named(
    folder: Path, damage: Callable[[Path], None], expected: list[tuple[str, str, str]]
) -> None:
    """With its file and its kind; and there is no fault beside it."""
    damage(folder)
    found = run_json("verify", str(folder), code=1)
    assert not found["sound"]
    assert [(fault["file"], fault["kind"]) for fault in found["faults"]] == [entry[:2] for entry in expected]
    text = run("verify", str(folder), code=1).stdout
    for fault, (file, kind, words) in zip(found["faults"], expected, strict=True):
        assert words in fault["message"] and str(folder / file) not in fault["message"]
        assert any(line.startswith(f"| {file} ") and kind in line and words in line for line in text.splitlines())


@pytest.mark.parametrize(
    ("files", "advice"),
    [
        ([], "safetensors file."),
        (["checkpoint-10/model.safetensors", ".hf_zero_stream-saving-1/model.safetensors"], "give 'checkpoint-10'"),
        (["model.gguf"], "gguf_file=NAME"),
    ],
)
def test_a_folder_without_weights(tmp_path: Path, files: list[str], advice: str) -> None:
    """People name the folder around the checkpoint's, and one with another kind of file."""
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for command in ("verify", "inspect"):
        result = run(command, str(tmp_path), code=1)
        assert advice in result.stdout + result.stderr


def test_a_gguf_file_is_called_so(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(60))
    assert "this is a GGUF file" in run("inspect", str(tmp_path / "model.gguf"), code=1).stderr


def test_all_faults_are_named_together(folder: Path) -> None:
    write(folder / FIRST, ["a", "d"])
    truncate(folder)
    write_index(folder, z=THIRD, y="model-00004-of-00003.safetensors")
    found = run_json("verify", str(folder), code=1)
    assert {(fault["file"], fault["kind"]) for fault in found["faults"]} == {
        (SECOND, "header"),
        ("model-00004-of-00003.safetensors", "missing"),
        (THIRD, "duplicate"),
        (FIRST, "missing"),
        (THIRD, "missing"),
    }
    assert found["tensors"] == 4, "of the shards whose headers are sound"


def test_shards_are_looked_at_although_the_index_is_broken(folder: Path) -> None:
    break_index(folder)
    truncate(folder)
    assert [fault.kind for fault in check_soundness(folder).faults] == ["index", "header"]


def test_a_sound_checkpoint(folder: Path) -> None:
    found = run_json("verify", str(folder))
    total = sum((folder / shard).stat().st_size for shard in SHARDS)
    assert found == {
        "path": str(folder),
        "sound": True,
        "shards": 3,
        "tensors": 5,
        "bytes": total,
        "faults": [],
        "notes": [],
    }
    assert run("verify", str(folder)).stdout.endswith("\n\nNo fault found.\n")
    assert run_json("verify", str(folder / FIRST))["tensors"] == 2


@pytest.mark.parametrize("name", list(ZOO))
def test_what_transformers_saves_is_sound(zoo_checkpoint: Checkpoint, name: str) -> None:
    found = check_soundness(zoo_checkpoint(name))
    assert not found.faults and not found.notes and found.tensors


def test_oddities_are_notes(folder: Path) -> None:
    """They stop nobody: what the index does not list is read all the same, a file that it does not name is not."""
    write(folder / SECOND, ["c", "unlisted"])
    write(folder / "model-00009-of-00009.safetensors", ["old"])
    found = run_json("verify", str(folder))
    assert found["sound"] and len(found["notes"]) == 2
    assert "'unlisted'" in found["notes"][0] and "model-00009-of-00009" in found["notes"][1]
    assert run("verify", str(folder)).stdout.count("Note: ") == 2


def test_a_single_file_goes_before_the_index(folder: Path) -> None:
    """As in transformers, which looks at no index then, and leaves that of an earlier save there: a note says so."""
    write(folder / "model.safetensors", ["a"])
    assert run_json("verify", str(folder))["notes"] == []
    lose_shard(folder)
    assert shards_of(folder) == ([str(folder / "model.safetensors")], None)
    found = run_json("verify", str(folder))
    assert found["shards"] == 1 and f"{INDEX} names '{SECOND}', which is not there" in found["notes"][0]


def test_what_a_load_would_read(folder: Path) -> None:
    files, weight_map = shards_of(folder)
    assert files == [str(folder / shard) for shard in SHARDS]
    assert weight_map is not None and weight_map["c"] == SECOND
    link_to_a_folder(folder)
    with pytest.raises(CheckpointError, match="found a folder"):
        shards_of(folder)
    lose_all(folder)
    with pytest.raises(CheckpointError, match="nor any safetensors"):
        shards_of(folder)


PLAN = pytest.param(["plan", "--world-size", "2"], marks=pytest.mark.plugin("forecast"))


@pytest.mark.parametrize("command", [PLAN, ["inspect"]])
def test_an_empty_folder(tmp_path: Path, command: list[str]) -> None:
    assert "nor any safetensors file" in run(*command, str(tmp_path), code=1).stderr
