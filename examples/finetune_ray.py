"""Fine-tune a causal language model with Ray Train, transformers' Trainer and DeepSpeed ZeRO-3.

On 8 GPUs, or with `--workers 2` on a CPU (`python examples/tiny.py` makes the model tiny-moe):

    python examples/finetune_ray.py --model Qwen/Qwen3-30B-A3B --workers 8 --output /shared/run1
"""

import argparse
import os
from pathlib import Path
from typing import Any

import ray
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


DEEPSPEED_CONFIG = Path(__file__).resolve().parent / "deepspeed" / "zero3.json"


def train(settings: dict[str, Any]) -> Any:
    """What each worker runs; returns the Trainer."""
    from accelerate import PartialState
    from ray.train.huggingface.transformers import RayTrainReportCallback, prepare_trainer
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    from hf_zero_stream import streaming

    on_gpu = torch.cuda.is_available()
    if not on_gpu:  # accelerate would not choose gloo for DeepSpeed by itself
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(backend="gloo")
    arguments = TrainingArguments(
        output_dir=settings["output"],
        deepspeed=str(DEEPSPEED_CONFIG),
        accelerator_config=None if on_gpu else {"use_configured_state": True},
        bf16=on_gpu,
        max_steps=settings["steps"],
        per_device_train_batch_size=1,
        logging_steps=1,
        save_steps=settings["steps"],
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=on_gpu,
    )
    # Token ids in place of a text.
    rows = [{"input_ids": ids, "labels": ids} for ids in (torch.arange(256).view(-1, 1) + torch.arange(32)) % 100]
    with streaming():  # in the workers: they are processes of their own
        model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype="auto")
        trainer = prepare_trainer(Trainer(model=model, args=arguments, train_dataset=rows))
        trainer.add_callback(RayTrainReportCallback())
        trainer.train()
        trainer.save_model(os.path.join(settings["output"], "final"))
    return trainer


def parse_arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune with Ray Train and DeepSpeed ZeRO-3.")
    parser.add_argument("--model", required=True, help="a folder that all workers see, or the id of a repository")
    parser.add_argument("--output", required=True, help="a folder that all workers see, for checkpoints")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10)
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> None:
    arguments = parse_arguments(given)
    on_gpu = torch.cuda.is_available()
    ray.init()
    result = TorchTrainer(
        train,
        train_loop_config={
            "model": os.path.abspath(arguments.model) if os.path.isdir(arguments.model) else arguments.model,
            "output": os.path.abspath(arguments.output),
            "steps": arguments.steps,
        },
        scaling_config=ScalingConfig(num_workers=arguments.workers, use_gpu=on_gpu),
        torch_config=TorchConfig(backend="nccl" if on_gpu else "gloo"),
        run_config=RunConfig(storage_path=os.path.abspath(arguments.output), name="ray"),
    ).fit()
    if result.error:
        raise result.error
    print(f"loss {result.metrics['loss']}")


if __name__ == "__main__":
    main()
