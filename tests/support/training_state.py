"""What ranks run to train, save the state, and go on, by DeepSpeed's own checkpoints and by ours."""

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import torch
import transformers
from transformers.distributed import DistributedConfig

import hf_zero_stream
from hf_zero_stream import StreamingConfig
from hf_zero_stream.checkpoint.formats import contents_of
from hf_zero_stream.engine.opened import OpenCheckpoint
from hf_zero_stream.ranks.coordinator import Coordinator
from tests.support.parity import ds_config
from tests.support.saving import different
from tests.support.trainings import Training


Prepare = Callable[[Any], list[dict[str, Any]]]
"""Freezes what is to be frozen in a model, and returns the groups of its optimizer."""


def state_config(stage: int, dtype: torch.dtype = torch.bfloat16, **zero: Any) -> dict[str, Any]:
    """A DeepSpeed config with a scheduler and gradient clipping."""
    return {
        **ds_config(dtype),
        "zero_optimization": {"stage": stage, **zero},
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": 20, "warmup_num_steps": 4, "warmup_max_lr": 1e-3},
        },
    }


def all_in_one_group(model: Any) -> list[dict[str, Any]]:
    return [{"params": [param for param in model.parameters() if param.requires_grad]}]


def two_groups(model: Any) -> list[dict[str, Any]]:
    """Norms without weight decay."""
    params = list(model.parameters())
    norms = [param for param in params if getattr(param, "ds_shape", param.shape).numel() < 100]
    others = [param for param in params if not any(param is norm for norm in norms)]
    return [{"params": others, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]


def frozen_embeddings(model: Any) -> list[dict[str, Any]]:
    model.get_input_embeddings().weight.requires_grad_(False)
    return all_in_one_group(model)


def engine_of(folder: Path, config: dict[str, Any], prepare: Prepare) -> Any:
    dtype = torch.bfloat16 if config["bf16"]["enabled"] else torch.float32
    with hf_zero_stream.streaming():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, ds_config=config)
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=prepare(model))
    return engine


def train(engine: Any, steps: Sequence[int]) -> list[float]:
    """The losses of these steps, each of which has its own tokens, the same on every rank."""
    return Training(engine).train(steps)


def train_and_save(
    folder: Path, target: Path, configs: list[dict[str, Any]], prepares: list[Prepare], by_both: bool = True
) -> Any:
    """Three steps; save by ours and by DeepSpeed; the losses of two more."""
    losses = []
    for number, (config, prepare) in enumerate(zip(configs, prepares, strict=True)):
        engine = engine_of(folder, config, prepare)
        train(engine, range(3))
        hf_zero_stream.save_state(engine, target / f"ours {number}", data={"position": 7})
        if by_both:
            engine.save_checkpoint(str(target / f"stock {number}"))
        losses.append(train(engine, (3, 4)))
    return losses


def resume(folder: Path, source: Path, config: dict[str, Any], prepare: Prepare, how: str) -> list[float]:
    """The losses of two steps, from what :func:`train_and_save` saved; `how`: "ours" or "stock"."""
    engine = engine_of(folder, config, prepare)
    if how == "ours":
        resumed = hf_zero_stream.load_state(engine, source)
        assert resumed.data == {"position": 7} and resumed.tag == "global_step3"
        assert engine.global_steps == 3
    else:
        engine.load_checkpoint(str(source))
    return train(engine, (3, 4))


def resume_all(
    folder: Path, target: Path, configs: list[dict[str, Any]], prepares: list[Prepare], hows: Sequence[str]
) -> Any:
    return [
        {how: resume(folder, target / f"{how} {number}", config, prepare, how) for how in hows}
        for number, (config, prepare) in enumerate(zip(configs, prepares, strict=True))
    ]


# ------------------------------------------------------------------------------------------------ without an engine


def plain_training(folder: Path, sizes: dict[str, Any] | None) -> tuple[Any, Any, Any]:
    """A model, sharded in these sizes or whole on each rank, an AdamW of two groups, and a scheduler."""
    kwargs = {} if sizes is None else {"distributed_config": DistributedConfig(**sizes)}
    with hf_zero_stream.streaming():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **kwargs)
    optimizer = torch.optim.AdamW(two_groups(model), lr=1e-3)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def train_plain(model: Any, optimizer: Any, scheduler: Any, steps: Sequence[int]) -> list[float]:
    return Training(model, optimizer, scheduler=scheduler).train(steps)


