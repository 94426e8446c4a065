"""Ray Train: the Trainer in a TorchTrainer's workers, with Ray's callback."""

import argparse
import contextlib
import os
from pathlib import Path
from typing import Any

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


RANKS = 2


def ray_of(settings: dict[str, Any]) -> None:
    """What each worker runs."""
    if settings["streams"]:
        from hf_zero_stream import streaming
    else:
        streaming = contextlib.nullcontext
    os.environ |= {"ACCELERATE_USE_DEEPSPEED": "true", "CUDA_VISIBLE_DEVICES": ""}
    from accelerate import PartialState

    PartialState(backend="gloo")
    with streaming():
        train(Path(settings["folder"]), settings["resume"])


def train(folder: Path, resume: bool) -> None:
    from ray.train.huggingface.transformers import RayTrainReportCallback, prepare_trainer
    from transformers import Trainer, TrainingArguments

    from benchmarks.clients.common import ADAMW, STEPS, TRAINED, ds_config, in_memory, load, of_files, report, tokens

    arguments = TrainingArguments(
        output_dir=str(folder / TRAINED),
        per_device_train_batch_size=2,
        max_steps=STEPS * (2 if resume else 1),
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_steps=STEPS,
        deepspeed=ds_config(optimizer=ADAMW, gradient_clipping=1.0),
        ddp_backend="gloo",
        report_to=[],
        disable_tqdm=True,
    )
    data = [{"input_ids": tokens(number), "labels": tokens(number)} for number in range(64)]
    model = load(folder)
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.add_callback(RayTrainReportCallback())
    checkpoint = folder / TRAINED / f"checkpoint-{STEPS}"
    prepare_trainer(trainer).train(resume_from_checkpoint=str(checkpoint) if resume else None)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if resume:
        report(folder, model, losses, memory=in_memory(model))
        return
    trainer.save_model(str(folder / TRAINED / "final"))
    trainer.accelerator.wait_for_everyone()
    report(folder, model, losses, memory=in_memory(model), files=of_files(folder / TRAINED / "final"))


def ray_train(settings: argparse.Namespace) -> None:
    ray.init(num_cpus=RANKS + 1, include_dashboard=False, object_store_memory=200_000_000, logging_level="ERROR")
    result = TorchTrainer(
        ray_of,
        train_loop_config={"folder": str(settings.folder), "resume": settings.resume, "streams": settings.streams},
        scaling_config=ScalingConfig(num_workers=RANKS),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(storage_path=str(settings.folder / "ray"), name="run"),
    ).fit()
    assert result.error is None, result.error


def report_of_example(settings: dict[str, Any]) -> None:
    """What each worker of the example runs here: its function, and a report of that."""
    from benchmarks.clients.common import in_memory, of_files, report
    from examples.finetune_ray import train

    trainer = train(settings)
    output = Path(settings["output"])
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    report(output.parent, trainer.model, losses, memory=in_memory(trainer.model), files=of_files(output / "final"))


def ray_example(settings: argparse.Namespace) -> None:
    """examples/finetune_ray.py, as its command runs it."""
    from benchmarks.clients.common import STEPS, TRAINED
    from examples import finetune_ray

    finetune_ray.train = report_of_example
    folder = str(settings.folder)
    finetune_ray.main(
        [
            "--model",
            f"{folder}/model",
            "--output",
            f"{folder}/{TRAINED}",
            "--workers",
            str(RANKS),
            "--steps",
            str(STEPS),
        ]
    )
