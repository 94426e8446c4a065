"""Train a causal language model on texts with the Trainer and ZeRO-3: evaluation, the best model, and preemption.

Started again, it goes on from its last checkpoint, on any number of ranks. On SIGTERM it saves one, and ends with exit
code 75 ("try again"). On two machines with 8 GPUs each, on each of them, with a disk that both see:

    torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint FIRST_MACHINE:29500 --rdzv_id 1 \
        --shutdown_timeout 300 examples/finetune_resumed.py --model Qwen/Qwen3-30B-A3B --data TEXTS --output run1

With Slurm, which starts it again: `sbatch examples/slurm/zero3.sbatch --model Qwen/Qwen3-30B-A3B ...`

Without a GPU, on two processes, with what the first command makes:

    python examples/tiny.py

    torchrun --nproc_per_node 2 examples/finetune_resumed.py --model tiny-moe --data texts --output run1 --steps 8
"""

import argparse
import os
import signal
import sys
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
from transformers.trainer_utils import get_last_checkpoint

from hf_zero_stream import streaming


DEEPSPEED_CONFIG = Path(__file__).parent / "deepspeed" / "zero3.json"
TRY_AGAIN = 75


class StopOnSignal(TrainerCallback):
    """Saves a checkpoint and stops, on all ranks after the same step, once any of them has got a SIGTERM.

    Signals reach ranks at different moments. Without an agreement, one rank would save alone, and wait for ever.
    """

    def __init__(self, seconds_per_step: float) -> None:
        self.is_asked = False
        self.has_stopped = False
        self.seconds_per_step = seconds_per_step
        signal.signal(signal.SIGTERM, self.ask)

    def ask(self, *_: object) -> None:
        self.is_asked = True

    def on_step_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        time.sleep(self.seconds_per_step)
        asked = torch.tensor(int(self.is_asked), device=args.device)
        torch.distributed.all_reduce(asked, op=torch.distributed.ReduceOp.MAX)
        if asked and state.global_step < state.max_steps:
            self.has_stopped = control.should_save = control.should_training_stop = True


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train on texts with the Trainer, ZeRO-3 and preemption.")
    parser.add_argument("--model", required=True, help="a folder, or the id of a repository")
    parser.add_argument("--data", required=True, help="the same, of a data set with `text`, to train and validate on")
    parser.add_argument("--output", required=True, help="a folder for checkpoints, and the best model in the end")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=4, help="steps between two checkpoints, and two evaluations")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seconds-per-step", type=float, default=0, help="make steps last, to try signals")
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
        per_device_train_batch_size=1,
        learning_rate=arguments.learning_rate,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=arguments.every,
        save_strategy="steps",
        save_steps=arguments.every,
        save_total_limit=2,
        load_best_model_at_end=True,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=on_gpu,
    )
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    texts = load_dataset(arguments.data)
    tokens = texts.map(lambda rows: tokenizer(rows["text"], truncation=True), batched=True, remove_columns=["text"])
    last = get_last_checkpoint(arguments.output) if os.path.isdir(arguments.output) else None

    with streaming():  # the load, the checkpoints and what goes on from them
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype="auto")
        stop = StopOnSignal(arguments.seconds_per_step)
        trainer = Trainer(
            model=model,
            args=settings,
            train_dataset=tokens["train"],
            eval_dataset=tokens["validation"],
            data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
            callbacks=[stop],
        )
        trainer.train(resume_from_checkpoint=last)
        if not stop.has_stopped:
            trainer.save_model(arguments.output)  # the best, which load_best_model_at_end has loaded

    if trainer.is_world_process_zero():
        print(f"began at {last or arguments.model}")
        for entry in trainer.state.log_history:
            for name in ("loss", "eval_loss"):
                if name in entry:
                    print(f"step {entry['step']}: {name} {entry[name]}")
        print(f"stopped at step {trainer.state.global_step}" if stop.has_stopped else "ready")
    torch.distributed.destroy_process_group()
    sys.exit(TRY_AGAIN if stop.has_stopped else 0)


if __name__ == "__main__":
    main()