def train_plain_and_save(folder: Path, target: Path, sizes: dict[str, Any] | None) -> list[float]:
    training = plain_training(folder, sizes)
    train_plain(*training, range(3))
    model, optimizer, scheduler = training
    with torch.no_grad():  # after which FSDP2 keeps some parameters gathered
        model(input_ids=torch.ones(1, 4, dtype=torch.long))
    hf_zero_stream.save_state(model, target, optimizer=optimizer, scheduler=scheduler, data={"position": 7})
    return train_plain(*training, (3, 4))


def resume_plain(
    folder: Path, source: Path, sizes: dict[str, Any] | None, again: Path | None = None, with_scheduler: bool = True
) -> list[float]:
    """The losses of two steps; what was loaded is saved `again` before."""
    model, optimizer, scheduler = plain_training(folder, sizes)
    trains = {"optimizer": optimizer, "scheduler": scheduler}
    hf_zero_stream.load_state(model, source, **trains, with_scheduler=with_scheduler)
    for _ in range(0 if with_scheduler else 3):
        scheduler.step()
    if again is not None:
        hf_zero_stream.save_state(model, again, optimizer=optimizer, scheduler=scheduler, data={"position": 7})
    return train_plain(model, optimizer, scheduler, (3, 4))


def resume_and_save(
    folder: Path, source: Path, config: dict[str, Any], prepare: Prepare, again: Path, with_scheduler: bool = True
) -> None:
    """Load by ours, and save what was loaded."""
    engine = engine_of(folder, config, prepare)
    hf_zero_stream.load_state(engine, source, with_scheduler=with_scheduler)
    hf_zero_stream.save_state(engine, again, data={"position": 7})


def resume_and_save_all(
    folder: Path, sources: list[Path], configs: list[dict[str, Any]], prepare: Prepare, target: Path
) -> None:
    """The same from several states, one after the other, by the engine of each config."""
    for number, config in enumerate(configs):
        engine = engine_of(folder, config, prepare)
        for source in sources:
            hf_zero_stream.load_state(engine, source)
            hf_zero_stream.save_state(engine, target / f"{number} {source.parent.name}", data={"position": 7})


# ---------------------------------------------------------------------------------------------------- by the Trainer


@dataclass(frozen=True)
class TrainerRun:
    """A training by the Trainer, from a checkpoint or from the beginning, under FSDP2 or a stage of ZeRO."""

    resume: Path | None = None
    zero: bool = False
    stage: int = 3
    accumulation: int = 1
    state_dict_type: str = "FULL_STATE_DICT"
    arguments: dict[str, Any] = field(default_factory=dict)


def accelerated_steps(accelerator: Any, model: Any, optimizer: Any, numbers: Iterable[int]) -> list[float]:
    """The losses of steps by accelerate; the inputs of each are the same on all ranks."""
    losses = []
    for number in numbers:
        ids = torch.randint(5, 300, (2, 9), generator=torch.Generator().manual_seed(number))
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def values_in(place: Path) -> dict[str, torch.Tensor]:
    """The values that `place` holds by our map of it, in fp32: the folder of a state, for instance."""
    found = contents_of(place)
    with closing(OpenCheckpoint(StreamingConfig(progress=False), Coordinator(0, 1, alone=True))) as checkpoint:
        checkpoint.add(found.shards)
        values = {name: checkpoint.materialise(view) for name, view in found.views.items()}
    return {name: value.float() if value.is_floating_point() else value for name, value in values.items()}


def different_states(first: Path, second: Path) -> list[str]:
    """What differs between two folders of ``save_state``: files of weights and elementwise states; steps, options."""
    files = [name for name in different(first, second) if name.endswith(".safetensors") and "rng" not in name]
    records = [json.loads(next(each.glob("*/training_state.json")).read_text()) for each in (first, second)]
    # As text, by which NaN is the same as NaN.
    kept = [json.dumps([record[name] for name in ("groups", "forms", "whole", "parts")]) for record in records]
    return files if kept[0] == kept[1] else [*files, "groups"]
