"""Saves in the background from the memory of a training that goes on: the bytes are those of the call.

The writer is held at each file in turn, and steps are made meanwhile.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist

import hf_zero_stream
from hf_zero_stream.errors import ConfigError, SaveError
from hf_zero_stream.holdings.steps import unseen_reason
from hf_zero_stream.saving import save as save_module
from tests.support.cluster import run_ranks
from tests.support.held_writer import held_writer
from tests.support.training_state import all_in_one_group, engine_of, plain_training, state_config, train, train_plain
from tests.support.zoo import make_checkpoint


Checkpoint = Callable[..., Path]
Room = int | Literal["all"] | None

SHARDS = {"max_shard_size": "150KB"}
ROOMS: list[Room] = [None, 1, 2**20]


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its path there."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def save_at_each_file(
    target: Path, trained: Any, steps: Callable[[int], object], room: Room, **arguments: Any
) -> dict[str, Any]:
    """Save again and again, held at another file each time, and two steps later; each time a synchronous save, too."""
    copied, held_seconds, file = 0, 0.0, 0
    with held_writer() as writer:
        while True:
            hf_zero_stream.save_state(trained, target / f"waited {file}", **arguments, **SHARDS)
            writer.hold_at(file)
            pending = hf_zero_stream.save_state(
                trained,
                target / f"background {file}",
                asynchronous=True,
                snapshot_bytes=room,
                **arguments,
                **SHARDS,
            )
            was_held = writer.wait_until_held()
            steps(2 * file)
            steps(2 * file + 1)
            writer.let_go()
            report = pending.wait()
            mine = report.ranks[dist.get_rank() if dist.is_initialized() else 0]
            copied, held_seconds = max(copied, mine.bytes_copied), max(held_seconds, mine.seconds["held"])
            if not any(_of_ranks(was_held)):
                return {"files": file, "copied": copied, "held": held_seconds, "written": mine.bytes_written}
            file += 1


def _of_ranks(value: bool) -> list[bool]:
    """The values of all ranks: these may have different numbers of files to write into."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def same_trees(target: Path, files: int) -> None:
    for file in range(files + 1):
        waited, background = tree(target / f"waited {file}"), tree(target / f"background {file}")
        assert waited.keys() == background.keys()
        assert [name for name in waited if waited[name] != background[name]] == [], file
    assert tree(target / "waited 0") != tree(target / "waited 1"), "steps change what is saved"


def one_process(folder: Path, target: Path, room: Room) -> dict[str, Any]:
    model, optimizer, scheduler = plain_training(folder, None)
    arguments = {"optimizer": optimizer, "scheduler": scheduler}
    return save_at_each_file(
        target, model, lambda step: train_plain(model, optimizer, scheduler, (step,)), room, **arguments
    )


@pytest.mark.parametrize("room", ROOMS)
def test_one_process(tmp_path: Path, room: Room) -> None:
    """From the first step on, before which there are no moments."""
    found = one_process(make_checkpoint("llama", tmp_path / "model", torch.float32), tmp_path, room)
    same_trees(tmp_path, found["files"])
    assert found["files"] > 4 and found["held"] > 0
    if room is None:
        assert 0 < found["copied"] <= found["written"] // 8
    elif room == 1:
        assert found["copied"] == 0
    else:
        assert found["copied"] > found["written"] // 2


def of_engine(folder: Path, target: Path, config: dict[str, Any], room: Room) -> dict[str, Any]:
    engine = engine_of(folder, config, all_in_one_group)
    return save_at_each_file(target, engine, lambda step: train(engine, (step,)), room)


