"""What neither we nor the checkpoints of DeepSpeed or accelerate bring back is an error, and no checkpoint."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import hf_zero_stream
from tests.state.optimizers import parameters_of, training_in
from tests.state.test_refused import message_of
from tests.support.cluster import run_ranks
from tests.support.fsdp2 import announce, load, make_accelerator
from tests.support.training_state import accelerated_steps
from tests.support.zoo import Checkpoint


class KeepsText(torch.optim.SGD):
    """Keeps a string, and norms of rows, which no state of ours has."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for param in self.param_groups[0]["params"]:
            self.state[param] |= {"norms": torch.ones(3), "mode": ("warm", 1)}


class KeepsByTensors(torch.optim.SGD):
    """Keeps what belongs to parameters in their group, as grokadamw does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        group = self.param_groups[0]
        for param in group["params"]:
            group.setdefault("state", {}).setdefault(param, {"steps": 0})["steps"] += 1


KINDS = {KeepsText: "mode (a string", KeepsByTensors: "state of group 0 (kept by tensors"}


def by_engines(folder: Path, target: Path, homes: list[str]) -> list[Any]:
    """By kind and home: the error inside ``streaming()``; and what stock's checkpoint has made of what is kept."""
    found = []
    for kind in KINDS:
        for home in homes:
            training = training_in(home, folder, lambda model, kind=kind: kind(parameters_of(model), lr=1e-2))
            training.train(range(2))
            with hf_zero_stream.streaming():
                message = message_of(lambda: training.trains.save_checkpoint(str(target / f"ours {kind} {home}")))
            training.trains.save_checkpoint(str(target / f"stock {kind} {home}"))
            training = training_in(home, folder, lambda model, kind=kind: kind(parameters_of(model), lr=1e-2))
            training.trains.load_checkpoint(str(target / f"stock {kind} {home}"))
            modes = [entries["mode"][0] for entries in training.inner.state.values() if "mode" in entries]
            training.train([2])
            kept = training.inner.param_groups[0].get("state", {})
            found.append((kind, message, modes[:1], [entries["steps"] for entries in kept.values()]))
    return found


def by_accelerate(folder: Path, target: Path) -> list[Any]:
    found = []
    for kind in KINDS:
        announce(cpu_ram_efficient_loading=True, state_dict_type="SHARDED_STATE_DICT")
        accelerator = make_accelerator()
        with hf_zero_stream.streaming():
            model = load("llama", folder)
            model, optimizer = accelerator.prepare(model, kind(parameters_of(model), lr=1e-2))
            accelerated_steps(accelerator, model, optimizer, range(2))
            if kind is KeepsText and dist.get_rank() == 1:  # one rank alone cannot save
                for entries in optimizer.state.values():
                    entries.pop("mode")
            found.append((kind, message_of(lambda: accelerator.save_state(str(target / f"{kind}")))))
    return found


def test_by_engines(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    homes = ["ZeRO-3", "ZeRO-2"]
    for of_rank in run_ranks(2, by_engines, zoo_checkpoint("llama"), tmp_path, homes):
        for kind, message, modes, steps in of_rank:
            assert "A checkpoint of DeepSpeed's own is no way out here" in message and KINDS[kind] in message, message
            assert (kind is KeepsText) == bool(modes) and "warm" not in modes, modes
            assert 3 not in steps, steps  # it begins anew
    assert not [*tmp_path.glob("ours*/**/*.pt")]


def test_by_accelerate(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    for of_rank in run_ranks(2, by_accelerate, zoo_checkpoint("llama"), tmp_path):
        for kind, message in of_rank:
            assert "A checkpoint of accelerate's own is no way out here" in message and KINDS[kind] in message, message
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
