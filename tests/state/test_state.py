"""``save_state`` and ``load_state``, also of random numbers.

- ``save_state`` and ``load_state``: losses after a resume are those of DeepSpeed's own resume, bit for bit.
- What a state has of random numbers, and has not, is said.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hf_zero_stream
from hf_zero_stream.engine.load import Load
from hf_zero_stream.errors import UnsupportedError
from hf_zero_stream.loading import dry_load
from hf_zero_stream.state import rng
from tests import sampling
from tests.support.cluster import run_ranks
from tests.support.training_state import (
    Prepare,
    all_in_one_group,
    different_states,
    engine_of,
    frozen_embeddings,
    resume_all,
    resume_and_save,
    resume_and_save_all,
    resume_plain,
    state_config,
    train,
    train_and_save,
    train_plain_and_save,
    two_groups,
)
from tests.support.zoo import Checkpoint


CPU_ADAM = {"offload_optimizer": {"device": "cpu"}}


def optimizer(name: str, **params: Any) -> dict[str, Any]:
    """Another one of torch's in a DeepSpeed config."""
    return {"optimizer": {"type": name, "params": {"lr": 1e-2, **params}}}


HOMES: dict[str, tuple[dict[str, Any], Prepare]] = {
    "stage 3": (state_config(3), all_in_one_group),
    "stage 2": (state_config(2), all_in_one_group),
    "stage 1": (state_config(1), all_in_one_group),
    "stage 0": (state_config(0), all_in_one_group),
    "stage 3, fp32": (state_config(3, torch.float32), all_in_one_group),
    "sub-groups": (state_config(3, sub_group_size=2000), all_in_one_group),
    "two groups": (state_config(3), two_groups),
    "two groups, stage 2": (state_config(2), two_groups),
    "frozen": (state_config(3), frozen_embeddings),
    "frozen, stage 1": (state_config(1), frozen_embeddings),
    "offload": (state_config(3, **CPU_ADAM, offload_param={"device": "cpu"}), all_in_one_group),
    "SGD": (state_config(3) | optimizer("SGD", momentum=0.9), all_in_one_group),
    "RMSprop, stage 2": (state_config(2) | optimizer("RMSprop", momentum=0.9), all_in_one_group),
    "hpz": (state_config(3, zero_hpz_partition_size=2), all_in_one_group),
}
IN_MAKE_TEST = ("two groups", "frozen, stage 1", "offload", "hpz")


