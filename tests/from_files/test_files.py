"""Files that change while a training reads from them, and what is refused."""

import os
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_zero_stream
from benchmarks.moe_checkpoint import make_moe_checkpoint
from hf_zero_stream.errors import CheckpointError, ConfigError, UnsupportedError
from tests.from_files.trainings import adapted, config_for, digest, engine_of, load, steps, swapper_of
from tests.support.cluster import SOON_S, run_ranks, run_ranks_expecting_errors


@pytest.fixture
def mixture(tmp_path: Path) -> Path:
    return make_moe_checkpoint(tmp_path / "moe", 1e7, num_layers=3, num_experts=4)


def change(path: Path, how: str) -> None:
    if how == "truncated":
        os.truncate(path, path.stat().st_size - 4096)
    elif how == "written to":
        with open(path, "r+b") as file:
            file.seek(-4096, os.SEEK_END)
            file.write(bytes(4096))
    elif how == "replaced":
        (path.parent / "new").write_bytes(bytes(8))
        os.replace(path.parent / "new", path)
    else:
        path.unlink()


def train_while(folder: Path, how: str) -> tuple[list[float], str, str]:
    """Losses of steps, and the error, where rank 0 changes a shard after two; adapters before it and after."""
    config = config_for()
    model = adapted(load(folder, config, "files"))
    engine = engine_of(model, config)
    losses = [*steps(engine, 2)]
    before = digest(model)
    torch.distributed.barrier()
    if how and torch.distributed.get_rank() == 0:
        change(sorted(folder.glob("*.safetensors"))[-1], how)
    torch.distributed.barrier()
    try:
        losses += steps(engine, 2, first=2)
    except CheckpointError as error:
        assert digest(model) == before, "a step was made of other weights"
        return losses, str(error), type(error).__name__
    return losses, "", ""


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("how", ["truncated", "written to"])
def test_a_file_that_changes_is_an_error_on_all_ranks(cluster: None, mixture: Path, how: str, world_size: int) -> None:
    ranks = run_ranks(world_size, train_while, mixture, how)
    for losses, message, _ in ranks:
        assert len(losses) == 2
        assert how in message and "model-00004-of-00004.safetensors" in message and "frozen_weights" in message


def use_inner_models(folder: Path) -> list[str]:
    """The errors of passes through what PEFT wraps, after rank 0 has written to a shard."""
    engine = engine_of(adapted(load(folder, config_for(), "files")), config_for())
    list(steps(engine, 1))
    engine.eval()
    ids, errors = torch.arange(8).view(1, -1), []
    model = engine.module
    passes = [lambda: model.generate(input_ids=ids, max_new_tokens=3), lambda: model.get_base_model().model(ids)]
    for is_changed in (False, True):
        torch.distributed.barrier()
        if is_changed and torch.distributed.get_rank() == 0:
            change(sorted(folder.glob("*.safetensors"))[-1], "written to")
        torch.distributed.barrier()
        for go in passes:
            try:
                with torch.no_grad():
                    go()
                errors.append("")
            except CheckpointError as error:
                errors.append(str(error))
    return errors


def test_a_file_that_changes_is_an_error_of_models_inside(cluster: None, mixture: Path) -> None:
    """PEFT's ``generate`` calls the model that it wraps, and nobody makes a step after that."""
    for errors in run_ranks(2, use_inner_models, mixture):
        assert errors[:2] == ["", ""] and all("written to" in error for error in errors[2:])


@pytest.mark.parametrize("how", ["replaced", "removed"])
def test_a_file_that_is_replaced_goes_on_to_be_read(cluster: None, mixture: Path, how: str) -> None:
    untouched = run_ranks(2, train_while, mixture, "")
    assert run_ranks(2, train_while, mixture, how) == untouched
    assert len(untouched[0][0]) == 4


def fail_on_one_rank(folder: Path, fails: int, where: str) -> None:
    """One rank cannot read what is its part, while the other waits in a gather, or goes on."""
    config = config_for()
    model = adapted(load(folder, config, "files", frozen_bytes=2**20))
    head, files = model.get_base_model().lm_head, swapper_of(model)._files
    read = files.read
    fail = not_read if torch.distributed.get_rank() == fails else read
    if where == "initialize":
        files.read = fail
        head.requires_grad_(True)
    engine = engine_of(model, config)
    list(steps(engine, 1))
    with deepspeed.zero.GatheredParameters([head.weight]):
        before = head.weight.detach().clone()
    files.read = read if where == "writer" else fail
    try:
        if where == "step":
            list(steps(engine, 1, first=1))
        elif where == "module":
            engine.eval()
            with torch.no_grad():
                head(torch.ones(1, 1, head.in_features, dtype=torch.bfloat16))
        else:
            with deepspeed.zero.GatheredParameters([head.weight], modifier_rank=0 if where == "writer" else None):
                files.read = fail
    except hf_zero_stream.errors.HfZeroStreamError:
        files.read = read
        with deepspeed.zero.GatheredParameters([head.weight]):
            assert torch.equal(head.weight, before)
        raise


