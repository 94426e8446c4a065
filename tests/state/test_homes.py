"""Training states of odd models, and of trainings whose parameters and moments lie elsewhere.

- Training states where parameters, masters and moments lie elsewhere: swap files, the ranks of experts.
- Buffers that several layers of a model share: a state has each once, and all layers go on with its values.
- One training that goes from engine to engine, with other ranks each time: what arrives is what was saved first.
- What is saved can be resumed: whatever was changed in a model, in each home, by whom and at whatever size.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import load_file
from torch import nn
from transformers.distributed import DistributedConfig

import hf_zero_stream
from benchmarks.moe_checkpoint import make_moe_checkpoint
from hf_zero_stream.errors import CheckpointError
from hf_zero_stream.sources.local import LocalFiles
from hf_zero_stream.state import forms
from hf_zero_stream.state import load as loading
from tests import sampling
from tests.autoep.test_expert_parallel import checkpoint as moe_checkpoint  # noqa: F401 - a fixture
from tests.state.test_changed import train_here
from tests.support.changed_models import CHANGES, by_trainer, is_in_bf16, resume_changed, save_changed
from tests.support.cluster import run_ranks
from tests.support.quantised_checkpoints import dense_fp8
from tests.support.training_state import (
    all_in_one_group,
    different_states,
    engine_of,
    frozen_embeddings,
    resume,
    resume_all,
    resume_and_save_all,
    state_config,
    train,
    train_and_save,
    train_plain,
    values_in,
)
from tests.support.zoo import Checkpoint


MIB = 2**20


def nvme_config(swap: Path, *, parameters: bool, sub_group_size: int = 10**6) -> dict[str, Any]:
    where = {"device": "nvme", "nvme_path": str(swap)}
    offload = {"offload_optimizer": {**where, "buffer_count": 6}}
    if parameters:
        offload["offload_param"] = {**where, "buffer_count": 5, "buffer_size": 2 * MIB}
    return state_config(3, sub_group_size=sub_group_size, **offload)


@pytest.mark.plugin("nvme")
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


def save_without_base(folder: Path, target: Path, config: dict[str, Any]) -> list[float]:
    engine = engine_of(folder, config, frozen_embeddings)
    train(engine, range(3))
    hf_zero_stream.save_state(engine, target / "ours", data={"position": 7}, exclude_frozen=True)
    return train(engine, (3, 4))


@pytest.mark.plugin("nvme")
@pytest.mark.slow
@pytest.mark.usefixtures("async_io")
@pytest.mark.parametrize("parameters", [False, True], ids=["optimizer", "both"])
def test_nvme_without_what_is_frozen(cluster: None, tmp_path: Path, parameters: bool) -> None:
    folder = make_moe_checkpoint(tmp_path / "moe", 4e6, num_layers=2, num_experts=8)
    config = nvme_config(tmp_path / "swap", parameters=parameters)
    continued = run_ranks(2, save_without_base, folder, tmp_path, config)
    resumed = run_ranks(2, resume, folder, tmp_path / "ours", config, frozen_embeddings, "ours")
    assert resumed == continued
    entries = load_file(tmp_path / "ours" / "global_step3" / "state.safetensors")
    assert any(name.startswith("values/") for name in entries) and not any("embed_tokens" in name for name in entries)


def writes_of_swap_files(folder: Path, target: Path, config: dict[str, Any]) -> list[int]:
    """How often a save of a state, and one of masters, write to swap files."""
    engine = engine_of(folder, config, all_in_one_group)
    train(engine, range(2))
    found: list[int] = []
    write = engine.optimizer._optimizer_states_and_gradient_swap_out
    engine.optimizer._optimizer_states_and_gradient_swap_out = lambda *args: (found.append(1), write(*args))
    hf_zero_stream.save_state(engine, target / "state")
    hf_zero_stream.save_pretrained(engine, target / "masters", dtype="float32")
    return found


@pytest.mark.plugin("nvme")
@pytest.mark.slow
@pytest.mark.usefixtures("async_io")
def test_a_save_writes_no_swap_files(cluster: None, tmp_path: Path) -> None:
    folder = make_moe_checkpoint(tmp_path / "moe", 4e6, num_layers=2, num_experts=8)
    config = nvme_config(tmp_path / "swap", parameters=False)
    assert run_ranks(2, writes_of_swap_files, folder, tmp_path, config) == [[], []]
    state = load_file(tmp_path / "state" / "global_step2" / "state.safetensors")
    masters = load_file(tmp_path / "masters" / "model.safetensors")
    trained = {name.removeprefix("values/"): it for name, it in state.items() if name.startswith("values/")}
    shared = trained.keys() & masters.keys()
    assert shared and all(torch.equal(trained[name], masters[name]) for name in shared)


def losing_in_swap_files(folder: Path, source: Path, config: dict[str, Any]) -> list[str]:
    """The errors of loads that lose something of what is in swap files."""
    found = []
    for key in ("exp_avg", "step"):
        engine = engine_of(folder, config, all_in_one_group)  # DeepSpeed's swapper knows what it has swapped

        def losing(optimizer: Any, slots: Any, *rest: Any, key: str = key) -> None:
            forms.set_entries(optimizer, slots, *rest)
            swapped = [slot for slot in slots if slot.is_swapped]
            assert swapped
            for slot in swapped:
                del slot.entries[key]

        with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError) as raised:
            patch.setattr(loading, "set_entries", losing)
            hf_zero_stream.load_state(engine, source)
        found.append(str(raised.value))
    return found


@pytest.mark.plugin("nvme")
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
@pytest.mark.plugin("nvme", "pickled")
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


@pytest.mark.plugin("autoep")
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


class Net(nn.Module):
    """Not one of transformers', which refuse to save buffers that layers share."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.inner = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        share_buffers(self, self.inner.model.layers)

    def get_input_embeddings(self) -> Any:
        return self.inner.get_input_embeddings()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        output = self.inner(input_ids=input_ids, labels=labels)
        output.loss = output.loss * self.inner.model.layers[1].scale + self.inner.model.layers[1].offset
        return output


