"""Saves, states, resumes, DeepSpeed's own checkpoints, and models without an optimizer, with weights in files."""

import hashlib
import logging
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import hf_zero_stream
from benchmarks.moe_checkpoint import make_moe_checkpoint
from hf_zero_stream.errors import CheckpointError, SaveError
from tests.from_files.trainings import (
    adapted,
    config_for,
    counted_reads,
    digest,
    engine_of,
    frozen_bytes,
    load,
    steps,
    swapper_of,
)
from tests.support.cluster import run_ranks, run_ranks_expecting_errors


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_moe_checkpoint(tmp_path_factory.mktemp("moe"), 1e7, num_layers=3, num_experts=4)


def save_weights(folder: Path, target: Path) -> None:
    with hf_zero_stream.streaming():
        load(folder, config_for(), "files").save_pretrained(target)


def test_save_pretrained_writes_what_the_files_have(cluster: None, mixture: Path, tmp_path: Path) -> None:
    run_ranks(2, save_weights, mixture, tmp_path / "saved")
    tensors: dict[str, torch.Tensor] = {}
    saved: dict[str, torch.Tensor] = {}
    for folder, found in ((mixture, tensors), (tmp_path / "saved", saved)):
        for shard in folder.glob("*.safetensors"):
            found |= load_file(shard)
    assert saved.keys() == tensors.keys() and all(torch.equal(saved[name], tensors[name]) for name in tensors)


def train_and_save(folder: Path, states: Path, dies: bool) -> list[float]:
    """Two steps, a state, two more: in these another rank dies if one `dies`."""
    config = config_for()
    engine = engine_of(adapted(load(folder, config, "files")), config)
    list(steps(engine, 2))
    hf_zero_stream.save_state(engine, states)
    if dies and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return [*steps(engine, 2, first=2)]


def save_twice(folder: Path, states: Path) -> list[float]:
    """What a first state, and one after another step, read of files, over this rank's part of the frozen bytes."""
    config = config_for()
    engine, found = engine_of(adapted(load(folder, config, "files", frozen_bytes=2**21)), config), []
    frozen = frozen_bytes(engine.module) / dist.get_world_size()
    for number in range(2):
        list(steps(engine, 1, first=number))
        with counted_reads() as bytes_so_far:
            hf_zero_stream.save_state(engine, states)
            found.append(bytes_so_far() / frozen)
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_states_read_a_base_in_files_once(cluster: None, mixture: Path, tmp_path: Path, world_size: int) -> None:
    """What is in files is in the checkpoint; and it cannot change without an error."""
    for first, second in run_ranks(world_size, save_twice, mixture, tmp_path):
        assert 0.5 < first < 1.05 and second < 0.05
    of_files, of_memory = (run_ranks(world_size, resume, mixture, tmp_path, kind, 0) for kind in ("files", "memory"))
    assert of_files == of_memory


def save_while(folder: Path, states: Path, is_first: bool) -> str:
    """The error of a state, the first or not, that is saved after a file of the base was written to; and of a step."""
    config = config_for()
    engine = engine_of(adapted(load(folder, config, "files", frozen_bytes=2**21)), config)
    list(steps(engine, 1))
    if not is_first:
        hf_zero_stream.save_state(engine, states)
    dist.barrier()
    if dist.get_rank() == 0:
        with open(sorted(folder.glob("*.safetensors"))[-1], "r+b") as file:
            file.seek(-4096, os.SEEK_END)
            file.write(bytes(4096))
    dist.barrier()
    try:
        hf_zero_stream.save_state(engine, states)
    except (CheckpointError, SaveError) as error:
        return str(error)
    with pytest.raises(CheckpointError, match="written to"):
        list(steps(engine, 1, first=1))
    return ""


def test_a_base_that_changes_is_noticed(cluster: None, tmp_path: Path) -> None:
    """By the first state, which reads it. One that knows it is of the base that was trained on; a resume compares."""
    for is_first in (True, False):
        folder = make_moe_checkpoint(tmp_path / f"moe-{is_first}", 1e7, num_layers=3, num_experts=4)
        for message in run_ranks(2, save_while, folder, tmp_path / "states", is_first):
            assert ("was written to" in message) == is_first, message
    for outcome in run_ranks_expecting_errors(2, resume, folder, tmp_path / "states", "files", 0):
        assert outcome.error_type == "ConfigError" and "another base" in str(outcome.error_message)


def resume(folder: Path, states: Path, frozen_weights: str, count: int) -> tuple[list[float], str]:
    """Losses of the steps that follow a state, and a digest of its adapters, whole."""
    config = config_for()
    engine = engine_of(adapted(load(folder, config, frozen_weights)), config)
    hf_zero_stream.load_state(engine, states)
    found = hashlib.sha256()
    for name, param in sorted(engine.module.named_parameters()):
        if param.requires_grad:
            with deepspeed.zero.GatheredParameters([param]):
                found.update(name.encode() + param.detach().view(torch.uint8).numpy().tobytes())
    return [*steps(engine, count, first=2)], found.hexdigest()


def test_a_training_that_was_killed_goes_on_on_any_number_of_ranks(
    cluster: None, mixture: Path, tmp_path: Path
) -> None:
    went_on = run_ranks(2, train_and_save, mixture, tmp_path / "whole", False)
    run_ranks_expecting_errors(2, train_and_save, mixture, tmp_path / "killed", True, timeout=60)
    resumed = run_ranks(2, resume, mixture, tmp_path / "killed", "files", 2)
    assert [losses for losses, _ in resumed] == went_on
    elsewhere = shutil.copytree(mixture, tmp_path / "elsewhere")
    (of_one_rank,) = run_ranks(1, resume, elsewhere, tmp_path / "killed", "files", 0)
    in_memory = run_ranks(2, resume, mixture, tmp_path / "killed", "memory", 2)
    assert of_one_rank[1] == resumed[0][1] and in_memory == resumed


