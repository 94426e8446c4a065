"""What ranks do not hold alike: buffers and schedulers of their own. Each rank goes on with its own, or as in stock.

- At stage 3, under FSDP2 and DDP each rank gets its own back; at stages 0 to 2 DeepSpeed's checkpoints have rank 0's.
- Other numbers of ranks are told what they get. Replicas that must be alike are compared, those of a base too.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

import hf_zero_stream
from hf_zero_stream import StreamingConfig
from tests.support.cluster import run_ranks
from tests.support.fsdp2 import announce, make_accelerator
from tests.support.messages import listen, outcome_of
from tests.support.training_state import all_in_one_group, state_config
from tests.support.trainings import Training, tokens_of
from tests.support.zoo import Checkpoint


class Kept(transformers.LlamaForCausalLM):
    """Scales its loss by a mean of the losses that this rank has seen, and keeps which tokens it was given last."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("last", torch.zeros(2, 9, dtype=torch.long))
        self.register_buffer("passing", torch.ones(2), persistent=False)

    def forward(self, input_ids: Any, labels: Any, **kwargs: Any) -> Any:
        found = super().forward(input_ids=input_ids, labels=labels, **kwargs)
        if self.training:
            self.scale.mul_(0.5).add_(0.5 * found.loss.detach() * (1 + dist.get_rank()))
            self.last.copy_(input_ids)
        found.loss = found.loss / self.scale
        return found


def own_tokens(number: int) -> dict[str, torch.Tensor]:
    return tokens_of(number + 100 * dist.get_rank())


ENGINES = {"stage 3": 3, "stage 2": 2, "stage 0": 0}


def training_in(home: str, folder: Path) -> Training:
    if home in ENGINES:
        config = state_config(ENGINES[home], torch.float32)
        with hf_zero_stream.streaming():
            model = Kept.from_pretrained(folder, dtype=torch.float32, ds_config=config)
        with torch.no_grad():
            model.scale.fill_(1)
        groups = all_in_one_group(model)
        return Training(deepspeed.initialize(model=model, config=config, model_parameters=groups)[0], batch=own_tokens)
    with hf_zero_stream.streaming():
        model = Kept.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        model.scale.fill_(1)
    if home == "DDP":
        model = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
        return Training(model, torch.optim.AdamW(model.parameters(), lr=1e-3), batch=own_tokens)
    announce(state_dict_type="SHARDED_STATE_DICT")
    accelerator = make_accelerator()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    return Training(model, optimizer, accelerator, batch=own_tokens, by="accelerate")


def kept_in(training: Training) -> tuple[float, list[int]]:
    model = getattr(training.trains, "module", training.trains)
    return float(model.scale), model.last.flatten().tolist()


def go_on(folder: Path, target: Path, home: str, asynchronous: bool = False) -> dict[str, Any]:
    """What this rank keeps at a save, and the losses after it: of the training itself, and of who goes on from it."""
    training = training_in(home, folder)
    found: dict[str, Any] = {}
    training.train(range(2))
    client = {"rank": dist.get_rank()}
    if home in ENGINES:
        training.trains.save_checkpoint(str(target / "stock"), client_state=client)
    with hf_zero_stream.streaming(StreamingConfig(asynchronous_save=asynchronous)):
        if home in ENGINES:
            training.trains.save_checkpoint(str(target / "ours"), client_state=client)
        else:
            training.save(target / "ours")
        found["training"] = kept_in(training), training.train((2, 3))
    for by in ("ours", "stock") if home in ENGINES else ("ours",):
        training = training_in(home, folder)
        with hf_zero_stream.streaming() if by == "ours" else nullcontext():
            if home in ENGINES:
                _, found[f"client of {by}"] = training.trains.load_checkpoint(str(target / by))
            else:
                training.load(target / by)
        found[by] = kept_in(training), training.train((2, 3))
    if home in ENGINES:
        assert found["client of ours"] == client, "which in stock is rank 0's at stages 0 to 2"
    return found


@pytest.mark.parametrize("home", [*ENGINES, "DDP", "accelerate's FSDP2"])
@pytest.mark.sample(3)
def test_buffers_of_ranks(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, home: str) -> None:
    for rank, found in enumerate(run_ranks(2, go_on, zoo_checkpoint("llama"), tmp_path, home, home == "stage 3")):
        assert found["ours"] == found.get("stock", found["training"])
        has_rank_0s = home in ("stage 2", "stage 0") and rank > 0
        assert (found["ours"][0] == found["training"][0]) is not has_rank_0s


