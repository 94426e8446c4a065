"""Situations that the Trainer trains: it saves and resumes by itself."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers import TrainerCallback

from tests.situations.axes import Situation
from tests.situations.models import inputs_of, load
from tests.situations.observed import values_of
from tests.situations.optimizers import optimizer_of


class Watch(TrainerCallback):
    """Takes digests at the save, and when a training begins."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.seen["after the resume"] = {"values": values_of(model)}

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 2:
            self.seen["at the save"] = {"values": values_of(model)}


class Rows(torch.utils.data.Dataset):
    def __init__(self, situation: Situation) -> None:
        self.situation = situation

    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> dict[str, Any]:
        same = self.situation.resumed_world_size != self.situation.world_size
        return {name: value[0] for name, value in inputs_of(self.situation, 0 if same else number, 0).items()}


def _train(situation: Situation, folder: Path, checkpoints: Path, found: dict[str, Any], resume: str | None) -> Any:
    from tests.situations.sessions import ds_config

    settings: dict[str, Any] = {}
    if situation.by_deepspeed:
        config = {**ds_config(situation, checkpoints), "train_micro_batch_size_per_gpu": "auto"}
        settings["deepspeed"] = {**config, "gradient_accumulation_steps": "auto", "bf16": {"enabled": "auto"}}
    elif dist.get_world_size() > 1:
        settings = {"fsdp": True, "fsdp_config": {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}}
    args = transformers.TrainingArguments(
        output_dir=str(folder / "state"),
        accelerator_config={"use_configured_state": True},
        per_device_train_batch_size=2,
        gradient_accumulation_steps=int(situation.accumulation),
        bf16=situation.precision == "bf16",
        max_steps=4,
        save_steps=2,
        logging_steps=1,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        report_to=[],
        dataloader_pin_memory=False,
        disable_tqdm=True,
        remove_unused_columns=False,
        **settings,
    )
    torch.manual_seed(2 if resume else 1)
    create, arguments = optimizer_of(situation.optimizer)
    watch = Watch()
    trainer = transformers.Trainer(
        model=load(situation, checkpoints),
        args=args,
        train_dataset=Rows(situation),
        optimizer_cls_and_kwargs=(create, arguments),
        callbacks=[watch],
    )
    found["stage"] = "resume and training" if resume else "training and save of the state"
    trainer.train(resume_from_checkpoint=resume)
    found |= watch.seen
    losses = {int(entry["step"]): entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
    found["losses"] = [losses[step] for step in ((3, 4) if resume else (1, 2, 3, 4))]
    return trainer


def first(situation: Situation, folder: Path, checkpoints: Path, found: dict[str, Any]) -> dict[str, Any]:
    """Four steps, with a checkpoint after the second; the model as it is saved at the end."""
    from tests.situations.training import described, read_weights

    trainer = _train(situation, folder, checkpoints, found, None)
    if situation.weights == "save_model":
        found["stage"] = "save of weights"
        trainer.save_model(str(folder / "weights"))
        dist.barrier()
        if dist.get_rank() == 0:
            saved = read_weights(folder / "weights")
            found["weights"] = {name: described(value) for name, value in saved.items()}
    found["stage"] = "done"
    return found


def resumed(situation: Situation, folder: Path, checkpoints: Path, found: dict[str, Any]) -> dict[str, Any]:
    """The last two steps, from the checkpoint."""
    _train(situation, folder, checkpoints, found, str(folder / "state" / "checkpoint-2"))
    found["stage"] = "done"
    return found
