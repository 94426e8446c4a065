"""Training states where parameters, masters and moments lie elsewhere: swap files, the ranks of experts."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import load_file

import hf_zero_stream
from benchmarks.moe_checkpoint import make_moe_checkpoint
from hf_zero_stream.errors import CheckpointError
from hf_zero_stream.sources.local import LocalFiles
from hf_zero_stream.state import entries
from hf_zero_stream.state import load as loading
from tests.support.cluster import run_ranks
from tests.support.training_state import (
    all_in_one_group,
    different_states,
    engine_of,
    resume_all,
    resume_and_save_all,
    state_config,
    train,
    train_and_save,
)
from tests.support.zoo import Checkpoint
from tests.zero.test_expert_parallel import checkpoint as moe_checkpoint  # noqa: F401 - a fixture


MIB = 2**20


def nvme_config(swap: Path, *, parameters: bool, sub_group_size: int = 10**6) -> dict[str, Any]:
    where = {"device": "nvme", "nvme_path": str(swap)}
    offload = {"offload_optimizer": {**where, "buffer_count": 6}}
    if parameters:
        offload["offload_param"] = {**where, "buffer_count": 5, "buffer_size": 2 * MIB}
    return state_config(3, sub_group_size=sub_group_size, **offload)


@pytest.mark.slow
@pytest.mark.usefixtures("async_io")
@pytest.mark.parametrize("parameters", [False, True], ids=["optimizer", "both"])
def test_nvme(cluster: None, tmp_path: Path, parameters: bool) -> None:
    """Goes on as if nothing had happened; and on 3 ranks, with or without swap files."""
    folder = make_moe_checkpoint(tmp_path / "moe", 4e6, num_layers=2, num_experts=8)
    config = nvme_config(tmp_path / "swap", parameters=parameters)
    continued = run_ranks(2, train_and_save, folder, tmp_path, [config], [all_in_one_group], False)
    resumed = run_ranks(2, resume_all, folder, tmp_path, [config], [all_in_one_group], ["ours"])
    assert [[each["ours"] for each in found] for found in resumed] == continued
    source = tmp_path / "ours 0"
    run_ranks(
        3, resume_and_save_all, folder, [source], [config, state_config(3)], all_in_one_group, tmp_path / "again"
    )
    for number in range(2):
        assert different_states(source, tmp_path / "again" / f"{number} {tmp_path.name}") == []


def losing_in_swap_files(folder: Path, source: Path, config: dict[str, Any]) -> list[str]:
    """The errors of loads that lose something of what is in swap files."""
    found = []
    for key in ("exp_avg", "step"):
        engine = engine_of(folder, config, all_in_one_group)  # DeepSpeed's swapper knows what it has swapped

        def losing(optimizer: Any, number: int, recorded: Any, slots: Any, key: str = key) -> None:
            entries.set_entries(optimizer, number, recorded, slots)
            swapped = [slot for slot in slots if slot.is_swapped]
            assert swapped
            for slot in swapped:
                del slot.entries[key]

        with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError) as raised:
            patch.setattr(loading, "set_entries", losing)
            hf_zero_stream.load_state(engine, source)
        found.append(str(raised.value))
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("async_io")
def test_nvme_loses_nothing_in_silence(cluster: None, tmp_path: Path) -> None:
    folder = make_moe_checkpoint(tmp_path / "moe", 4e6, num_layers=2, num_experts=8)
    config = nvme_config(tmp_path / "swap", parameters=False)
    run_ranks(2, train_and_save, folder, tmp_path, [config], [all_in_one_group], False)
    for errors in run_ranks(2, losing_in_swap_files, folder, tmp_path / "ours 0", config):
        for key, error in zip(("exp_avg", "step"), errors, strict=True):
            assert f": {key}: expected " in error and "found nothing" in error


def resume_from_deepspeeds(folder: Path, source: Path, config: dict[str, Any]) -> tuple[list[float], list[float]]:
    """The losses after a resume by ``load_state``, and by the engine inside ``streaming()``."""
    found = []
    for by_engine in (False, True):
        engine = engine_of(folder, config, all_in_one_group)
        if by_engine:
            with hf_zero_stream.streaming():
                engine.load_checkpoint(str(source))
        else:
            hf_zero_stream.load_state(engine, source)
        found.append(train(engine, (3, 4)))
    return found[0], found[1]


@pytest.mark.slow
@pytest.mark.usefixtures("async_io")
@pytest.mark.plugin("pickled")
def test_deepspeeds_own_folder_with_swap_files(cluster: None, tmp_path: Path) -> None:
    """Values and moments are read from the copies of the swap files; DeepSpeed itself forgets the moments."""
    from hf_zero_stream.plugins.pickled.convert import convert
    from hf_zero_stream.plugins.pickled.zero_folder import read_zero_folder

    folder = make_moe_checkpoint(tmp_path / "moe", 4e6, num_layers=2, num_experts=8)
    config = nvme_config(tmp_path / "swap", parameters=False, sub_group_size=300_000)
    continued = run_ranks(2, train_and_save, folder, tmp_path, [config], [all_in_one_group])[0][0]
    stock, ours = tmp_path / "stock 0", tmp_path / "ours 0"
    zero = read_zero_folder(LocalFiles(), stock / "global_step3")
    swapped = [shard for shard in zero.shards if shard.path.endswith(".swp")]
    assert len(swapped) % 6 == 0 and 6 < len(swapped) < 6 * len(zero.groups[0].parameters), "not all are swapped"
    for losses in run_ranks(2, resume_from_deepspeeds, folder, stock, config):
        assert losses == (continued, continued)
    configs = [config, state_config(3), state_config(2)]
    run_ranks(3, resume_and_save_all, folder, [stock], configs, all_in_one_group, tmp_path / "again")
    for number in range(len(configs)):
        found = different_states(ours, tmp_path / "again" / f"{number} {tmp_path.name}")
        assert [name for name in found if name != "groups"] == [], number
    values = get_fp32_state_dict_from_zero_checkpoint  # it takes empty tensors for the values
    with pytest.raises(ValueError, match="something is wrong"):
        values(str(stock))
    shutil.copy(folder / "config.json", stock)
    convert(stock, tmp_path / "converted", dtype=torch.bfloat16, layout="hub", progress=False)
    converted, saved = (load_file(each / "model.safetensors") for each in (tmp_path / "converted", ours))
    assert converted.keys() == saved.keys() and all(torch.equal(converted[name], saved[name]) for name in saved)
    for damage, error in (
        (lambda path: os.truncate(path, 9), "expected at least .* bytes, found 9"),
        (os.unlink, "swap file is not there. .*Copy that folder too"),
    ):
        damage(swapped[-1].path)
        with pytest.raises(CheckpointError, match=error):
            read_zero_folder(LocalFiles(), stock / "global_step3")


def no_groups(model: Any) -> None:
    """DeepSpeed makes them: it needs experts apart."""


@pytest.mark.slow
def test_expert_parallelism(cluster: None, moe_checkpoint: Checkpoint, tmp_path: Path) -> None:  # noqa: F811
    """States have the experts of all ranks, as the model has them: other numbers of parts, and none, go on."""
    folder = moe_checkpoint("qwen3_moe", torch.bfloat16)
    section = {"enabled": True, "autoep_size": 2, "use_grouped_mm": False}
    config = {**state_config(3), "expert_parallel": section}
    continued = run_ranks(4, train_and_save, folder, tmp_path, [config], [no_groups], False)
    resumed = run_ranks(4, resume_all, folder, tmp_path, [config], [no_groups], ["ours"])
    assert [[each["ours"] for each in found] for found in resumed] == continued
    source = tmp_path / "ours 0"
    run_ranks(2, resume_and_save_all, folder, [source], [config], no_groups, tmp_path / "again")
    assert different_states(source, tmp_path / "again" / f"0 {tmp_path.name}") == []
