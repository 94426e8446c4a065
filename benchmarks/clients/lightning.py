"""Lightning's DeepSpeedStrategy and ModelParallelStrategy, and Fabric's DeepSpeedStrategy."""

import argparse
import os
import types
from pathlib import Path
from typing import Any

import lightning.fabric.strategies.deepspeed as of_fabric
import lightning.pytorch as pl
import lightning.pytorch.strategies.deepspeed as of_lightning
import torch
import torch._dynamo  # DeepSpeed would import it inside zero.Init, where that fails
from lightning.fabric import Fabric
from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDP
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.strategies.ddp import DDPStrategy
from torch.utils.data import DataLoader

from benchmarks.clients.common import (
    STEPS,
    TRAINED,
    batch,
    ds_config,
    in_memory,
    load,
    of_zero_folder,
    report,
    tokens,
    world_size,
)


def deepspeed_on_cpus() -> None:
    """Lightning's DeepSpeed strategies ask for CUDA at three places."""
    for module, ddp in ((of_lightning, DDPStrategy), (of_fabric, FabricDDP)):
        module._validate_device_index_selection = lambda devices: None
        module.DeepSpeedStrategy.setup_environment = ddp.setup_environment
        module.argparse = types.SimpleNamespace(
            Namespace=lambda device_rank: argparse.Namespace(device_rank=int(os.environ["LOCAL_RANK"]))
        )


class Module(pl.LightningModule):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.model, self.losses, self.at_start = folder, None, [], ""

    def configure_model(self) -> None:
        if self.model is None:
            self.model = load(self.folder)

    def on_train_start(self) -> None:
        self.at_start = in_memory(self.model)

    def training_step(self, ids: torch.Tensor, _: int) -> torch.Tensor:
        loss = self.model(input_ids=ids, labels=ids).loss
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class SharedModule(Module):
    def configure_model(self) -> None:
        from transformers.distributed import DistributedConfig

        if self.model is None:
            self.model = load(self.folder, distributed_config=DistributedConfig(fsdp_size=world_size()))


def fit(module: Module, strategy: Any, saved: Path, resume: bool) -> None:
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=world_size(),
        max_steps=STEPS * (2 if resume else 1),
        default_root_dir=saved.parent,  # where ModelCheckpoint, which is on by default, saves too
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = DataLoader([tokens(number) for number in range(64)], batch_size=2)
    trainer.fit(module, data, ckpt_path=saved if resume else None, weights_only=False)
    if not resume:
        trainer.save_checkpoint(saved)


def lightning(settings: argparse.Namespace) -> None:
    from transformers.integrations import HfDeepSpeedConfig

    deepspeed_on_cpus()
    keep = HfDeepSpeedConfig(ds_config())  # noqa: F841 - stock needs it to load inside Lightning's zero.Init
    module, saved = Module(settings.folder), settings.folder / TRAINED / "state"
    fit(module, of_lightning.DeepSpeedStrategy(stage=3, process_group_backend="gloo"), saved, settings.resume)
    if settings.resume:
        report(settings.folder, module.model, module.losses, memory=module.at_start)
    else:
        report(
            settings.folder, module.model, module.losses, memory=in_memory(module.model), files=of_zero_folder(saved)
        )


def lightning_fsdp2(settings: argparse.Namespace) -> None:
    module, saved = SharedModule(settings.folder), settings.folder / TRAINED / "state"
    strategy = ModelParallelStrategy(world_size(), 1, process_group_backend="gloo")
    fit(module, strategy, saved, settings.resume)
    report(
        settings.folder,
        module.model,
        module.losses,
        memory=module.at_start if settings.resume else in_memory(module.model),
    )


def fabric(settings: argparse.Namespace) -> None:
    from transformers.integrations import HfDeepSpeedConfig

    deepspeed_on_cpus()
    strategy = of_fabric.DeepSpeedStrategy(stage=3, process_group_backend="gloo")
    fabric = Fabric(accelerator="cpu", devices=world_size(), strategy=strategy)
    fabric.launch()
    keep = HfDeepSpeedConfig(strategy.config)  # noqa: F841 - as above
    with fabric.init_module():
        inner = load(settings.folder)
    model, optimizer = fabric.setup(inner, torch.optim.AdamW(inner.parameters(), lr=1e-2))
    saved = settings.folder / TRAINED / "state"
    state = {"model": model, "optimizer": optimizer, "step": 0, "random": torch.get_rng_state()}
    if settings.resume:
        fabric.load(saved, state)
    at_start, losses = in_memory(inner), []
    for step in range(state["step"], state["step"] + STEPS):
        ids = batch(step)
        loss = model(input_ids=ids, labels=ids).loss
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    if settings.resume:
        report(settings.folder, inner, losses, memory=at_start)
        return
    fabric.save(saved, {**state, "step": STEPS})
    report(settings.folder, inner, losses, memory=in_memory(inner), files=of_zero_folder(saved))


def lightning_example(settings: argparse.Namespace) -> None:
    """examples/finetune_lightning.py, as its command runs it."""
    from transformers.integrations import HfDeepSpeedConfig

    from examples.finetune_lightning import main

    deepspeed_on_cpus()
    keep = HfDeepSpeedConfig(ds_config())  # noqa: F841 - as above
    output = settings.folder / TRAINED
    module = main(["--model", str(settings.folder / "model"), "--output", str(output), "--steps", str(STEPS)])
    files = of_zero_folder(output / "state")
    report(settings.folder, module.model, module.losses, memory=in_memory(module.model), files=files)
