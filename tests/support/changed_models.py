"""What users do to a model between loading and training it, each in every kind of training that can save it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import hf_zero_stream
from hf_zero_stream.registry import plugins
from tests.support.checkpoint_files import differing, tensors_of
from tests.support.fsdp2 import announce, force_fsdp_on_cpu
from tests.support.parity import ds_config, whole_values
from tests.support.trainers import FSDP2, arguments_of, by_deepspeed, join_as_launched, losses_of
from tests.support.trainings import Training, tokens_of
from tests.support.zoo import VOCAB


class HomeMadeLora(nn.Module):
    """A Linear with a low-rank one beside it, as many write it themselves."""

    def __init__(self, linear: nn.Linear, columns: int, rows: int) -> None:
        super().__init__()
        self.linear = linear
        self.down, self.up = nn.Linear(columns, 4, bias=False), nn.Linear(4, rows, bias=False)

    def forward(self, hidden: torch.Tensor) -> Any:
        return self.linear(hidden) + self.up(self.down(hidden))


def with_loss_of(model: Any, addition: Callable[[Any], Any]) -> None:
    """Add something of the last hidden states to what the model's forward gives as its loss."""
    forward = model.forward

    def added(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, output_hidden_states=True, **kwargs)
        output.loss = output.loss + addition(output.hidden_states[-1])
        return output

    model.forward = added


def compile_blocks(model: Any) -> Any:
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = torch.compile(layer, backend="eager")
    return model


def checkpoint_blocks(model: Any) -> Any:
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = checkpoint_wrapper(layer)
    return model


def wrap_linears(model: Any) -> Any:
    config = model.config
    for layer in model.model.layers:
        rows = config.num_attention_heads * layer.self_attn.head_dim
        layer.self_attn.q_proj = HomeMadeLora(layer.self_attn.q_proj, config.hidden_size, rows)
    for name, param in model.named_parameters():
        param.requires_grad_(".down." in name or ".up." in name)
    return model


def replace_head(model: Any) -> Any:
    model.lm_head = nn.Sequential(nn.Linear(model.config.hidden_size, 8), nn.Linear(8, model.config.vocab_size))
    return model


def add_module(model: Any) -> Any:
    model.aux = nn.Linear(model.config.hidden_size, 1)
    with_loss_of(model, lambda hidden: model.aux(hidden).square().mean())
    return model


def add_frozen(model: Any) -> Any:
    add_module(model).aux.requires_grad_(False)
    return model


def add_buffer(model: Any) -> Any:
    model.register_buffer("seen", torch.randn(3))

    def count(hidden: torch.Tensor) -> torch.Tensor:
        model.seen.add_(1.0)
        return model.seen.sum()

    with_loss_of(model, count)
    return model


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(target_modules=["q_proj", "v_proj"], r=4, lora_dropout=0.0, init_lora_weights=False)


def add_adapter(model: Any) -> Any:
    model.add_adapter(lora())
    return model


def add_adapter_beside_trained(model: Any) -> Any:
    """The base is trained too, and is in no adapter's file."""
    return add_adapter(model).requires_grad_(True)


def get_peft(model: Any) -> Any:
    from peft import get_peft_model

    return get_peft_model(model, lora())


def inject(model: Any) -> Any:
    from peft import inject_adapter_in_model

    model = inject_adapter_in_model(lora(), model)
    for name, param in model.named_parameters():
        param.requires_grad_("lora_" in name)
    return model


def add_buffer_beside_adapter(model: Any) -> Any:
    return add_adapter(add_buffer(model))


DEQUANTISED = "dequantised"
"""Changed by its load, from a quantised checkpoint in the folder "fp8"."""


def is_in_bf16(home: str, change: str) -> bool:
    """Whatever is asked for, dequantised weights are, and FSDP2 takes one dtype only."""
    return change == DEQUANTISED and not home.startswith("zero")


def loaded(folder: Path, home: str, change: str, **kwargs: Any) -> Any:
    dtype = torch.float32
    if change == DEQUANTISED:
        folder = folder / "fp8"
        kwargs["quantization_config"] = transformers.FineGrainedFP8Config(dequantize=True)
        if is_in_bf16(home, change):
            dtype = torch.bfloat16
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **kwargs)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "none": lambda model: model,
    "compiled": compile_blocks,
    "checkpointed": checkpoint_blocks,
    "both": lambda model: compile_blocks(checkpoint_blocks(model)),
    "wrapped Linear": wrap_linears,
    "replaced head": replace_head,
    "added module": add_module,
    "added frozen": add_frozen,
    "added buffer": add_buffer,
    "add_adapter": add_adapter,
    "add_adapter, all trained": add_adapter_beside_trained,
    "add_adapter, added buffer": add_buffer_beside_adapter,
    "get_peft_model": get_peft,
    "injected": inject,
}
if any(plugin.name == "packed" for plugin in plugins()):
    CHANGES[DEQUANTISED] = CHANGES["none"]
ADAPTED = ("add_adapter", "add_adapter, all trained", "add_adapter, added buffer", "get_peft_model")
"""Those of which the adapters alone are saved as weights."""


SHARDED_BY = {"distributed_config": ["fsdp_size"], "tp": ["tp_size"], "ep": ["tp_size", "ep_size"]}
"""Homes that transformers shards itself, and the sizes that are the number of ranks there."""


