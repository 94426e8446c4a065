"""Merge a LoRA adapter into a model that no host can hold, and save it for vLLM, SGLang or `from_pretrained`.

Each rank merges with all others, and writes its own part. On 8 GPUs, or on as many processes of a CPU as there are
hosts with memory for their part:

    torchrun --nproc_per_node 8 examples/merge_lora.py --model Qwen/Qwen3-30B-A3B --adapter adapters --output merged

Then: `vllm serve merged`.
"""

import argparse

import torch
import torch.distributed
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_zero_stream import save_pretrained, streaming


ZERO_3 = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Merge an adapter into its base model.")
    parser.add_argument("--model", required=True, help="the base: a folder, or the id of a repository")
    parser.add_argument("--adapter", required=True, help="the same, of what PEFT has saved")
    parser.add_argument("--output", required=True, help="a folder for the merged model, with its tokenizer")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.distributed.init_process_group()

    with streaming():
        base = AutoModelForCausalLM.from_pretrained(arguments.model, ds_config=ZERO_3)
        merged = PeftModel.from_pretrained(base, arguments.adapter).merge_and_unload()
    save_pretrained(merged, arguments.output)

    if torch.distributed.get_rank() == 0:
        AutoTokenizer.from_pretrained(arguments.model).save_pretrained(arguments.output)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
