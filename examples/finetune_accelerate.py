"""Fine-tune a causal language model with accelerate and DeepSpeed ZeRO-3, or FSDP2, in a plain training loop.

On 8 GPUs:

    accelerate launch --config_file examples/accelerate/zero3_gpu.yaml examples/finetune_accelerate.py \
        --model Qwen/Qwen3-30B-A3B --steps 10

With parameters and optimizer states in host memory: `--config_file examples/accelerate/zero3_cpu_offload.yaml`.
With FSDP2 in place of DeepSpeed: `--config_file examples/accelerate/fsdp2_gpu.yaml`.

Without a GPU, on two processes, with a checkpoint of 10 MB that the first command writes to the folder tiny-moe:

    python -m benchmarks.moe_checkpoint tiny-moe --gigabytes 0.01 --layers 2 --experts 8

    accelerate launch --config_file examples/accelerate/zero3_cpu_gloo.yaml examples/finetune_accelerate.py \
        --model tiny-moe --steps 3

`--loader stock` loads with transformers alone: the losses are the same. `--output trained` saves the trained model.
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, set_seed
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from hf_zero_stream import StreamingAutoModelForCausalLM, save_pretrained


LOADERS = {"streaming": StreamingAutoModelForCausalLM, "stock": AutoModelForCausalLM}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune with accelerate, by ZeRO-3 or FSDP2.")
    parser.add_argument("--model", required=True, help="a folder, or the id of a repository")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--length", type=int, default=32, help="tokens per example")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", help="a folder to save the trained model in")
    parser.add_argument("--loader", choices=LOADERS, default="streaming")
    return parser.parse_args()


def make_text(vocab_size: int, count: int, length: int) -> list[torch.Tensor]:
    """Token ids in place of a text: runs that count upwards from a random start, which a model can learn."""
    starts = torch.randint(vocab_size, (count, 1))
    return list((starts + torch.arange(length)) % vocab_size)


def main() -> None:
    arguments = parse_arguments()
    set_seed(arguments.seed)

    # The Accelerator comes first: from it a load learns about ZeRO-3, or FSDP2.
    # It would not choose gloo by itself, and without a backend it takes each process for the only one.
    gloo = [] if torch.cuda.is_available() else [InitProcessGroupKwargs(backend="gloo")]
    accelerator = Accelerator(kwargs_handlers=gloo)
    model = LOADERS[arguments.loader].from_pretrained(arguments.model, dtype="auto")

    text = make_text(model.config.vocab_size, arguments.steps * accelerator.num_processes, arguments.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)
    model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(text, batch_size=1))
    if arguments.loader == "streaming":
        # Under FSDP2 the weights were read just now, each rank's own shards.
        accelerator.print(accelerator.unwrap_model(model).streaming_report.table())

    model.train()
    for step, tokens in enumerate(batches, start=1):
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        mean_loss = accelerator.gather(loss.detach()).mean().item()
        accelerator.print(f"step {step}: loss {mean_loss:.6f}")

    if arguments.output:
        # All ranks: each writes what it holds.
        save_pretrained(model, arguments.output)

    accelerator.end_training()  # destroys the process group too


if __name__ == "__main__":
    main()