def share_buffers(model: nn.Module, layers: Any) -> None:
    scale, offset = torch.tensor(2.0), torch.tensor(0.5)
    for layer in layers:
        layer.register_buffer("scale", scale)
    layers[0].register_buffer("offset", offset, persistent=False)  # a state dict has it by its second name
    layers[1].register_buffer("offset", offset)


@pytest.mark.parametrize("strict", [True, False])
def test_shared_buffers(zoo_checkpoint: Checkpoint, tmp_path: Path, strict: bool) -> None:
    def made() -> tuple[Any, torch.optim.Optimizer, Any]:
        model = Net(zoo_checkpoint("llama"))
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2), model.inner.model.layers

    model, optimizer, layers = made()
    train_here(model, optimizer, range(2))
    layers[0].scale.mul_(1.5)
    layers[1].offset.add_(3)
    hf_zero_stream.save_state(model, tmp_path / "state", optimizer=optimizer)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    continued = train_here(model, optimizer, (2, 3))
    model, optimizer, layers = made()
    hf_zero_stream.load_state(model, tmp_path / "state", optimizer=optimizer, strict=strict)
    assert layers[0].scale == layers[1].scale == 3 and layers[0].offset == layers[1].offset == 3.5
    assert train_here(model, optimizer, (2, 3)) == continued
    found = values_in(tmp_path / "state" / "global_step2")
    assert found.keys() == expected.keys()
    assert [name for name, value in found.items() if not torch.equal(value, expected[name])] == []


def decayed_or_not(model: Any, freezes: bool) -> list[dict[str, Any]]:
    """Two groups, without frozen embeddings."""
    if freezes:
        model.get_input_embeddings().weight.requires_grad_(False)
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    return [
        {"params": [param for name, param in trained if "norm" not in name], "weight_decay": 0.1},
        {"params": [param for name, param in trained if "norm" in name], "weight_decay": 0.0},
    ]


def frozen(model: Any) -> list[dict[str, Any]]:
    return decayed_or_not(model, freezes=True)


def trained_whole(model: Any) -> list[dict[str, Any]]:
    return decayed_or_not(model, freezes=False)


Prepare = Callable[[Any], list[dict[str, Any]]]


def by_zero(folder: Path, stage: int, prepare: Prepare, source: Path | None, target: Path) -> list[float]:
    """Train, or go on from `source`; save; the losses of two more steps."""
    engine = engine_of(folder, state_config(stage, torch.float32), prepare)
    if source is None:
        train(engine, range(3))
    else:
        hf_zero_stream.load_state(engine, source, with_scheduler=False)
    hf_zero_stream.save_state(engine, target)
    return train(engine, (3, 4))


def by_fsdp2(folder: Path, prepare: Prepare, source: Path, target: Path, size: int) -> list[float]:
    with hf_zero_stream.streaming():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, distributed_config=DistributedConfig(fsdp_size=size)
        )
    optimizer = torch.optim.AdamW(prepare(model), lr=1e-3)
    hf_zero_stream.load_state(model, source, optimizer=optimizer)
    hf_zero_stream.save_state(model, target, optimizer=optimizer)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    return train_plain(model, optimizer, scheduler, (3, 4))