def test_losses_equal_deepspeeds_own_resume(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = zoo_checkpoint("qwen3_moe")
    homes = {name: HOMES[name] for name in (IN_MAKE_TEST if sampling.is_sample else HOMES)}
    configs, prepares = map(list, zip(*homes.values(), strict=True))
    continued = run_ranks(2, train_and_save, folder, tmp_path, configs, prepares, timeout=300)[0]
    resumed = run_ranks(2, resume_all, folder, tmp_path, configs, prepares, ("ours", "stock"), timeout=300)[0]
    for name, losses, found in zip(homes, continued, resumed, strict=True):
        assert found == {"ours": losses, "stock": losses}, name


def loads_of_a_resume(folder: Path, target: Path, config: dict[str, Any]) -> tuple[int, int]:
    """How often ``load_state`` has transformers load a model, and how often it plans what to read."""
    original, planned, loaded = Load.make_plan, [], []

    def noted(load: Any, *args: Any) -> Any:
        planned.append(load)
        return original(load, *args)

    engine = engine_of(folder, config, all_in_one_group)
    train(engine, range(1))
    hf_zero_stream.save_state(engine, target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Load, "make_plan", noted)
        patch.setattr(dry_load, "lazily_loaded", lambda path, *_, **__: loaded.append(path))
        hf_zero_stream.load_state(engine, target)
    return len(loaded), len(planned)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_resume_plans_once(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, stage: int) -> None:
    """Masters and moments are read by one plan, and weights follow from masters."""
    found = run_ranks(2, loads_of_a_resume, zoo_checkpoint("llama"), tmp_path, state_config(stage))
    assert found == [(0, 1)] * 2


def resume_and_save_homes(folder: Path, target: Path, configs: list[dict[str, Any]], prepares: list[Prepare]) -> None:
    for number, (config, prepare) in enumerate(zip(configs, prepares, strict=True)):
        resume_and_save(folder, target / f"ours {number}", config, prepare, target / f"again {number}")


@pytest.mark.slow
def test_every_home_at_another_size(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """What 4 ranks load, each kind of training in itself, is what 2 ranks saved."""
    folder = zoo_checkpoint("qwen3_moe")
    configs, prepares = map(list, zip(*HOMES.values(), strict=True))
    run_ranks(2, train_and_save, folder, tmp_path, configs, prepares, False, timeout=300)
    run_ranks(4, resume_and_save_homes, folder, tmp_path, configs, prepares, timeout=300)
    for number, name in enumerate(HOMES):
        assert different_states(tmp_path / f"ours {number}", tmp_path / f"again {number}") == [], name


FUSED = {
    "stage 3": (state_config(3, sub_group_size=2000) | optimizer("Adam"), two_groups),
    "stage 2": (state_config(2) | optimizer("Adam"), two_groups),
}


@pytest.mark.slow
def test_fused_adam(cluster: None, fused_adam: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """DeepSpeed's FusedAdam, as it compiles it for a CPU; its states go on in torch's AdamW, and at other sizes."""
    folder = zoo_checkpoint("llama")
    configs, prepares = map(list, zip(*FUSED.values(), strict=True))
    continued = run_ranks(2, train_and_save, folder, tmp_path, configs, prepares)[0]
    resumed = run_ranks(2, resume_all, folder, tmp_path, configs, prepares, ("ours", "stock"))[0]
    assert resumed == [{"ours": losses, "stock": losses} for losses in continued]
    configs = [state_config(3) | optimizer("Adam"), state_config(3)]
    for number in range(len(FUSED)):
        source, again = tmp_path / f"ours {number}", tmp_path / f"again {number}"
        run_ranks(3, resume_and_save_all, folder, [source], configs, two_groups, again)
        found = [different_states(source, again / f"{each} {tmp_path.name}") for each in range(2)]
        assert found == [[], ["groups"]]  # torch's AdamW has other options


@pytest.mark.parametrize("sizes", [{"fsdp_size": 2}, None], ids=["fsdp", "one rank"])
def test_without_an_engine(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, sizes: dict[str, Any] | None
) -> None:
    """Losses go on as if nothing had happened."""
    folder, world_size = zoo_checkpoint("llama"), 1 if sizes is None else 2
    continued = run_ranks(world_size, train_plain_and_save, folder, tmp_path / "state", sizes)
    assert run_ranks(world_size, resume_plain, folder, tmp_path / "state", sizes) == continued


SIZES = (1, 2, 3, 4)


@pytest.mark.slow
def test_every_number_of_ranks(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Masters, moments and steps that M ranks load are those that N ranks saved: saving them again gives the same."""
    folder, stages = zoo_checkpoint("llama"), {1: [3], 2: [3, 2], 3: [3, 1], 4: [3]}
    for saved in SIZES:
        run_ranks(saved, train_and_save, folder, tmp_path / f"{saved}", [state_config(3)], [two_groups])
    sources = [tmp_path / f"{saved}" / "ours 0" for saved in SIZES]
    for loaded in SIZES:
        configs = [state_config(stage) for stage in stages[loaded]]
        run_ranks(loaded, resume_and_save_all, folder, sources, configs, two_groups, tmp_path / f"by {loaded}")
        for number, config in enumerate(configs):
            for source in sources:
                again = tmp_path / f"by {loaded}" / f"{number} {source.parent.name}"
                stage = config["zero_optimization"]["stage"]
                assert different_states(source, again) == [], (source, loaded, stage)


def test_between_zero_and_fsdp2(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder, config = zoo_checkpoint("llama"), state_config(3, torch.float32)
    train = run_ranks(2, train_plain_and_save, folder, tmp_path / "fsdp", {"fsdp_size": 2})
    run_ranks(3, resume_and_save, folder, tmp_path / "fsdp", config, two_groups, tmp_path / "zero", False)
    again = tmp_path / "fsdp again"
    losses = run_ranks(2, resume_plain, folder, tmp_path / "zero", {"fsdp_size": 2}, again, False)
    assert losses == train
    assert different_states(tmp_path / "fsdp", again) == []


def test_of_another_kind_of_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved on a CPU, resumed on a GPU: the generator of that begins anew, with a warning."""
    said: list[str] = []
    monkeypatch.setattr(rng.logger, "warning_once", said.append)
    path = tmp_path / rng.FILE
    rng.write_ranks([rng.of_this_rank()], path)
    expected = torch.rand(2)
    monkeypatch.setattr(rng.accelerators, "kind", lambda: "cuda")
    assert rng.restore_rank(path, rng.read_ranks(path), 0)
    assert torch.equal(torch.rand(2), expected)
    (line,) = said
    assert "saved without a cuda device" in line


def test_without_such_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved on a GPU, resumed on a CPU."""
    said: list[str] = []
    monkeypatch.setattr(rng.logger, "warning_once", said.append)
    path = tmp_path / rng.FILE
    rng.write_ranks([rng.of_this_rank() | {"cuda": torch.zeros(16, dtype=torch.uint8)}], path)
    assert rng.restore_rank(path, rng.read_ranks(path), 0)
    (line,) = said
    assert "random numbers of cuda. Without such a device they are left out" in line


def test_another_generator_of_numpy() -> None:
    usual = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        with pytest.raises(UnsupportedError, match="made by MT19937; found PCG64, of which no state is kept"):
            rng.of_this_rank()
    finally:
        np.random.set_bit_generator(usual)
