"""Fine-tune a causal language model that transformers shards by FSDP2, tensor and expert parallelism.

DeepSpeed is not involved.

On 8 GPUs:

    torchrun --nproc_per_node 8 examples/finetune_sharded.py --model Qwen/Qwen3-30B-A3B --fsdp 8 --steps 10

With experts on different GPUs too: `--fsdp 8 --ep 8`. With tensor parallelism: `--fsdp 4 --tp 2`.

Without a GPU, on two processes, with a checkpoint of 10 MB that the first command writes to the folder tiny-moe:

    python -m benchmarks.moe_checkpoint tiny-moe --gigabytes 0.01 --layers 2 --experts 8

    torchrun --nproc_per_node 2 examples/finetune_sharded.py --model tiny-moe --fsdp 2 --steps 3

`--loader stock` loads with transformers alone: the losses are the same. `--output trained` saves the trained model.
"""

import argparse

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from hf_zero_stream import StreamingAutoModelForCausalLM, save_pretrained


LOADERS = {"streaming": StreamingAutoModelForCausalLM, "stock": AutoModelForCausalLM}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune with FSDP2, tensor and expert parallelism.")
    parser.add_argument("--model", required=True, help="a folder, or the id of a repository")
    parser.add_argument("--fsdp", type=int, default=1, help="ranks that share the parameters")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each layer's work")
    parser.add_argument("--ep", type=int, default=1, help="ranks that hold different experts")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--length", type=int, default=32, help="tokens per example")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", help="a folder to save the trained model in")
    parser.add_argument("--loader", choices=LOADERS, default="streaming")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)

    sizes = DistributedConfig(fsdp_size=arguments.fsdp, tp_size=arguments.tp, ep_size=arguments.ep)
    model = LOADERS[arguments.loader].from_pretrained(arguments.model, dtype="auto", distributed_config=sizes)
    is_main = dist.get_rank() == 0
    if arguments.loader == "streaming" and is_main:
        print(model.streaming_report.table())

    # On a GPU, AdamW takes all tensors together. It cannot where some are DTensors and others are not.
    together = None if arguments.tp == arguments.ep == 1 else False
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate, foreach=together)
    batch = dist.get_rank() // arguments.tp  # the ranks that share a layer's work get the same tokens
    model.train()
    for step in range(1, arguments.steps + 1):
        start = torch.randint(model.config.vocab_size, (dist.get_world_size(),))[batch]
        tokens = ((start + torch.arange(arguments.length)) % model.config.vocab_size).unsqueeze(0).to(model.device)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean_loss = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean_loss)
        if is_main:
            print(f"step {step}: loss {mean_loss.item():.6f}")

    if arguments.output:
        # All ranks: each writes what it holds.
        save_pretrained(model, arguments.output)

    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
