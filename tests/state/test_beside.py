"""Averages of weights that are kept beside a model: saved, resumed by other ranks, and written as weights."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import transformers
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers.distributed import DistributedConfig

import hf_zero_stream
from hf_zero_stream.errors import ConfigError, PeerError, SaveError, UnsupportedError
from tests.support.checkpoint_files import differing, tensors_of
from tests.support.cluster import run_ranks
from tests.support.messages import warnings_of
from tests.support.parity import ds_config
from tests.support.saving import SHARD_SIZE, different
from tests.support.sharded import even_model
from tests.support.training_state import different_states
from tests.support.trainings import Training


SHARDS = {"fsdp2": {"fsdp_size": 2}, "hsdp": {"dp_replicate_size": 2, "fsdp_size": 2}, "tp": {"tp_size": 2}}
STEPS = range(3)


def batch(number: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(5, 128, (2, 9), generator=torch.Generator().manual_seed(number))
    return {"input_ids": tokens, "labels": tokens}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    model = even_model("llama")
    model.save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def training_in(home: str, folder: Path, dtype: torch.dtype = torch.float32) -> Training:
    load = transformers.AutoModelForCausalLM.from_pretrained
    with hf_zero_stream.streaming():
        if home.startswith("stage"):
            config = ds_config(dtype, stage=int(home.split()[1]))
            config["optimizer"]["params"]["weight_decay"] = 0.01
            model = load(folder, dtype=dtype, ds_config=config)
            return Training(deepspeed.initialize(model=model, config=config)[0], batch=batch)
        sizes = SHARDS.get(home)
        model = load(folder, dtype=dtype, **({"distributed_config": DistributedConfig(**sizes)} if sizes else {}))
    return Training(model, torch.optim.AdamW(model.parameters(), lr=1e-3), batch=batch)


def own_part(param: Any) -> torch.Tensor:
    """What this rank has of a parameter."""
    part: torch.Tensor = getattr(param, "ds_tensor", param).detach()
    return part


class ByDiffusers:
    """The average that diffusers keeps, of what this rank has. What is not trained it does not average, but copies."""

    def __init__(self, training: Training, dtype: torch.dtype) -> None:
        from diffusers.training_utils import EMAModel  # which looks for ZeRO-3 while it is imported

        self.model = getattr(training.trains, "module", training.trains)
        self.ema = EMAModel(self.parts(), decay=0.75)
        self.kept = dict(zip((name for name, _ in self.model.named_parameters()), self.ema.shadow_params, strict=True))

    def parts(self) -> list[torch.Tensor]:
        return [own_part(param).detach().requires_grad_() for param in self.model.parameters()]

    def update(self) -> None:
        self.ema.step(self.parts())


class Average:
    """An average of a model's weights, as people write it: by names, of what this rank has."""

    def __init__(self, training: Training, dtype: torch.dtype) -> None:
        self.model = getattr(training.trains, "module", training.trains)
        self.kept = {name: own_part(param).to(dtype, copy=True) for name, param in self.model.named_parameters()}

    def update(self) -> None:
        for name, param in self.model.named_parameters():
            self.kept[name].mul_(0.75).add_(own_part(param), alpha=0.25)


Kind = type[Average] | type[ByDiffusers]


def save(home: str, folder: Path, target: Path, kind: Kind = Average) -> None:
    """Three steps, and an average of their weights; the weights of each step, the state, the average as weights."""
    training = training_in(home, folder)
    average = kind(training, torch.float32)
    for number in STEPS:
        training.train([number])
        average.update()
        hf_zero_stream.save_pretrained(training.trains, target / f"step {number}")
    hf_zero_stream.save_state(training.trains, target / "state", beside={"ema": average.kept}, **training.own)
    write(training, average, target)


def go_on(home: str, folder: Path, source: Path, target: Path, kind: Kind = Average) -> None:
    """Resume, and save what was loaded."""
    training = training_in(home, folder)
    average = kind(training, torch.float32)
    for values in average.kept.values():
        values.zero_()
    resumed = hf_zero_stream.load_state(
        training.trains, source / "state", beside={"ema": average.kept}, **training.own
    )
    assert resumed.counters["global_steps"] == len(STEPS)
    hf_zero_stream.save_state(training.trains, target / "state", beside={"ema": average.kept}, **training.own)
    write(training, average, target)


def write(training: Training, average: Average | ByDiffusers, target: Path) -> None:
    hf_zero_stream.save_pretrained(training.trains, target / "weights", values=average.kept, max_shard_size=SHARD_SIZE)


