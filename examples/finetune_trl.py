"""Train LoRA adapters with TRL under DeepSpeed ZeRO-3: supervised (SFT), on pairs (DPO), or by rewards (GRPO).

On 8 GPUs:

    accelerate launch --config_file examples/accelerate/zero3_gpu.yaml examples/finetune_trl.py --method dpo \
        --model Qwen/Qwen3-30B-A3B --data trl-lib/ultrafeedback_binarized --steps 100

Without a GPU, on two processes, with what the first command makes:

    python examples/tiny.py

    accelerate launch --config_file examples/accelerate/zero3_cpu_gloo.yaml examples/finetune_trl.py --method sft \
        --model tiny-moe --data texts --steps 3

    accelerate launch --config_file examples/accelerate/zero3_cpu_gloo.yaml examples/finetune_trl.py --method dpo \
        --model tiny-moe --data pairs --steps 3

    accelerate launch --config_file examples/accelerate/zero3_cpu_gloo.yaml examples/finetune_trl.py --method grpo \
        --model tiny-moe --data pairs --steps 3

Of a data set, grpo takes the column `prompt`; `--data trl-lib/tldr` has one too. Here transformers writes the
completions, with all weights gathered; examples/grpo_vllm.py lets a vLLM server do that.

`--loader stock` does without this package: the losses are the same. `--output adapters` saves the adapters.
"""

import argparse
import contextlib
import tempfile
from typing import Any

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from hf_zero_stream import streaming


def reward(completions: list[str], **_: Any) -> list[float]:
    """The share of words that are not said twice: a stand-in for what you would reward."""
    texts = [completion.split() for completion in completions]
    return [len(set(words)) / max(1, len(words)) for words in texts]


METHODS = {
    "sft": (SFTConfig, SFTTrainer, {}, {}),
    "dpo": (DPOConfig, DPOTrainer, {}, {}),
    "grpo": (GRPOConfig, GRPOTrainer, {"num_generations": 2, "max_completion_length": 32}, {"reward_funcs": reward}),
}
"""Name -> config, trainer, and what each of them needs besides."""

LOADERS = {"streaming": streaming, "stock": contextlib.nullcontext}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train LoRA adapters with TRL under ZeRO-3.")
    parser.add_argument("--method", choices=METHODS, required=True)
    parser.add_argument("--model", required=True, help="a folder, or the id of a repository")
    parser.add_argument("--data", required=True, help="the same, of a data set with a split `train`")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--output", help="a folder to save the adapters in")
    parser.add_argument("--loader", choices=LOADERS, default="streaming")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    on_gpu = torch.cuda.is_available()
    config_class, trainer_class, config_options, trainer_options = METHODS[arguments.method]

    with LOADERS[arguments.loader](), tempfile.TemporaryDirectory() as folder:
        # The config comes first: from it a load learns about ZeRO-3.
        settings = config_class(
            output_dir=folder,
            ddp_backend=None if on_gpu else "gloo",
            bf16=on_gpu,
            max_steps=arguments.steps,
            per_device_train_batch_size=1,
            gradient_checkpointing=on_gpu,
            learning_rate=arguments.learning_rate,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=on_gpu,
            **config_options,
        )
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype="auto")
        if arguments.loader == "streaming" and settings.process_index == 0:
            print(model.streaming_report.table())

        trainer = trainer_class(
            model=model,
            args=settings,
            train_dataset=load_dataset(arguments.data, split="train"),
            processing_class=AutoTokenizer.from_pretrained(arguments.model),
            peft_config=LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["q_proj", "v_proj"]),
            **trainer_options,
        )
        trainer.train()
        if arguments.output:
            # On all ranks: inside streaming() each writes what it holds.
            trainer.save_model(arguments.output)

    if trainer.is_world_process_zero():
        for entry in trainer.state.log_history:
            if "loss" in entry:
                print(f"step {entry['step']}: loss {entry['loss']}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
