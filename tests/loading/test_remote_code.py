"""`trust_remote_code`: models whose code comes with the checkpoint."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.cluster import run_ranks
from tests.support.parity import assert_same, compare, errors_of
from tests.support.remote_code import make_remote_checkpoint


def with_own_module_cache(folder: Path, action: Any, *args: Any) -> Any:
    """Run `action` with a module cache of this rank's own, and not the user's."""
    from transformers import dynamic_module_utils

    dynamic_module_utils.HF_MODULES_CACHE = str(folder / f"modules-{os.environ['RANK']}")
    return action(*args)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("auto_class", ["AutoModel", "AutoModelForCausalLM"])
def test_trusted(cluster: None, tmp_path: Path, auto_class: str, world_size: int) -> None:
    folder = make_remote_checkpoint(tmp_path / "tiny")
    results = run_ranks(
        world_size, with_own_module_cache, tmp_path, compare, auto_class, folder, {"trust_remote_code": True}
    )
    assert_same(results)
    assert not results[0]["info"]["missing_keys"]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "leave_out",
    [("model.layers.1.up.bias",), ("model.scale",), ("lm_head.weight", "model.layers.0.norm.weight")],
    ids=lambda names: "+".join(names),
)
def test_missing_tensors(cluster: None, tmp_path: Path, leave_out: tuple[str, ...], world_size: int) -> None:
    """Its `_init_weights` writes to all of a module's parameters, loaded ones too; so does plain loading."""
    folder = make_remote_checkpoint(tmp_path / "tiny", leave_out)
    results = run_ranks(
        world_size,
        with_own_module_cache,
        tmp_path,
        compare,
        "AutoModelForCausalLM",
        folder,
        {"trust_remote_code": True},
    )
    assert_same(results)
    assert results[0]["info"]["missing_keys"] == set(leave_out)


def test_in_bf16(cluster: None, tmp_path: Path) -> None:
    folder = make_remote_checkpoint(tmp_path / "tiny", ("lm_head.weight",))
    kwargs = {"trust_remote_code": True, "dtype": torch.bfloat16, "code_revision": "main"}
    results = run_ranks(
        2, with_own_module_cache, tmp_path, compare, "AutoModelForCausalLM", folder, kwargs, torch.bfloat16
    )
    assert_same(results)


def test_not_trusted(cluster: None, tmp_path: Path) -> None:
    folder = make_remote_checkpoint(tmp_path / "tiny")
    for plain, streamed in run_ranks(
        2,
        with_own_module_cache,
        tmp_path,
        errors_of,
        ["plain", "streamed"],
        "AutoModelForCausalLM",
        folder,
        {"trust_remote_code": False},
    ):
        assert plain is not None and "trust_remote_code" in plain[1] and plain == streamed