SUB_GROUPS = {"sub_group_size": 10_000}
ENGINES = {
    "stage 3": state_config(3, **SUB_GROUPS),
    "stage 2": state_config(2),
    "offload": state_config(3, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"}, **SUB_GROUPS),
}


@pytest.mark.parametrize("name", ENGINES)
def test_engines(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, name: str) -> None:
    """ZeRO-3 steps sub-group by sub-group; the values of stage 2 all change after the first step of a group."""
    for found in run_ranks(2, of_engine, zoo_checkpoint("llama"), tmp_path, ENGINES[name], None, timeout=60):
        assert found["files"] > 3 and 0 < found["copied"] <= found["written"] // 8
    same_trees(tmp_path, found["files"])


def of_fsdp(folder: Path, target: Path) -> dict[str, Any]:
    model, optimizer, scheduler = plain_training(folder, {"fsdp_size": 2})
    arguments = {"optimizer": optimizer, "scheduler": scheduler}
    return save_at_each_file(
        target, model, lambda step: train_plain(model, optimizer, scheduler, (step,)), None, **arguments
    )


def test_fsdp2(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    for found in run_ranks(2, of_fsdp, zoo_checkpoint("llama"), tmp_path, timeout=60):
        assert found["files"] > 3 and 0 < found["copied"] <= found["written"] // 8
    same_trees(tmp_path, found["files"])


# ------------------------------------------------------------------------------- what changes values, but is no step


@contextmanager
def held_save(folder: Path, trained: Any, **arguments: Any) -> Iterator[Any]:
    """Inside, a save in the background has not written anything yet."""
    with held_writer() as writer:
        writer.hold_at(0)
        pending = hf_zero_stream.save_state(trained, folder, asynchronous=True, **arguments, **SHARDS)
        assert writer.wait_until_held()
        yield pending
        writer.let_go()


def _edit(model: Any, how: str) -> None:
    param = model.lm_head.weight if how == "one row" else model.model.layers[0].mlp.up_proj.weight
    if how == "data":
        param.data.mul_(2)  # which torch does not count
    elif how == "averaged":
        for each in model.parameters():
            each.data.copy_(each.data * 0.9)
    else:
        with torch.no_grad():
            param[3].add_(1)


@pytest.mark.parametrize("how", ["in place", "one row", "data", "averaged"])
def test_edits_that_nobody_announces(tmp_path: Path, how: str) -> None:
    """They are an error at the end, and the older state stays; after ``take_values()`` they do no harm."""
    training = plain_training(make_checkpoint("llama", tmp_path / "model", torch.float32), None)
    model, optimizer, _ = training
    train_plain(*training, (0,))
    hf_zero_stream.save_state(model, tmp_path / "waited", optimizer=optimizer, tag="new", **SHARDS)
    hf_zero_stream.save_state(model, tmp_path / "state", optimizer=optimizer, tag="old", **SHARDS)
    before = tree(tmp_path / "state")
    with held_save(tmp_path / "state", model, optimizer=optimizer, tag="new") as pending:
        _edit(model, how)
    with pytest.raises(SaveError, match=r"weight: expected the values of the call .*take_values\(\)"):
        pending.wait()
    assert tree(tmp_path / "state") == before
    hf_zero_stream.load_state(model, tmp_path / "waited", optimizer=optimizer)
    with held_save(tmp_path / "taken", model, optimizer=optimizer, tag="new") as pending:
        pending.take_values()
        _edit(model, how)
    pending.wait()
    assert tree(tmp_path / "taken") == tree(tmp_path / "waited")


def test_steps_that_nothing_announces(tmp_path: Path) -> None:
    """An optimizer whose steps may call no hooks has all copied; a step that called none is seen."""
    model, optimizer, scheduler = plain_training(make_checkpoint("llama", tmp_path / "model", torch.float32), None)
    for group in optimizer.param_groups:
        group["capturable"] = True
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr(save_module.logger, "warning_once", said.append)
        report = hf_zero_stream.save_state(model, tmp_path / "copied", optimizer=optimizer, asynchronous=True).wait()
    assert report.ranks[0].bytes_copied == report.bytes_written
    assert len(said) == 1 and "copies all" in said[0] and "AdamW is capturable" in said[0]
    for group in optimizer.param_groups:
        group["capturable"] = False
    with held_save(tmp_path / "state", model, optimizer=optimizer) as pending:
        loss = model(input_ids=torch.arange(5, 14).view(1, -1), labels=torch.arange(5, 14).view(1, -1)).loss
        loss.backward()
        type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]
    with pytest.raises(SaveError, match="expected the values of the call"):
        pending.wait()
    assert "SGD" not in said[0] and unseen_reason(torch.optim.SGD(model.parameters())) == ""
    assert "calls none of the hooks" in unseen_reason(object())


def test_another_optimizer(tmp_path: Path) -> None:
    """One that the state does not know steps parameters of the model: its steps wait too."""
    model, optimizer, _ = plain_training(make_checkpoint("llama", tmp_path / "model", torch.float32), None)
    model.lm_head.weight.requires_grad_(False)
    others = torch.optim.SGD([model.model.norm.weight], lr=1.0)
    model.model.norm.weight.grad = torch.ones_like(model.model.norm.weight)
    arguments = {"optimizer": optimizer, "snapshot_bytes": 1}
    hf_zero_stream.save_state(model, tmp_path / "waited", optimizer=optimizer, **SHARDS)
    with held_save(tmp_path / "background", model, **arguments) as pending:
        others.step()
    assert pending.wait().ranks[0].seconds["held"] > 0
    assert tree(tmp_path / "background") == tree(tmp_path / "waited")


def test_errors_let_steps_go_on(tmp_path: Path) -> None:
    """The disk fails while a step writes: the step is made, and the save raises the error."""
    training = plain_training(make_checkpoint("llama", tmp_path / "model", torch.float32), None)
    model, optimizer, _ = training
    with held_save(tmp_path / "state", model, optimizer=optimizer, snapshot_bytes=1) as pending:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "pwritev", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
            before = model.model.norm.weight.detach().clone()
            train_plain(*training, (0,))
        assert not torch.equal(before, model.model.norm.weight)
    with pytest.raises(SaveError, match="No space left"):
        pending.wait()
    assert not list((tmp_path / "state").iterdir())


@pytest.mark.parametrize("room", [-1, True, "some", 1.5])
def test_wrong_rooms(tmp_path: Path, room: Any) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="^snapshot_bytes: expected .* got"):
        hf_zero_stream.save_state(
            model, tmp_path, optimizer=torch.optim.SGD(model.parameters()), asynchronous=True, snapshot_bytes=room
        )


