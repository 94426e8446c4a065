"""What ranks run to train with accelerate's FSDP2."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import nn

import hf_zero_stream
from hf_zero_stream.checkpoint.lazy import LazyTensor
from tests.support.trainings import Training
from tests.support.zoo import ZOO


@dataclass(frozen=True)
class ZooTraining:
    """A model of the zoo, and how it is trained.

    Attributes:
        settings: of accelerate's config file, without ``fsdp_``.
        kwargs: of ``from_pretrained``.
        change: what is done to the model between ``from_pretrained`` and ``prepare``.
        stock_is_efficient: whether stock trains this model right with ``fsdp_cpu_ram_efficient_loading``.
    """

    name: str
    precision: str = "no"
    settings: dict[str, Any] = field(default_factory=dict)
    kwargs: dict[str, Any] = field(default_factory=dict)
    change: Callable[[Any], Any] = lambda model: model
    stock_is_efficient: bool = True

    def run(self, folder: Path, *, streams: bool, efficient: bool) -> dict[str, Any]:
        """The losses of three steps; how many parameters were lazy until then; this rank's report."""
        efficient = efficient and (streams or self.stock_is_efficient)
        announce(**self.settings, cpu_ram_efficient_loading=efficient)
        accelerator = make_accelerator(self.precision)
        torch.manual_seed(0)
        model = load(self.name, folder, streams=streams, **self.kwargs)
        whole = self.change(model)
        lazy = count_lazy(whole)
        losses = train(whole, accelerator, self.name)
        report = model.streaming_report.ranks[dist.get_rank()] if streams else None
        return {"losses": losses, "lazy": lazy, "report": report, "left": count_lazy(whole)}


def count_lazy(model: nn.Module) -> int:
    return sum(isinstance(param, LazyTensor) for param in model.parameters())


def announce(**settings: Any) -> None:
    """Set what ``accelerate launch`` sets for a config with these ``fsdp_...`` settings and ``fsdp_version: 2``."""
    for name in [name for name in os.environ if name.startswith("FSDP_")]:
        del os.environ[name]
    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_VERSION="2", FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP")
    os.environ.update({f"FSDP_{name.upper()}": str(value).lower() for name, value in settings.items()})


def force_fsdp_on_cpu() -> None:
    """Have accelerate, which has FSDP on accelerators only, take the ranks of a CPU for such.

    The process group, the device, and all that FSDP2 does stay those of a CPU.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True, backend="gloo")
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def make_accelerator(precision: str = "no") -> Any:
    force_fsdp_on_cpu()
    return Accelerator(mixed_precision=precision)


def load(name: str, folder: Path, *, streams: bool = True, **kwargs: Any) -> Any:
    model_class = getattr(transformers, ZOO[name].auto_class)
    with hf_zero_stream.streaming() if streams else nullcontext():
        return model_class.from_pretrained(folder, **kwargs)


def train(model: Any, accelerator: Any, name: str) -> list[float]:
    """The losses of three steps; each rank has its own inputs."""
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)

    def own_inputs(number: int) -> dict[str, torch.Tensor]:
        inputs = ZOO[name].inputs()
        return {**inputs, "input_ids": inputs["input_ids"].roll(dist.get_rank(), -1)}

    return Training(model, optimizer, accelerator, batch=own_inputs).train(range(3))