def plain(folder: Path, steps: Path) -> Any:
    """A model with the average of what was saved after each step, in one process."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for number in STEPS:
            values = tensors_of(steps / f"step {number}")
            for name, param in model.named_parameters():
                param.mul_(0.75).add_(values[name], alpha=0.25)
    return model


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("home", "ranks", "there", "others"),
    [
        ("stage 3", 2, "stage 3", 3),
        ("stage 3", 3, "fsdp2", 2),
        ("fsdp2", 2, "stage 3", 2),
        ("hsdp", 4, "whole", 1),
        ("tp", 2, "stage 1", 2),
        ("stage 2", 2, "tp", 2),
        ("whole", 1, "hsdp", 4),
    ],
)
def test_anywhere(
    cluster: None, checkpoint: Path, tmp_path: Path, home: str, ranks: int, there: str, others: int
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    run_ranks(ranks, save, home, checkpoint, first)
    plain(checkpoint, first).save_pretrained(tmp_path / "plain", max_shard_size=SHARD_SIZE)
    run_ranks(others, go_on, there, checkpoint, first, second)
    for folder in (first, second):
        assert different(folder / "weights", tmp_path / "plain") == []
    # Optimizers of two makers have other options.
    assert {*different_states(first / "state", second / "state")} <= {"groups"}


@pytest.mark.parametrize(
    ("home", "ranks", "there", "others"),
    [("stage 3", 2, "fsdp2", 2), ("fsdp2", 2, "stage 3", 3), ("stage 2", 2, "whole", 1)],
)
def test_diffusers(
    cluster: None, checkpoint: Path, tmp_path: Path, home: str, ranks: int, there: str, others: int
) -> None:
    """Its EMAModel, whose decay grows, and which knows parameters by their order alone."""
    from diffusers.training_utils import EMAModel

    first, second = tmp_path / "first", tmp_path / "second"
    run_ranks(ranks, save, home, checkpoint, first, ByDiffusers)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    ema = EMAModel(model.parameters(), decay=0.75)
    for number in STEPS:
        values = tensors_of(first / f"step {number}")
        for name, param in model.named_parameters():
            param.data.copy_(values[name])
        ema.step(model.parameters())
    ema.copy_to(model.parameters())
    model.save_pretrained(tmp_path / "plain", max_shard_size=SHARD_SIZE)
    run_ranks(others, go_on, there, checkpoint, first, second, ByDiffusers)
    for folder in (first, second):
        assert different(folder / "weights", tmp_path / "plain") == []
    assert {*different_states(first / "state", second / "state")} <= {"groups"}


def averaged_by_torch(home: str, folder: Path, target: Path, how: str) -> dict[str, Any]:
    """What torch's own average of a training is after three steps and, `how` is "resumed", after a resume at two."""
    training = training_in(home, folder)
    model = getattr(training.trains, "module", training.trains)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.75))
    beside = {"ema": average}
    if how == "resumed":
        hf_zero_stream.load_state(training.trains, target, beside=beside, **training.own)
    for number in STEPS if how == "first" else [*STEPS][2:]:
        training.train([number])
        average.update_parameters(model)
        if how == "first" and number == 1:
            hf_zero_stream.save_state(training.trains, target, beside=beside, **training.own)
    hf_zero_stream.save_pretrained(training.trains, target / how, values=average)
    return {"averaged": int(average.n_averaged)}


@pytest.mark.parametrize("home", ["whole", "stage 1"])
def test_averaged_model(cluster: None, checkpoint: Path, tmp_path: Path, home: str) -> None:
    """How often it was averaged is in the state too: without that, the first one after a resume would begin anew."""
    ranks = 1 if home == "whole" else 2
    for how in ("first", "resumed"):
        for found in run_ranks(ranks, averaged_by_torch, home, checkpoint, tmp_path, how):
            assert found["averaged"] == 3
    assert different(tmp_path / "first", tmp_path / "resumed") == []
    assert differing(tensors_of(tmp_path / "first"), tensors_of(tmp_path)), "after two steps"


def averaged_in_shards(folder: Path, target: Path, resumes: bool) -> dict[str, Any]:
    """torch's own average, made before FSDP2 shards both models; what it is, as weights."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.75))
    for each in (model, average.module):
        for part in (*each.model.layers, each):
            fully_shard(part)
    training = Training(model, torch.optim.AdamW(model.parameters(), lr=1e-3), batch=batch)
    beside = {"ema": average}
    if resumes:
        hf_zero_stream.load_state(model, target / "state", beside=beside, **training.own)
    for number in STEPS if not resumes else ():
        training.train([number])
        average.update_parameters(model)
        hf_zero_stream.save_pretrained(model, target / f"step {number}")
    if not resumes:
        hf_zero_stream.save_state(model, target / "state", beside=beside, **training.own)
    written = target / ("again" if resumes else "weights")
    hf_zero_stream.save_pretrained(model, written, values=average, max_shard_size=SHARD_SIZE)
    return {"averaged": int(average.n_averaged)}


def averaged_plainly(folder: Path, steps: Path, target: Path) -> None:
    """torch's own average of what was saved after each step, in one process."""
    load = transformers.AutoModelForCausalLM.from_pretrained
    average = AveragedModel(load(folder), multi_avg_fn=get_ema_multi_avg_fn(0.75))
    for number in STEPS:
        average.update_parameters(load(steps / f"step {number}"))
    average.module.save_pretrained(target, max_shard_size=SHARD_SIZE)


