"""Fine-tune a causal language model with Lightning and DeepSpeed ZeRO-3.

On 8 GPUs; Lightning has DeepSpeed on no CPU:

    torchrun --nproc_per_node 8 examples/finetune_lightning.py --model Qwen/Qwen3-30B-A3B --output run1 --steps 10

`run1/state` then is a training state, from which `--resume` goes on, on any number of ranks.
"""

import argparse
import os
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch._dynamo  # noqa: F401 - DeepSpeed would import it inside zero.Init, where that fails
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from hf_zero_stream import streaming


class FineTuning(pl.LightningModule):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.model = name, None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        """Lightning calls it inside `zero.Init`: from that the load learns about ZeRO-3."""
        if self.model is None:
            self.model = AutoModelForCausalLM.from_pretrained(self.name, dtype="auto").train()

    def training_step(self, tokens: torch.Tensor, _: int) -> torch.Tensor:
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def parse_arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Fine-tune with Lightning and DeepSpeed ZeRO-3.")
    parser.add_argument("--model", required=True, help="a folder, or the id of a repository")
    parser.add_argument("--output", type=Path, required=True, help="a folder for the checkpoint")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --output")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> FineTuning:
    arguments = parse_arguments(given)
    pl.seed_everything(0)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    trainer = pl.Trainer(
        strategy=DeepSpeedStrategy(stage=3, process_group_backend=backend),
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        max_steps=arguments.steps,
        default_root_dir=arguments.output,
        logger=False,
        enable_checkpointing=False,
    )
    # Token ids in place of a text.
    text = (torch.arange(256).view(-1, 1) + torch.arange(32)) % 100
    module, state = FineTuning(arguments.model), arguments.output / "state"
    with streaming():  # the load, the checkpoint and what goes on from it
        trainer.fit(module, DataLoader(text, batch_size=1), ckpt_path=state if arguments.resume else None)
        trainer.save_checkpoint(state)  # all ranks
    if trainer.is_global_zero:
        for step, loss in enumerate(module.losses, trainer.global_step - len(module.losses) + 1):
            print(f"step {step}: loss {loss:.6f}")
    return module


if __name__ == "__main__":
    main()