@pytest.mark.slow  # of the matrix of resumes, a sample goes through engines too
@pytest.mark.parametrize(("name", "prepare"), [("qwen3", trained_whole), ("llama", frozen)], ids=["tied", "frozen"])
def test_from_engine_to_engine(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, name: str, prepare: Prepare
) -> None:
    """ZeRO-3, FSDP2, ZeRO-1, FSDP2, ZeRO-2: weights, moments, steps and the options of both groups."""
    folder = zoo_checkpoint(name)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is (name == "qwen3")
    first = tmp_path / "first"
    run_ranks(2, by_zero, folder, 3, prepare, None, first)
    run_ranks(3, by_fsdp2, folder, prepare, first, tmp_path / "second", 3)
    run_ranks(2, by_zero, folder, 1, prepare, tmp_path / "second", tmp_path / "third")
    run_ranks(2, by_fsdp2, folder, prepare, tmp_path / "third", tmp_path / "fourth", 2)
    run_ranks(1, by_zero, folder, 2, prepare, tmp_path / "fourth", tmp_path / "fifth")
    for each in ("second", "third", "fourth", "fifth"):
        assert different_states(first, tmp_path / each) == [], each


HOMES = {
    "zero3": ("engine", "save_state", "accelerate"),
    "zero2": ("engine", "save_state", "accelerate"),
    "fsdp2": ("save_state", "accelerate"),
    "distributed_config": ("save_state",),
}
COMPILED = ("compiled", "both")

ROWS = [
    pytest.param(home, saver, marks=[] if (home, saver) == ("zero3", "engine") else [pytest.mark.slow])
    for home, savers in HOMES.items()
    for saver in savers
]


def changes_in(home: str) -> list[str]:
    """DeepSpeed itself cannot train compiled blocks at stage 3: ``'dict' object has no attribute '_in_forward'``."""
    return sampling.every(4, [change for change in CHANGES if home != "zero3" or change not in COMPILED])


def tolerance(home: str, change: str) -> float:
    """Of losses at another number of ranks, which add up gradients in another order."""
    return 2e-3 if is_in_bf16(home, change) else 1e-4


@pytest.fixture
def checkpoint(zoo_checkpoint: Checkpoint, tmp_path: Path) -> Path:
    shutil.copytree(zoo_checkpoint("llama"), tmp_path / "checkpoint")
    dense_fp8(tmp_path / "checkpoint" / "fp8")
    return tmp_path / "checkpoint"


@pytest.mark.sample(len(ROWS))
@pytest.mark.parametrize(("home", "saver"), ROWS)
def test_resumed(cluster: None, checkpoint: Path, tmp_path: Path, home: str, saver: str) -> None:
    """The same losses as of a training that never stopped; all values come back, also at another number of ranks."""
    folder, changes = checkpoint, changes_in(home)
    saved = run_ranks(2, save_changed, folder, tmp_path, home, saver, changes, timeout=400)[0]
    assert {change: found["wrong"] for change, found in saved.items() if found["wrong"]} == {}
    resumed = run_ranks(2, resume_changed, folder, tmp_path, home, saver, changes, timeout=400)[0]
    assert resumed == saved
    others = run_ranks(3, resume_changed, folder, tmp_path, home, saver, changes, timeout=400)[0]
    for change, found in others.items():
        assert found["wrong"] == [], change
        assert found["losses"] == pytest.approx(saved[change]["losses"], rel=tolerance(home, change)), change


@pytest.mark.slow
@pytest.mark.parametrize("home", ["zero3", "zero2", "fsdp2"])
def test_resumed_by_the_trainer(cluster: None, checkpoint: Path, tmp_path: Path, home: str) -> None:
    folder = checkpoint
    changes = [change for change in changes_in(home) if change not in COMPILED]  # the Trainer compiles by itself
    whole = run_ranks(2, by_trainer, folder, tmp_path, home, changes, False, timeout=400)[0]
    assert run_ranks(2, by_trainer, folder, tmp_path, home, changes, True, timeout=400)[0] == whole
    others = run_ranks(3, by_trainer, folder, tmp_path, home, changes, True, timeout=400)[0]
    for change, losses in others.items():
        assert losses[2:] == pytest.approx(whole[change][2:], rel=tolerance(home, change)), change
