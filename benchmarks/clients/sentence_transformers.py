"""sentence-transformers' Trainer under ZeRO-3, with an encoder of its own kind of folder."""

import argparse
import os


os.environ |= {"ACCELERATE_USE_DEEPSPEED": "true", "CUDA_VISIBLE_DEVICES": ""}

from accelerate import PartialState  # noqa: E402 - reads the environment


PartialState(backend="gloo")

from datasets import Dataset  # noqa: E402
from sentence_transformers import (  # noqa: E402
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.losses import MultipleNegativesRankingLoss  # noqa: E402
from torch import nn  # noqa: E402

from benchmarks.clients.common import (  # noqa: E402
    ADAMW,
    STEPS,
    TRAINED,
    ds_config,
    in_memory,
    of_files,
    report,
    tokens,
)


WORDS = "the a cat dog house tree runs sleeps blue red near over small big water fire".split()


def sentences(first: int) -> list[str]:
    return [" ".join(WORDS[word % len(WORDS)] for word in tokens(first + number)[:6]) for number in range(32)]


def sentence_transformers(settings: argparse.Namespace) -> None:
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(settings.folder / TRAINED),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        deepspeed=ds_config(optimizer={**ADAMW, "params": {"lr": 1e-4, "torch_adam": True}}),
        ddp_backend="gloo",
        report_to=[],
        disable_tqdm=True,
    )
    model = SentenceTransformer(str(settings.folder / "encoder"), device="cpu")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # ranks draw other numbers in another order
    data = Dataset.from_dict({"anchor": sentences(0), "positive": sentences(32)})
    loss = MultipleNegativesRankingLoss(model)
    trainer = SentenceTransformerTrainer(model=model, args=arguments, train_dataset=data, loss=loss)
    trainer.train()
    saved = settings.folder / TRAINED / "final"
    trainer.save_model(str(saved))
    trainer.accelerator.wait_for_everyone()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    inner = model[0].auto_model
    report(settings.folder, inner, losses, memory=in_memory(inner), files=of_files(saved))