def test_averaged_shards(cluster: None, checkpoint: Path, tmp_path: Path) -> None:
    for ranks, resumes in ((2, False), (3, True)):
        found = run_ranks(ranks, averaged_in_shards, checkpoint, tmp_path, resumes)
        assert found == [{"averaged": len(STEPS)}] * ranks
    averaged_plainly(checkpoint, tmp_path, tmp_path / "plain")
    for name in ("weights", "again"):
        assert different(tmp_path / name, tmp_path / "plain") == []


def averaged_whole(folder: Path, target: Path) -> dict[str, Any]:
    """torch's own average of a model that ZeRO-3 has partitioned: refused, but where it has values."""
    config = ds_config(torch.float32, stage3_param_persistence_threshold=0)  # small ones too are empty between steps
    with hf_zero_stream.streaming():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, ds_config=config)
    empty: Any = copy.deepcopy(model)
    clones = {name: param.detach().clone() for name, param in model.named_parameters()}
    refused: list[Callable[[], Any]] = [
        lambda: AveragedModel(model),
        lambda: hf_zero_stream.save_pretrained(empty, target / "empty"),
        lambda: hf_zero_stream.save_state(empty, target / "empty", optimizer=torch.optim.SGD(empty.parameters())),
        lambda: hf_zero_stream.save_pretrained(model, target / "empty", values=empty),
        lambda: hf_zero_stream.save_pretrained(model, target / "empty", values=clones),
    ]
    with hf_zero_stream.streaming():
        for call in [*refused, lambda: empty.save_pretrained(target / "empty")]:
            with pytest.raises((ConfigError, SaveError, UnsupportedError), match="of what ZeRO-3 has partitioned"):
                call()
    training = Training(deepspeed.initialize(model=model, config=config)[0], batch=batch)
    params, average = [*model.parameters()], None
    for number in STEPS:
        training.train([number])
        with deepspeed.zero.GatheredParameters(params):
            average = average or AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.75))
            average.update_parameters(model)
        hf_zero_stream.save_pretrained(training.trains, target / f"step {number}")
    assert average is not None
    hf_zero_stream.save_state(training.trains, target / "state", beside={"ema": average})
    hf_zero_stream.save_pretrained(training.trains, target / "weights", values=average, max_shard_size=SHARD_SIZE)
    return {"averaged": int(average.n_averaged)}


def test_copies_of_partitions(cluster: None, checkpoint: Path, tmp_path: Path) -> None:
    """A copy is empty, and an average of it would be of nothing, without a word: Lightning's callback makes one."""
    first, second = tmp_path / "first", tmp_path / "second"
    assert run_ranks(2, averaged_whole, checkpoint, first) == [{"averaged": len(STEPS)}] * 2
    assert [path for path in (first / "empty").rglob("*") if path.is_file()] == []
    averaged_plainly(checkpoint, first, tmp_path / "plain")
    run_ranks(2, go_on, "fsdp2", checkpoint, first, second)
    assert different(first / "weights", tmp_path / "plain") == []
    assert different(second / "weights", tmp_path / "plain") == []


def in_background(home: str, folder: Path, target: Path) -> None:
    training = training_in(home, folder, torch.bfloat16)
    average = Average(training, torch.float32)
    training.train([0])
    average.update()
    hf_zero_stream.save_state(training.trains, target / "at once", beside={"ema": average.kept}, **training.own)
    pending = hf_zero_stream.save_state(
        training.trains, target / "background", beside={"ema": average.kept}, asynchronous=True, **training.own
    )
    for values in average.kept.values():
        values.zero_()
    training.train([1])
    pending.wait()


def test_background(cluster: None, checkpoint: Path, tmp_path: Path) -> None:
    """A state has the averages of the call, whatever becomes of them."""
    run_ranks(2, in_background, "stage 3", checkpoint, tmp_path)
    assert different_states(tmp_path / "at once", tmp_path / "background") == []


