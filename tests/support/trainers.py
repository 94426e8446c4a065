"""What ranks run to train by accelerate, and by the Trainers on top of it, as if a launcher had started them."""

import copy
import os
from pathlib import Path
from typing import Any

import transformers
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DeepSpeedPlugin

from tests.support.parity import ds_config


ON_A_CPU: dict[str, Any] = {
    "bf16": False,  # transformers wants a GPU for it
    "accelerator_config": {"use_configured_state": True},
    "per_device_train_batch_size": 1,
    "logging_steps": 1,
    "report_to": [],
    "optim": "adamw_torch",
    "dataloader_pin_memory": False,
    "disable_tqdm": True,
}
"""Arguments of Trainers for a few steps whose losses are compared."""
FSDP2: dict[str, Any] = {"fsdp": True, "fsdp_config": {"version": 2}}
ZERO_3: dict[str, Any] = {
    "deepspeed": {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
    }
}


def join_as_launched() -> None:
    """accelerate finds the ranks that the tests' cluster has made, as it would find a launcher's for DeepSpeed."""
    AcceleratorState._reset_state()
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")


def own_optimizer(config: dict[str, Any]) -> dict[str, Any]:
    """A DeepSpeed config without an optimizer, for one that a script brings."""
    config = {name: value for name, value in config.items() if name != "optimizer"}
    return config | {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}


def by_deepspeed(config: dict[str, Any], **options: Any) -> Any:
    """An accelerator whose models DeepSpeed trains."""
    join_as_launched()
    plugin = DeepSpeedPlugin(hf_ds_config={"gradient_accumulation_steps": 1, **config})
    return Accelerator(deepspeed_plugin=plugin, **options)


def arguments_of(output: Path, kind: type = transformers.TrainingArguments, **settings: Any) -> Any:
    """Those of a Trainer, which change what they are given."""
    return kind(output_dir=str(output), **copy.deepcopy({**ON_A_CPU, **settings}))


def trainer_arguments(output: Path, **settings: Any) -> Any:
    """The same, by default under ZeRO-3, of a Trainer that saves only the model."""
    config = ds_config(stage3_gather_16bit_weights_on_model_save=True)
    del config["optimizer"]
    return arguments_of(output, **{"deepspeed": config, "save_only_model": True, **settings})


def losses_of(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def make_tokenizer(folder: Path) -> None:
    """A word-level tokenizer of a few words, so that nothing is downloaded."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<eos>", "<unk>", "a", "small", "model", "learns", "words"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