def edit_by_deepspeed(folder: Path, target: Path, config: dict[str, Any]) -> list[str]:
    """What DeepSpeed has for edits waits until the writer needs the old values no more; the names of what it has."""
    import deepspeed
    from deepspeed.utils import (
        safe_set_full_fp32_param,
        safe_set_full_optimizer_state,
        safe_set_local_fp32_param,
        safe_set_local_optimizer_state,
    )

    engine = engine_of(folder, config, all_in_one_group)
    train(engine, (0,))
    hf_zero_stream.save_state(engine, target / "waited", **SHARDS)
    params = list(engine.module.parameters())

    def gather() -> None:
        with deepspeed.zero.GatheredParameters(params, modifier_rank=0):
            for param in params if dist.get_rank() == 0 else ():
                param.data.add_(1)

    def local(param: Any) -> torch.Tensor:
        return torch.ones_like(param.ds_tensor, dtype=torch.float32)

    def whole(param: Any) -> torch.Tensor:
        return torch.ones(param.shape)

    edits: dict[str, Callable[[], Any]] = {
        "set": lambda: [safe_set_full_fp32_param(it, whole(it)) for it in params],
        "set moments": lambda: [safe_set_full_optimizer_state(it, whole(it), "exp_avg") for it in params],
        "refreshed": engine.optimizer.refresh_fp32_params,
    }
    if engine.zero_optimization_stage() == 3:  # where setting all of an uneven parameter is an error of DeepSpeed's
        edits = {
            "gathered": gather,
            "set": lambda: [safe_set_local_fp32_param(it, local(it)) for it in params],
            "set moments": lambda: [safe_set_local_optimizer_state(it, local(it), "exp_avg") for it in params],
        }
    for how, edit in edits.items():
        with held_save(target / how, engine, snapshot_bytes=2**20) as pending:
            edit()
        pending.wait()
        hf_zero_stream.load_state(engine, target / "waited")
    return [*edits]


@pytest.mark.parametrize("stage", [3, 2, 1])
@pytest.mark.sample(2)
def test_edits_by_deepspeed(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, stage: int) -> None:
    for edits in run_ranks(2, edit_by_deepspeed, zoo_checkpoint("llama"), tmp_path, state_config(stage)):
        for how in edits:
            assert tree(tmp_path / how) == tree(tmp_path / "waited"), how


def test_merged_adapters(tmp_path: Path) -> None:
    """A base that its checkpoint does not have is saved, too, and merging waits."""
    from peft import LoraConfig, get_peft_model

    base, _, _ = plain_training(make_checkpoint("llama", tmp_path / "model", torch.float32), None)
    with torch.no_grad():
        for param in base.parameters():
            param.add_(0.5)
    model = get_peft_model(base, LoraConfig(target_modules=["up_proj"], init_lora_weights=False))
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad])
    hf_zero_stream.save_state(model, tmp_path / "waited", optimizer=optimizer, **SHARDS)
    before = base.model.layers[0].mlp.up_proj.weight.detach().clone()
    with held_save(tmp_path / "background", model, optimizer=optimizer) as pending:
        model.merge_adapter()
    assert pending.wait().ranks[0].seconds["held"] > 0
    assert not torch.equal(before, base.model.layers[0].mlp.up_proj.weight)
    assert tree(tmp_path / "background") == tree(tmp_path / "waited")


def test_copies_that_memory_does_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save is waited for, and says why; what the last save has left counts as free."""
    model, optimizer, _ = plain_training(make_checkpoint("llama", tmp_path / "model", torch.float32), None)
    how: dict[str, Any] = {"optimizer": optimizer, "asynchronous": True, "snapshot_bytes": "all"}
    said: list[str] = []
    monkeypatch.setattr(save_module.logger, "warning_once", said.append)
    free = save_module.free_memory
    for is_full, is_asynchronous in ((True, False), (False, True), (True, True)):
        monkeypatch.setattr(save_module, "free_memory", (lambda: 1000) if is_full else free)
        report = hf_zero_stream.save_state(model, tmp_path / "state", **how).wait()
        assert report.asynchronous == is_asynchronous
    assert len(said) == 1 and "copies of all would take" in said[0] and "1000 B are free" in said[0], said