def not_read(weight: Any, memory: torch.Tensor) -> None:
    raise hf_zero_stream.errors.ReadError(f"model-00001-of-00004.safetensors: cannot read {weight.name}")


@pytest.mark.parametrize(
    ("where", "fails"), [("step", 0), ("step", 1), ("initialize", 1), ("module", 1), ("gather", 1), ("writer", 1)]
)
def test_a_rank_that_cannot_read_brings_all_down(cluster: None, mixture: Path, where: str, fails: int) -> None:
    ranks = run_ranks_expecting_errors(2, fail_on_one_rank, mixture, fails, where, timeout=60)
    for rank in ranks:
        assert rank.error_type == "ReadError" and "model-00001-of-00004" in str(rank.error_message)
        assert rank.seconds < SOON_S
    assert f"rank {fails}" in str(ranks[1 - fails].error_message)


def write(folder: Path) -> list[str]:
    """What is said of writes to a frozen weight, and whether it has its values and can be used after that."""
    config, found = config_for(), list[str]()
    model = load(folder, config, "files")
    param = model.get_parameter("model.layers.1.self_attn.q_proj.weight")
    with deepspeed.zero.GatheredParameters([param]):
        before = param.detach().clone()
    with deepspeed.zero.GatheredParameters([param], modifier_rank=0):
        pass  # many give a rank that only read
    for _ in range(2):
        try:
            with deepspeed.zero.GatheredParameters([param], modifier_rank=0):
                param.data.zero_()
        except UnsupportedError as error:
            found.append(str(error))
        with deepspeed.zero.GatheredParameters([param]):
            assert torch.equal(param, before)
    try:
        hf_zero_stream.load_into(model, folder)
    except UnsupportedError as error:
        found.append(str(error))
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_writes_are_refused(cluster: None, mixture: Path, world_size: int) -> None:
    for first, second, third in run_ranks(world_size, write, mixture):
        assert first == second and "model.layers.1.self_attn.q_proj.weight" in first and "optimizer" in first
        assert "cannot be written to" in third


def merge(folder: Path) -> tuple[str, bool]:
    """What is said of a merge, outside of streaming(), and whether the adapters are still apart from the base."""
    config = config_for()
    model = adapted(load(folder, config, "files"))
    engine = engine_of(model, config)
    losses = [*steps(engine, 1)]
    message = ""
    try:
        model.merge_adapter()
    except UnsupportedError as error:
        message = str(error)
    merged = [module for module in model.modules() if getattr(module, "merged_adapters", None)]
    return message, not merged and len([*losses, *steps(engine, 1, first=1)]) == 2


def test_nothing_is_merged_into_files(cluster: None, mixture: Path) -> None:
    for message, is_whole in run_ranks(2, merge, mixture):
        assert "merge there" in message and is_whole


def refuse(folder: Path, case: str) -> str:
    config = config_for()
    settings: dict[str, Any] = {}
    if case == "another stage":
        config["zero_optimization"] = {"stage": 2}
    elif case == "NVMe":
        config["zero_optimization"]["offload_param"] = {"device": "nvme", "nvme_path": str(folder)}
    elif case == "hpZ":
        config["zero_optimization"]["zero_hpz_partition_size"] = 2
    elif case == "AutoTP":
        config["tensor_parallel"] = {"autotp_size": 2}
    elif case == "a small arena":
        settings["frozen_bytes"] = 4096
    elif case == "rank 0 reads":
        settings["read_from"] = "rank0"
    model: Any
    try:
        model = load(folder, config, "files", **settings)
        if case == "forgotten":
            model = adapted(model)
            model.base_model.model.lm_head.weight.requires_grad_(True)
            lora = [param for name, param in model.named_parameters() if "lora" in name]
            deepspeed.initialize(model=model, model_parameters=lora, config=config)
    except (ConfigError, UnsupportedError) as error:
        return str(error)
    return ""


CASES = {
    "another stage": "ZeRO-3",
    "NVMe": "offload_param",
    "hpZ": "zero_hpz_partition_size",
    "AutoTP": "autotp_size",
    "a small arena": "frozen_bytes",
    "rank 0 reads": "read_from",
    "forgotten": "lm_head.weight",
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", [*CASES])
def test_what_does_not_go_with_it_is_refused(cluster: None, mixture: Path, case: str) -> None:
    for message in run_ranks(2, refuse, mixture, case):
        assert CASES[case] in message, message


def test_a_load_without_zero3_is_refused(mixture: Path) -> None:
    with hf_zero_stream.streaming(frozen_weights="files"), pytest.raises(UnsupportedError, match="ZeRO-3"):
        AutoModelForCausalLM.from_pretrained(mixture)
