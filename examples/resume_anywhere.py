"""Train with the Trainer and ZeRO-3; started again, go on from the last checkpoint, on any number of ranks.

    torchrun --nproc_per_node 8 examples/resume_anywhere.py --model Qwen/Qwen3-30B-A3B --output run1 --steps 100

    torchrun --nproc_per_node 4 examples/resume_anywhere.py --model Qwen/Qwen3-30B-A3B --output run1 --steps 200

Without a GPU, with what the first command makes:

    python examples/tiny.py

    torchrun --nproc_per_node 3 examples/resume_anywhere.py --model tiny-moe --output run1 --steps 2

    torchrun --nproc_per_node 2 examples/resume_anywhere.py --model tiny-moe --output run1 --steps 4

examples/finetune_resumed.py does more: evaluation, the best model, preemption.
"""

import argparse
import os
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from hf_zero_stream import streaming


DEEPSPEED_CONFIG = Path(__file__).parent / "deepspeed" / "zero3.json"
GLOBAL_BATCH = 24
"""Samples in a step of all ranks: with the same, each step has the samples that it would have had."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train, and go on with another number of ranks.")
    parser.add_argument("--model", required=True, help="a folder, or the id of a repository")
    parser.add_argument("--output", required=True, help="a folder for checkpoints")
    parser.add_argument("--steps", type=int, default=10)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    on_gpu = torch.cuda.is_available()
    if not on_gpu:  # accelerate would not choose gloo for DeepSpeed by itself
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        PartialState(backend="gloo")
    settings = TrainingArguments(
        output_dir=arguments.output,
        deepspeed=str(DEEPSPEED_CONFIG),
        accelerator_config=None if on_gpu else {"use_configured_state": True},
        bf16=on_gpu,
        max_steps=arguments.steps,
        per_device_train_batch_size=GLOBAL_BATCH // int(os.environ["WORLD_SIZE"]),
        lr_scheduler_type="constant",
        logging_steps=1,
        save_steps=1,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=on_gpu,
    )
    # Token ids in place of a text.
    rows = [{"input_ids": ids, "labels": ids} for ids in (torch.arange(256).view(-1, 1) + torch.arange(16)) % 100]

    last = get_last_checkpoint(arguments.output) if os.path.isdir(arguments.output) else None
    with streaming():
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype="auto")
        trainer = Trainer(model=model, args=settings, train_dataset=rows)
        trainer.train(resume_from_checkpoint=last)

    if trainer.is_world_process_zero():
        print(f"{settings.world_size} ranks began at {last or arguments.model}")
        for entry in trainer.state.log_history:
            if "loss" in entry:
                print(f"step {entry['step']}: loss {entry['loss']}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
