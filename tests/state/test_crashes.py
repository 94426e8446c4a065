"""A sample of ``python -m tests.state.crash``: saves of training states that die, or whose disk fails."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from hf_zero_stream.errors import SaveError
from hf_zero_stream.saving.publication import Publication, finish_interrupted
from tests.saving.crash import tree
from tests.state.crash import make_states, trial_of_two_ranks, trials_of_one_rank


@pytest.mark.parametrize(
    ("way", "fault", "stride"),
    [
        ("waited", "killed", 5),
        pytest.param("background", "killed", 5, marks=pytest.mark.slow),
        ("background", "no space", 11),
        ("beside a step", "killed", 9),
        pytest.param("beside a step", "no space", 5, marks=pytest.mark.slow),
        pytest.param("background, all copied", "killed", 5, marks=pytest.mark.slow),
    ],
)
def test_one_rank(tmp_path: Path, way: str, fault: str, stride: int) -> None:
    found = trials_of_one_rank(tmp_path, way, [fault], stride)
    assert found.keys() >= {f"{fault}: old", f"{fault}: new"}


@pytest.mark.parametrize("call", ["replace", "unlink", "fsync", "rmdir"])
def test_each_step_of_the_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Shards, an index and a file after it, over an older checkpoint: a step fails, and the next process goes on."""
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "index.json", "latest"]
    original, step, ended = getattr(os, call), 0, False
    while not ended:
        folder, calls = tmp_path / str(step), 0
        folder.mkdir()
        for name in [*names, "model-00001-of-00003.safetensors"]:
            (folder / name).write_text("old")
        publication = Publication.begin(folder)
        (publication.temporary / "state").mkdir()
        for name in [*names, "state/moments"]:
            (publication.temporary / name).write_text("new")

        def failing(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == step + 1:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return original(*arguments, **options)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            try:
                publication.commit("model.safetensors", "index.json", "latest")
            except SaveError:
                publication.abandon()
        ended = calls <= step
        finish_interrupted(folder)
        found = {path: data.decode() for path, data in tree(folder).items()}
        new = {**dict.fromkeys(names, "new"), "state/moments": "new"}
        old = {**dict.fromkeys(names, "old"), "model-00001-of-00003.safetensors": "old"}
        assert found == new or (found == old and not ended), (step, found)
        step += 1
    assert step > 1


@pytest.fixture(scope="module")
def states(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_states(tmp_path_factory.mktemp("states"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "rank", "step", "fault"),
    [
        ("waited", 1, 5, "killed"),
        ("background", 0, 40, "killed"),
        ("background", 1, 5, "killed"),
        ("background", 1, 9, "i/o error"),
        ("background, all copied", 1, 5, "killed"),
    ],
)
def test_one_of_two_ranks(states: Path, way: str, rank: int, step: int, fault: str) -> None:
    assert trial_of_two_ranks(states, rank, step, fault, way).startswith(f"{way}, {fault}")