def deepspeed_checkpoint(folder: Path, target: Path, saved_from: str, loaded_into: str) -> list[Any]:
    """Names of frozen weights in a checkpoint of DeepSpeed's own, and whether a new engine goes on from it."""
    config = config_for()
    engine = engine_of(adapted(load(folder, config, saved_from)), config)
    list(steps(engine, 2))
    engine.save_checkpoint(str(target), tag="two")
    rank = dist.get_rank()
    name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
    fragments = torch.load(target / "two" / name, weights_only=False)["frozen_param_fragments"]
    before, losses = digest(engine.module), [*steps(engine, 2, first=2)]
    engine.destroy()
    again = engine_of(adapted(load(folder, config, loaded_into)), config)
    again.load_checkpoint(str(target), tag="two")
    assert digest(again.module) == before
    return [
        sorted(fragments),
        losses == [*steps(again, 2, first=2)],
        sum(it.numel() == 0 for it in fragments.values()),
    ]


@pytest.mark.parametrize(("saved_from", "loaded_into"), [("files", "files"), ("memory", "files")])
def test_a_checkpoint_of_deepspeeds_own_has_no_empty_weights(
    cluster: None, mixture: Path, tmp_path: Path, saved_from: str, loaded_into: str
) -> None:
    for names, goes_on, empty in run_ranks(2, deepspeed_checkpoint, mixture, tmp_path, saved_from, loaded_into):
        assert goes_on and not empty
        assert bool(names) == (saved_from == "memory")


def infer(folder: Path, frozen_weights: str, persists: int) -> list[Any]:
    """Logits of a frozen model in an engine without an optimizer, as TRL makes it, and what two passes read."""
    config = {key: value for key, value in config_for().items() if key != "optimizer"}
    model = load(folder, config, frozen_weights, frozen_bytes=2**21)
    config["zero_optimization"] = {"stage": 3, "stage3_param_persistence_threshold": persists}
    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.eval()
    found = []
    with counted_reads() as bytes_so_far, torch.no_grad():
        for step in range(4):  # in the first two it comes to know the order
            ids = (torch.arange(16).view(1, -1) * (3 + step) + dist.get_rank()) % 1000
            found.append(engine(input_ids=ids).logits.double().sum().item())
            if step == 1:
                first = bytes_so_far()
    return [found, (bytes_so_far() - first) / 2 / sum(p.ds_numel * 2 for p in model.parameters())]


@pytest.mark.parametrize("persists", [0, 10000])
def test_a_frozen_model_without_an_optimizer_is_read_once_a_pass(cluster: None, mixture: Path, persists: int) -> None:
    from_files = run_ranks(2, infer, mixture, "files", persists)
    in_memory = run_ranks(2, infer, mixture, "memory", persists)
    assert [found for found, _ in from_files] == [found for found, _ in in_memory]
    assert 0.4 < sum(multiple for _, multiple in from_files) <= 1.01


def unfreeze(folder: Path, frozen_weights: str) -> tuple[list[float], str, int]:
    """A training of one weight of the base; how many are in files then."""
    config = config_for()
    model = load(folder, config, frozen_weights)
    model.enable_input_require_grads()
    model.requires_grad_(False)
    model.get_parameter("model.layers.1.self_attn.q_proj.weight").requires_grad_(True)
    engine = engine_of(model, config)
    in_files = len(swapper_of(model)._weights) if frozen_weights == "files" else 0
    return [*steps(engine, 3)], digest(model), in_files


def test_what_the_optimizer_has_is_read_into_memory(cluster: None, mixture: Path) -> None:
    from_files, in_memory = (run_ranks(2, unfreeze, mixture, kind) for kind in ("files", "memory"))
    assert [found[:2] for found in from_files] == [found[:2] for found in in_memory]
    assert from_files[0][2] > 20


def generate(folder: Path) -> tuple[list[list[int]], list[str]]:
    """Tokens of a model in files, twice; and what the log says meanwhile."""
    said = logging.Handler()
    lines: list[str] = []
    said.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hf_zero_stream").addHandler(said)
    config = config_for()
    model: Any = load(folder, config, "files")
    engine, *_ = deepspeed.initialize(model=model, config={k: v for k, v in config.items() if k != "optimizer"})
    ids = torch.arange(8).view(1, -1)
    with hf_zero_stream.streaming():
        found = [engine.module.generate(ids, max_new_tokens=3, do_sample=False)[0].tolist() for _ in range(2)]
    return found, lines


def test_generate_says_once_what_a_token_costs(cluster: None, mixture: Path) -> None:
    ((tokens, lines),) = run_ranks(1, generate, mixture)
    assert tokens[0] == tokens[1] and len(tokens[0]) == 11
    assert sum("for each token" in line for line in lines) == 1


def gathered_after_a_cast(folder: Path, frozen_weights: str) -> torch.Tensor:
    model = load(folder, config_for(), frozen_weights).float()
    with deepspeed.zero.GatheredParameters([model.lm_head.weight]):
        return model.lm_head.weight.detach().clone()


def test_a_cast_leaves_what_is_in_files(cluster: None, mixture: Path) -> None:
    (from_files,), (in_memory,) = (run_ranks(1, gathered_after_a_cast, mixture, kind) for kind in ("files", "memory"))
    assert from_files.dtype == in_memory.dtype and torch.equal(from_files, in_memory)
