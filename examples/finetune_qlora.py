"""Train LoRA adapters beside a quantised mixture of experts that stays quantised, with the Trainer and ZeRO-3 (QLoRA).

On 8 GPUs, with a checkpoint in FP8, MXFP4 or compressed-tensors:

    torchrun --nproc_per_node 8 examples/finetune_qlora.py --model Qwen/Qwen3-30B-A3B-FP8 --data TEXTS \
        --output adapters

With `--nf4` a checkpoint in bf16 is quantised while it is loaded, by bitsandbytes: linear layers, no fused experts.

Without a GPU, on two processes, with what the first command makes:

    python examples/tiny.py

    torchrun --nproc_per_node 2 examples/finetune_qlora.py --model tiny-moe-fp8 --data texts --output adapters

    torchrun --nproc_per_node 2 examples/finetune_qlora.py --model tiny-moe --nf4 --data texts --output adapters-nf4

With `--frozen-weights files` quantised weights stay in the checkpoint, which may be larger than all memory; on one GPU
or CPU, too (docs/from_files.md):

    torchrun --nproc_per_node 1 examples/finetune_qlora.py --model tiny-moe-fp8 --data texts --output adapters-files \
        --frozen-weights files
"""

import argparse
import os
from pathlib import Path

import torch
from accelerate import PartialState
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

from hf_zero_stream import streaming


DEEPSPEED_CONFIG = Path(__file__).parent / "deepspeed" / "zero3.json"
NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train adapters beside quantised weights.")
    parser.add_argument("--model", required=True, help="a folder, or the id of a repository")
    parser.add_argument("--data", required=True, help="the same, of a data set with `text`")
    parser.add_argument("--output", required=True, help="a folder for the adapters")
    parser.add_argument("--nf4", action="store_true", help="quantise while loading")
    parser.add_argument("--frozen-weights", choices=["memory", "files"], default="memory")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
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
        gradient_checkpointing=arguments.frozen_weights == "files",
        gradient_checkpointing_kwargs={"use_reentrant": False},
        max_steps=arguments.steps,
        per_device_train_batch_size=1,
        learning_rate=arguments.learning_rate,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=on_gpu,
    )
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    texts = load_dataset(arguments.data, split="train")
    tokens = texts.map(lambda rows: tokenizer(rows["text"], truncation=True), batched=True, remove_columns=["text"])

    with streaming(frozen_weights=arguments.frozen_weights):
        how = {"quantization_config": NF4} if arguments.nf4 else {}
        base = AutoModelForCausalLM.from_pretrained(arguments.model, dtype="auto", **how)
        torch.manual_seed(0)  # the adapters' first values, whatever the load has drawn
        trainer = Trainer(
            model=get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "v_proj"])),
            args=settings,
            train_dataset=tokens,
            data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        )
        trainer.train()
        trainer.save_model(arguments.output)

    if trainer.is_world_process_zero():
        print(base.streaming_report.table())
        for entry in trainer.state.log_history:
            if "loss" in entry:
                print(f"step {entry['step']}: loss {entry['loss']}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
