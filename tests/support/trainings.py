"""A training of any kind: by an engine, of a model and its optimizer, or by accelerate; its steps, and its states."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import hf_zero_stream
from tests.support.zoo import VOCAB


def tokens_of(number: int) -> dict[str, torch.Tensor]:
    """The inputs of a step, the same on every rank."""
    tokens = torch.randint(5, VOCAB, (2, 9), generator=torch.Generator().manual_seed(number))
    return {"input_ids": tokens, "labels": tokens}


@dataclass
class Training:
    """What is trained, and by what.

    Attributes:
        trains: an engine of DeepSpeed's, a model, or what accelerate has prepared.
        optimizer: None where it is an engine, which steps by itself.
        by: whose calls save and load: "ours", those of the "engine", or "accelerate"'s.
    """

    trains: Any
    optimizer: Any = None
    accelerator: Any = None
    scheduler: Any = None
    by: str = "ours"
    batch: Callable[[int], dict[str, torch.Tensor]] = tokens_of

    def train(self, numbers: Iterable[int]) -> list[float]:
        """The losses of these steps."""
        self.trains.train()
        return [self.step(self.trains(**self.batch(number)).loss) for number in numbers]

    def step(self, loss: torch.Tensor) -> float:
        if self.accelerator is not None:
            self.accelerator.backward(loss)
        elif self.optimizer is None:
            self.trains.backward(loss)
        else:
            loss.backward()
        if self.optimizer is None:
            self.trains.step()
        else:
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()
        return float(loss.detach())

    @property
    def own(self) -> dict[str, Any]:
        """What our calls are given beside what is trained."""
        return {} if self.optimizer is None else {"optimizer": self.optimizer}

    def save(self, target: Path) -> None:
        if self.by == "engine":
            self.trains.save_checkpoint(str(target))
        elif self.by == "accelerate":
            self.accelerator.save_state(str(target))
        else:
            hf_zero_stream.save_state(self.trains, target, **self.own)

    def load(self, source: Path) -> None:
        if self.by == "engine":
            assert self.trains.load_checkpoint(str(source))[0] is not None
        elif self.by == "accelerate":
            self.accelerator.load_state(str(source))
        else:
            hf_zero_stream.load_state(self.trains, source, **self.own)
