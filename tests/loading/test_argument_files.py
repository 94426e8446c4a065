"""Arguments of `from_pretrained` that say which files are read; docs/settings.md lists them all."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import hub

from tests.support.cluster import run_ranks
from tests.support.loading import assert_same, compare, errors_of
from tests.support.zoo import Checkpoint, build_model


CAUSAL = "AutoModelForCausalLM"


def test_subfolder(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    shutil.copytree(zoo_checkpoint("llama"), tmp_path / "deep" / "model")
    assert_same(run_ranks(2, compare, CAUSAL, tmp_path, {"subfolder": "deep/model"}))


def test_revision_of_a_folder(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    """A folder has none: it is ignored."""
    assert_same(run_ranks(2, compare, CAUSAL, zoo_checkpoint("llama"), {"revision": "no-such-branch"}))


def test_variant(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Sharded and not; a variant that is not there is transformers' error."""
    model = build_model("llama")
    model.save_pretrained(tmp_path / "sharded", variant="fp9", max_shard_size="60KB")
    model.save_pretrained(tmp_path / "whole", variant="fp9")
    assert (tmp_path / "sharded" / "model.safetensors.index.fp9.json").exists()
    for name in ("sharded", "whole"):
        assert_same(run_ranks(2, compare, CAUSAL, tmp_path / name, {"variant": "fp9"}))
    for plain, streamed in run_ranks(2, errors_of, ["plain", "streamed"], CAUSAL, tmp_path / "whole", {}):
        assert plain is not None and plain == streamed


def with_both_formats(folder: Path) -> Path:
    """A safetensors file, and a pickled one with other values."""
    model = build_model("bert")
    model.save_pretrained(folder)
    torch.save({key: value + 1 for key, value in model.state_dict().items()}, folder / "pytorch_model.bin")
    return folder


@pytest.mark.parametrize("use", [True, False, None])
def test_use_safetensors(cluster: None, tmp_path: Path, use: bool | None) -> None:
    folder = with_both_formats(tmp_path)
    results = run_ranks(2, compare, "AutoModelForMaskedLM", folder, {"use_safetensors": use})
    assert_same(results)


@pytest.mark.plugin("pickled")
def test_use_safetensors_where_there_are_none(cluster: None, tmp_path: Path) -> None:
    folder = with_both_formats(tmp_path)
    (folder / "model.safetensors").unlink()
    assert_same(run_ranks(2, compare, "AutoModelForMaskedLM", folder, {}))
    for plain, streamed in run_ranks(
        2, errors_of, ["plain", "streamed"], "AutoModelForMaskedLM", folder, {"use_safetensors": True}
    ):
        assert plain is not None and plain == streamed


class Surprise:
    """Unpickling it is what `weights_only` forbids."""


def with_an_object(folder: Path) -> Path:
    model = build_model("bert")
    model.config.save_pretrained(folder)
    torch.save({**model.state_dict(), "surprise": Surprise()}, folder / "pytorch_model.bin")
    return folder


@pytest.mark.slow
@pytest.mark.plugin("pickled")
def test_weights_only(cluster: None, tmp_path: Path) -> None:
    """True refuses, and False loads, a pickle with objects in it; False is also passed for safetensors."""
    folder = with_an_object(tmp_path / "pickled")
    hows = ["plain", "streamed"]
    for plain, streamed in run_ranks(2, errors_of, hows, "AutoModelForMaskedLM", folder, {"weights_only": True}):
        assert plain is not None and streamed is not None and plain[0] == streamed[0]
    build_model("bert").save_pretrained(tmp_path / "safe")
    assert_same(run_ranks(2, compare, "AutoModelForMaskedLM", tmp_path / "safe", {"weights_only": False}))
    model = build_model("bert")
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    for allowed in (True, False):
        results = run_ranks(2, compare, "AutoModelForMaskedLM", folder, {"weights_only": allowed})
        assert_same(results)


@pytest.mark.parametrize("disable", [True, False])
@pytest.mark.plugin("pickled")
def test_disable_mmap(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, disable: bool) -> None:
    """Nothing is mapped for safetensors anyway; for a pickled file it decides how torch.load reads."""
    assert_same(run_ranks(2, compare, CAUSAL, zoo_checkpoint("qwen3_moe"), {"disable_mmap": disable}))
    folder = with_both_formats(tmp_path)
    (folder / "model.safetensors").unlink()
    results = run_ranks(2, compare, "AutoModelForMaskedLM", folder, {"disable_mmap": disable})
    assert_same(results)


# ---------------------------------------------------------------------------------------------------------- hub cache

NAME, MAIN, BRANCH = "somebody/tiny", "a" * 40, "b" * 40


def hub_cache(root: Path, main: Path, branch: Path) -> Path:
    """A cache as huggingface_hub lays it out: blobs, and snapshots of symbolic links to them."""
    repository = root / f"models--{NAME.replace('/', '--')}"
    for commit, source, reference in ((MAIN, main, "main"), (BRANCH, branch, "v2")):
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / reference).write_text(commit)
        for kind in ("blobs", f"snapshots/{commit}"):
            (repository / kind).mkdir(parents=True, exist_ok=True)
        for file in source.iterdir():
            blob = repository / "blobs" / f"{reference}{file.name}".replace(".", "")
            shutil.copy(file, blob)
            (repository / "snapshots" / commit / file.name).symlink_to(Path("../../blobs") / blob.name)
    return root


@pytest.fixture(scope="module")
def cache(zoo_checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hub_cache(tmp_path_factory.mktemp("hub"), zoo_checkpoint("llama"), zoo_checkpoint("qwen3_moe"))


@pytest.mark.parametrize(
    ("revision", "expected"),
    [(None, "LlamaForCausalLM"), ("v2", "Qwen3MoeForCausalLM"), (BRANCH, "Qwen3MoeForCausalLM")],
    ids=["none", "branch", "commit"],
)
def test_repository_in_the_cache(cluster: None, cache: Path, revision: str | None, expected: str) -> None:
    kwargs = {"cache_dir": str(cache), **({"revision": revision} if revision else {})}
    results = run_ranks(2, compare, CAUSAL, NAME, kwargs, torch.float32, see_class)
    assert_same(results)
    assert results[0]["probes"][0] == expected


def see_class(model: Any) -> str:
    return type(model).__name__


@pytest.mark.parametrize("kwargs", [{"revision": "v3"}, {"force_download": True}], ids=["revision", "force_download"])
def test_repository_not_in_the_cache(cluster: None, cache: Path, kwargs: dict[str, Any]) -> None:
    """Offline: transformers' own error."""
    kwargs = {"cache_dir": str(cache), **kwargs}
    assert hub.is_offline_mode()
    for plain, streamed in run_ranks(2, errors_of, ["plain", "streamed"], CAUSAL, NAME, kwargs):
        assert plain == streamed
