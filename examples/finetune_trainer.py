"""Fine-tune a causal language model with transformers' Trainer and DeepSpeed ZeRO-3.

On 8 GPUs:

    torchrun --nproc_per_node 8 examples/finetune_trainer.py --model Qwen/Qwen3-30B-A3B --steps 10

Without a GPU, on two processes, with a checkpoint of 10 MB that the first command writes to the folder tiny-moe:

    python -m benchmarks.moe_checkpoint tiny-moe --gigabytes 0.01 --layers 2 --experts 8

    torchrun --nproc_per_node 2 examples/finetune_trainer.py --model tiny-moe --steps 3

`--loader stock` loads with transformers alone: the losses are the same. `--output trained` saves the trained model.
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed
from accelerate import PartialState
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, set_seed

from hf_zero_stream import StreamingAutoModelForCausalLM, streaming


LOADERS = {"streaming": StreamingAutoModelForCausalLM, "stock": AutoModelForCausalLM}
DEEPSPEED_CONFIG = Path(__file__).parent / "deepspeed" / "zero3.json"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune with transformers' Trainer and DeepSpeed ZeRO-3.")
    parser.add_argument("--model", required=True, help="a folder, or the id of a repository")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--length", type=int, default=32, help="tokens per example")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deepspeed", default=str(DEEPSPEED_CONFIG), help="a DeepSpeed config")
    parser.add_argument("--output", help="a folder to save the trained model in")
    parser.add_argument("--loader", choices=LOADERS, default="streaming")
    return parser.parse_args()


def make_text(vocab_size: int, count: int, length: int) -> list[dict[str, torch.Tensor]]:
    """Token ids in place of a text: runs that count upwards from a random start, which a model can learn."""
    starts = torch.randint(vocab_size, (count, 1))
    return [{"input_ids": run, "labels": run} for run in (starts + torch.arange(length)) % vocab_size]


def use_gloo() -> dict[str, bool]:
    """Let accelerate run DeepSpeed over gloo, which it would not choose by itself; for machines without a GPU.

    Returns what `TrainingArguments(accelerator_config=...)` needs to know about it.
    """
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")
    return {"use_configured_state": True}


def main() -> None:
    arguments = parse_arguments()
    set_seed(arguments.seed)
    on_gpu = torch.cuda.is_available()

    with tempfile.TemporaryDirectory() as folder:
        # TrainingArguments come first: they hold the DeepSpeed config from which a load learns about ZeRO-3.
        settings = TrainingArguments(
            output_dir=folder,
            deepspeed=arguments.deepspeed,
            accelerator_config=None if on_gpu else use_gloo(),
            bf16=on_gpu,
            max_steps=arguments.steps,
            per_device_train_batch_size=1,
            learning_rate=arguments.learning_rate,
            lr_scheduler_type="constant",
            seed=arguments.seed,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=on_gpu,
        )
        model = LOADERS[arguments.loader].from_pretrained(arguments.model, dtype="auto")

        text = make_text(model.config.vocab_size, arguments.steps * settings.world_size, arguments.length)
        trainer = Trainer(model=model, args=settings, train_dataset=text)
        trainer.train()
        if arguments.output:
            # Inside streaming() the Trainer's own way to save gathers nothing.
            with streaming():
                trainer.save_model(arguments.output)

    if trainer.is_world_process_zero():
        if arguments.loader == "streaming":
            print(model.streaming_report.table())
        for entry in trainer.state.log_history:
            if "loss" in entry:
                print(f"step {entry['step']}: loss {entry['loss']}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