class Small(nn.Module):
    """Has BatchNorm, whose statistics nobody shares."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.layers(values)


def small_training() -> tuple[Any, Any, Any]:
    model = nn.parallel.DistributedDataParallel(Small(), broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    return model, optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=100)


def train_small(model: Any, optimizer: Any, scheduler: Any, steps: range) -> None:
    for step in steps:
        values = torch.randn(8, 4, generator=torch.Generator().manual_seed(step + 100 * dist.get_rank()))
        optimizer.zero_grad()
        loss = model(values).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step(loss.detach().item())  # its own, and no mean of all


def own_of(model: Any, scheduler: Any) -> tuple[list[list[float]], dict[str, Any]]:
    return [each.flatten().tolist() for each in model.buffers()], scheduler.state_dict()


def save_small(target: Path) -> Any:
    training = small_training()
    for steps in (range(2), range(2, 4)):  # the second by the plan of the first
        train_small(*training, steps)
        how = {"optimizer": training[1], "scheduler": training[2], "data": dist.get_rank()}
        hf_zero_stream.save_state(training[0], target, **how)
    hf_zero_stream.save_state(training[0], target / "hosts", hosts=True, tag="t", **how)
    hf_zero_stream.save_state(training[0], target / "base", exclude_frozen=True, **how)
    with hf_zero_stream.streaming(StreamingConfig(write_from="rank0")):
        hf_zero_stream.save_state(training[0], target / "by one", **how)
    return own_of(training[0], training[2])


def load_small(source: Path, hosts: bool = False) -> Any:
    warnings = listen()
    model, optimizer, scheduler = small_training()
    hf_zero_stream.load_state(model, source, optimizer=optimizer, scheduler=scheduler, hosts=hosts)
    return own_of(model, scheduler), warnings


@pytest.mark.plugin("hosts")
def test_other_numbers_of_ranks(cluster: None, tmp_path: Path) -> None:
    """Each gets what the rank of its number had, and a new one what rank 0 had; the buffers are named."""
    own = run_ranks(2, save_small, tmp_path)
    for place in ("hosts", "base", "by one"):
        assert run_ranks(2, load_small, tmp_path / place, place == "hosts") == [(each, []) for each in own], place
    assert own[0][0] != own[1][0] and own[0][1]["best"] != own[1][1]["best"]
    for ranks in (1, 2, 3):
        for rank, (found, warned) in enumerate(run_ranks(ranks, load_small, tmp_path)):
            assert found == own[rank if rank < 2 else 0]
            said = [text for text in warned if "2 ranks saved different values" in text]
            assert len(said) == (rank == 0 and ranks != 2), warned
            assert all("data, scheduler, the buffer layers.1.running_mean" in text for text in said), said


def save_apart(folder: Path, target: Path) -> dict[str, Any]:
    """What saves say of trainings in which rank 1 has another value of what ranks hold in full."""
    model, optimizer, scheduler = small_training()
    train_small(model, optimizer, scheduler, range(2))
    weight = model.module.layers[0].weight
    found = {}
    for name, values in (("parameter", weight), ("moment", optimizer.state[weight]["momentum_buffer"])):
        with apart(values):
            found[name] = outcome_of(lambda: hf_zero_stream.save_state(model, target, optimizer=optimizer))
    optimizer.param_groups[0]["lr"] = 0.5 if dist.get_rank() else 0.1
    found["number"] = outcome_of(lambda: hf_zero_stream.save_state(model, target, optimizer=optimizer))
    with hf_zero_stream.streaming():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.model.requires_grad_(False)
    optimizer = torch.optim.SGD(model.lm_head.parameters(), lr=1e-2)
    with apart(model.model.embed_tokens.weight):
        how = {"optimizer": optimizer, "exclude_frozen": True}
        found["base"] = outcome_of(lambda: hf_zero_stream.save_state(model, target, **how))
    return found


@contextmanager
def apart(values: torch.Tensor) -> Iterator[None]:
    """Inside, rank 1 has another first value, which is in the part that rank 0 gives."""
    with torch.no_grad():
        first = values.view(-1)[0]
        before = float(first)
        first.add_(dist.get_rank())
        yield
        first.fill_(before)


def test_replicas_must_be_alike(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    for found in run_ranks(2, save_apart, zoo_checkpoint("llama"), tmp_path):
        for where, outcome in found.items():
            expected = (
                "has other lr on some ranks, which train the same" if where == "number" else "as a training keeps them"
            )
            assert "UnsupportedError" in str(outcome) and expected in outcome, where