class Session(Training):
    """One training of a changed model, of a `home` and saved by `saver`."""

    def __init__(self, folder: Path, home: str, saver: str, change: str, seed: int) -> None:
        accelerator = self._accelerator_of(home) if home == "fsdp2" or saver == "accelerate" else None
        config = zero_config(home) if home.startswith("zero") else None
        kwargs: dict[str, Any] = {}
        if home in SHARDED_BY:
            sizes = {size: dist.get_world_size() for size in SHARDED_BY[home]}
            kwargs["distributed_config"] = transformers.distributed.DistributedConfig(**sizes)
        elif home == "device_map":
            kwargs["device_map"] = "cpu"
        elif config is not None and accelerator is None:
            kwargs["ds_config"] = config
        model = loaded(folder, home, change, **kwargs)
        self.vocab = model.config.vocab_size
        torch.manual_seed(seed)
        self.model = CHANGES[change](model)
        trained = [param for param in self.model.parameters() if param.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        trains, steps = self.model, optimizer
        if accelerator is not None:
            loader = torch.utils.data.DataLoader([0, 1], batch_size=1)  # type: ignore[arg-type]
            trains, steps, _ = accelerator.prepare(self.model, optimizer, loader)
        elif config is not None:
            trains, steps = deepspeed.initialize(model=self.model, optimizer=optimizer, config=config)[0], None
        super().__init__(trains, steps, accelerator, by=saver, batch=self._tokens)

    def _accelerator_of(self, home: str) -> Any:
        from accelerate import Accelerator

        if home == "fsdp2":
            announce(cpu_ram_efficient_loading=True, state_dict_type="SHARDED_STATE_DICT")
            force_fsdp_on_cpu()
            return Accelerator()
        return by_deepspeed(zero_config(home))

    def _tokens(self, number: int) -> dict[str, torch.Tensor]:
        return {name: ids % self.vocab for name, ids in tokens_of(number).items()}


def zero_config(home: str) -> dict[str, Any]:
    config = {**ds_config(torch.float32), "zero_allow_untested_optimizer": True, "gradient_accumulation_steps": 1}
    del config["optimizer"]
    config["gradient_clipping"] = 0.0  # 1 is the default, and nothing clips in other homes
    stage, _, offloads = home.removeprefix("zero").partition("-")
    config["zero_optimization"] = {"stage": int(stage)}
    if offloads:
        config["zero_force_ds_cpu_optimizer"] = False
        config["zero_optimization"] |= {f"offload_{what}": {"device": "cpu"} for what in ("param", "optimizer")}
    return config


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """What is in the shards of weights, and of adapters, of a checkpoint, wherever in `folder` it lies."""
    (place,) = {path.parent for path in folder.rglob("*.safetensors") if "global_step" not in path.parent.name}
    return tensors_of(place, "model*.safetensors") | tensors_of(place, "adapter_model*.safetensors")


def save_changed(folder: Path, target: Path, home: str, saver: str, changes: Sequence[str]) -> dict[str, Any]:
    """Two steps and a save of each; the losses of two more, and the faults of what was saved."""
    found = {}
    with hf_zero_stream.streaming():
        for change in changes:
            session = Session(folder, home, saver, change, seed=1)
            session.train((0, 1))
            session.save(target / change)
            values = whole_values(session.model)
            found[change] = {"losses": session.train((2, 3)), "wrong": []}
            if dist.get_rank() == 0:
                torch.save(values, target / f"{change}.pt")
                saved = weights_of(target / change)
                if change in ADAPTED:
                    found[change]["wrong"] = [] if all("lora_" in name for name in saved) and saved else [*saved]
                else:
                    found[change]["wrong"] = differing(saved, values)
    return found


def resume_changed(folder: Path, source: Path, home: str, saver: str, changes: Sequence[str]) -> dict[str, Any]:
    """The losses of two steps after a resume of each, and what did not come back."""
    found = {}
    with hf_zero_stream.streaming():
        for change in changes:
            session = Session(folder, home, saver, change, seed=2)  # other random numbers, as in a new process
            session.load(source / change)
            wrong = differing(whole_values(session.model), torch.load(source / f"{change}.pt"))
            found[change] = {"losses": session.train((2, 3)), "wrong": wrong}
    return found


# ------------------------------------------------------------------------------------------------------- the Trainer


def by_trainer(folder: Path, output: Path, home: str, changes: Sequence[str], resumes: bool) -> dict[str, list[float]]:
    """The losses of four steps, with a checkpoint after two; or those after a resume from it."""
    found = {}
    rows = torch.randint(5, VOCAB, (24, 9), generator=torch.Generator().manual_seed(1))
    for change in changes:
        settings = FSDP2
        if home == "fsdp2":
            force_fsdp_on_cpu()
        else:
            join_as_launched()
            settings = {"deepspeed": {**zero_config(home), "train_micro_batch_size_per_gpu": "auto"}}
        args = arguments_of(
            output / change,
            per_device_train_batch_size=6 // dist.get_world_size(),
            max_steps=4,
            save_steps=2,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,  # as the config says
            average_tokens_across_devices=False,  # it multiplies by the number of ranks, additions to a loss too
            remove_unused_columns=False,  # those that the signature of a replaced forward does not name
            **settings,
        )
        with hf_zero_stream.streaming():
            model = loaded(folder, home, change)
            data = [
                {"input_ids": row % model.config.vocab_size, "labels": row % model.config.vocab_size} for row in rows
            ]
            torch.manual_seed(2 if resumes else 1)
            trainer = transformers.Trainer(CHANGES[change](model), args, train_dataset=data)  # type: ignore[arg-type]
            trainer.train(resume_from_checkpoint=str(output / change / "checkpoint-2") if resumes else None)
        found[change] = losses_of(trainer)
        assert len(found[change]) == 4
    return found
