"""Train a causal language model with the Trainer and ZeRO-3 on machines that come and go, without a shared disk.

Every few steps each machine keeps a state of what it trains in its memory, and another one keeps a copy. If a machine
is lost, the others go on from there. It may come back later. On each of three machines with 8 GPUs:

    torchrun --nnodes 2:3 --max-restarts 3 --nproc_per_node 8 --rdzv_backend c10d --rdzv_id run1 \
        --rdzv_endpoint FIRST_MACHINE:29500 examples/finetune_elastic.py --model Qwen/Qwen3-30B-A3B --data TEXTS \
        --output run1

Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on all of them: else ranks of a later start find addresses of an earlier one
in torchrun's store. The machine of the endpoint must stay, or be one that does not train. A state on a disk that all
machines see, every 500 steps, is for when all of them are lost: a restart goes on from the newer of the two.

Without a GPU, on two processes, with what the first command makes:

    python examples/tiny.py

    torchrun --nproc_per_node 2 examples/finetune_elastic.py --model tiny-moe --data texts --output run1 --steps 8
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed
from accelerate import PartialState
from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hf_zero_stream import HostStates, streaming


DEEPSPEED_CONFIG = Path(__file__).parent / "deepspeed" / "zero3.json"


class PrintLosses(TrainerCallback):
    """Prints losses as they come: a process may be killed at any time."""

    def __init__(self, seconds_per_step: float) -> None:
        self.seconds_per_step = seconds_per_step

    def on_step_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        time.sleep(self.seconds_per_step)

    def on_log(self, args, state, control, logs=None, **kwargs):  # type: ignore[no-untyped-def]
        if state.is_world_process_zero and "loss" in (logs or {}):
            print(f"{args.world_size} ranks, step {state.global_step}: loss {logs['loss']}", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on texts with the Trainer, on machines that come and go.")
    parser.add_argument("--model", required=True, help="a folder, or the id of a repository")
    parser.add_argument("--data", required=True, help="the same, of a data set with `text`")
    parser.add_argument("--output", required=True, help="a folder for checkpoints, and the model in the end")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=2, help="steps between two states in memory")
    parser.add_argument("--every-on-disk", type=int, default=500, help="steps between two checkpoints in --output")
    parser.add_argument("--memory", default="/dev/shm", help="where each machine keeps its states")
    parser.add_argument("--global-batch", type=int, default=6, help="samples in a step of all ranks")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seconds-per-step", type=float, default=0, help="make steps last, to try deaths")
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
        # The same samples in each step, whatever the number of ranks: the position in the data is one in steps.
        per_device_train_batch_size=max(1, arguments.global_batch // int(os.environ["WORLD_SIZE"])),
        learning_rate=arguments.learning_rate,
        logging_steps=1,
        save_strategy="steps",
        save_steps=arguments.every_on_disk,
        save_total_limit=2,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=on_gpu,
    )
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    texts = load_dataset(arguments.data, split="train")
    tokens = texts.map(lambda rows: tokenizer(rows["text"], truncation=True), batched=True, remove_columns=["text"])

    with streaming():
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype="auto")
        trainer = Trainer(
            model=model,
            args=settings,
            train_dataset=tokens,
            data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
            callbacks=[PrintLosses(arguments.seconds_per_step)],
        )
        states = HostStates(arguments.memory, copies=1)
        newest = states.attach(trainer, every=arguments.every)
        if trainer.is_world_process_zero():
            print(f"goes on from {newest or arguments.model}", flush=True)
        trainer.train(resume_from_checkpoint=newest)
        trainer.save_model(arguments.output)

    if trainer.is_world_process_zero():
        print("ready")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