def other_shards(folder: Path, target: Path) -> None:
    """Averages that are sharded in another way than the model, or in another dtype; as weights, and loaded again."""
    training = training_in("fsdp2", folder, torch.bfloat16)
    model = training.trains
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    partitioned = training_in("stage 3", folder).trains.module
    for number, kept in enumerate((whole, partitioned, dict(whole.named_parameters()))):
        beside = {"one": kept}
        hf_zero_stream.save_state(model, target / f"{number}", beside=beside, **training.own)
        hf_zero_stream.save_pretrained(model, target / "weights" / f"{number}", values=kept)
        hf_zero_stream.save_pretrained(model, target / "fp32" / f"{number}", values=kept, dtype=torch.float32)
    expected = {name: param.detach().clone() for name, param in whole.named_parameters()}
    for param in whole.parameters():
        param.detach().zero_()
    hf_zero_stream.load_state(model, target / "1", beside={"one": whole}, **training.own)
    assert all(torch.equal(param, expected[name]) for name, param in whole.named_parameters())
    report = hf_zero_stream.load_into(model, target / "weights" / "0")
    assert report.streamed
    for name, param in model.named_parameters():
        assert torch.equal(param.full_tensor(), expected[name].to(torch.bfloat16)), name


def test_other_shards(cluster: None, checkpoint: Path, tmp_path: Path) -> None:
    run_ranks(2, other_shards, checkpoint, tmp_path)
    stock = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    stock.save_pretrained(tmp_path / "bf16")
    for number in range(3):
        assert different(tmp_path / "weights" / f"{number}", tmp_path / "bf16") == []
        assert differing(tensors_of(tmp_path / "fp32" / f"{number}"), tensors_of(checkpoint)) == []
        assert different_states(tmp_path / f"{number}", tmp_path / "0") == []


def refused(folder: Path, target: Path) -> dict[str, Any]:
    training = training_in("stage 3", folder)
    average = Average(training, torch.float32)
    name = "model.layers.0.mlp.up_proj.weight"
    part = average.kept[name]
    wrong: list[tuple[str, Any, type[Exception], str]] = [
        ("exp_avg", average.kept, ConfigError, "none that the state has already"),
        ("values", average.kept, ConfigError, "none that the state has already"),
        ("no name", average.kept, ConfigError, "identifier"),
        ("ema", {}, ConfigError, "at least one"),
        ("ema", [*average.kept.values()], ConfigError, "got list. Of diffusers' EMAModel"),
        ("ema", {"decay": torch.zeros(1)}, ConfigError, "it has no decay"),
        ("ema", {name: part[:-1]}, ConfigError, f"{name}: expected {part.numel()} elements"),
        ("ema", {name: part.view(-1, 2).t()}, UnsupportedError, "row-major"),
        ("ema", {name: part.to_sparse()}, UnsupportedError, "sparse"),
    ]
    training.train([0])
    for key, kept, error, text in wrong:
        with pytest.raises(error, match=text):
            hf_zero_stream.save_state(training.trains, target, beside={key: kept})
    assert not target.exists()
    hf_zero_stream.save_state(training.trains, target, beside={"ema": average.kept})
    with pytest.raises(ConfigError, match="expected ema, as was saved beside the model; got swa"):
        hf_zero_stream.load_state(training.trains, target, beside={"swa": average.kept})
    with warnings_of("hf_zero_stream") as said:
        hf_zero_stream.load_state(training.trains, target)
    return {"said": [text for text in said if "beside=" in text]}


def test_refused(cluster: None, checkpoint: Path, tmp_path: Path) -> None:
    """By name, on all ranks, before anything is written; and what is there and not asked for is said."""
    first, second = run_ranks(2, refused, checkpoint, tmp_path / "state")
    assert len(first["said"]) == 1 and "ema is there too" in first["said"][0] and second["said"] == []


def one_rank_alone(folder: Path, target: Path) -> None:
    training = training_in("stage 3", folder)
    kept = Average(training, torch.float32).kept
    if torch.distributed.get_rank() == 1:
        kept.pop("lm_head.weight")
    training.train([0])
    with pytest.raises(SaveError, match="rank 0|names"):
        hf_zero_stream.save_state(training.trains, target, beside={"ema": kept})
    if torch.distributed.get_rank() == 1:
        kept["lm_head.weight"] = torch.zeros(3)
    else:
        kept["lm_head.weight"] = kept["lm_head.weight"][:3]
    with pytest.raises((ConfigError, PeerError), match="lm_head.weight: expected|rank"):
        hf_zero_stream.save_state(training.trains, target, beside={"ema": kept})


def test_ranks_that_keep_others(cluster: None, checkpoint: Path, tmp_path: Path) -> None:
    run_ranks(2, one_rank_alone, checkpoint, tmp_path / "state")
    assert [*tmp_path.rglob("state/**/*.safetensors")] == []
