"""Fine-tune a causal language model, or LoRA adapters, with transformers' Trainer and FSDP2.

On 8 GPUs; accelerate has FSDP on no CPU:

    torchrun --nproc_per_node 8 examples/finetune_fsdp2.py --model Qwen/Qwen3-30B-A3B --data TEXTS --output trained

With `--lora` adapters are trained, and saved in PEFT's files. What is started again goes on from the last checkpoint.
"""

import argparse
import os

import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from hf_zero_stream import streaming


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune with the Trainer and FSDP2.")
    parser.add_argument("--model", required=True, help="a folder, or the id of a repository")
    parser.add_argument("--data", required=True, help="the same, of a data set with `text`")
    parser.add_argument("--output", required=True, help="a folder for checkpoints, and what was trained in the end")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--lora", action="store_true", help="train adapters of rank 8")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    on_gpu = torch.cuda.is_available()
    # TrainingArguments come first: from them a load learns about FSDP2.
    settings = TrainingArguments(
        output_dir=arguments.output,
        fsdp=True,
        fsdp_config={"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
        bf16=on_gpu,
        max_steps=arguments.steps,
        per_device_train_batch_size=1,
        learning_rate=arguments.learning_rate,
        logging_steps=1,
        save_steps=0.5,
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=on_gpu,
    )
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    texts = load_dataset(arguments.data, split="train")
    tokens = texts.map(lambda rows: tokenizer(rows["text"], truncation=True), batched=True, remove_columns=["text"])
    last = get_last_checkpoint(arguments.output) if os.path.isdir(arguments.output) else None

    with streaming():  # the load, the checkpoints and what goes on from them
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype="auto")
        if arguments.lora:
            model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
        trainer = Trainer(
            model=model,
            args=settings,
            train_dataset=tokens,
            data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        )
        trainer.train(resume_from_checkpoint=last)
        trainer.save_model(arguments.output)

    if trainer.is_world_process_zero():
        for entry in trainer.state.log_history:
            if "loss" in entry:
                print(f"step {entry['step']}: loss {entry['loss']}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
