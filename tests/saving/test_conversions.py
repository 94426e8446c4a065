"""Saves whose conversions need values, and of several adapters.

- Conversions whose reverse needs values: the parameter is gathered, the report names it, the bytes are stock's.
- One model, several adapters, such as DPO's policy and its frozen reference: each is saved as it is.
"""

from pathlib import Path
from typing import Any

import deepspeed
import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, Transpose, WeightConverter

import hf_zero_stream
from tests.support.cluster import run_ranks
from tests.support.fsdp2 import announce, force_fsdp_on_cpu
from tests.support.parity import ds_config, whole_values
from tests.support.saving import different, saves_with
from tests.support.trainers import arguments_of
from tests.support.training_state import state_config, train
from tests.support.zoo import Checkpoint


class Scaled(ConversionOps):
    """Arithmetic: elements of the file are those of the model, doubled; and the other way round."""

    def __init__(self, factor: float = 0.5) -> None:
        self.factor = factor

    def convert(
        self, input_dict: dict[str, Any], source_patterns: list[str], target_patterns: list[str], **kwargs: Any
    ) -> dict[str, Any]:
        (values,) = input_dict.values()
        return {target_patterns[0]: self.of(values[0] if isinstance(values, list) else values)}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * self.factor

    @property
    def reverse_op(self) -> ConversionOps:
        return Scaled(1 / self.factor)


class Sorted(Scaled):
    """A function of all elements at once."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.flatten().sort().values.view(tensor.shape)

    @property
    def reverse_op(self) -> ConversionOps:
        return Sorted()


class OddConfig(PretrainedConfig):
    model_type = "odd_to_save"


class OddModel(PreTrainedModel):
    config_class = OddConfig

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        self.scaled = torch.nn.Linear(7, 9)
        self.sorted = torch.nn.Linear(5, 11)
        self.turned = torch.nn.Linear(64, 48, bias=False)
        self.plain = torch.nn.Linear(3, 5)
        self.register_buffer("steps", torch.arange(6))
        self.post_init()


CONVERSIONS = [
    WeightConverter("scaled.file_weight", "scaled.weight", operations=[Scaled()]),
    WeightConverter("sorted.file_weight", "sorted.weight", operations=[Sorted()]),
    WeightConverter("turned.file_weight", "turned.weight", operations=[Transpose(0, 1)]),
]


def save_odd(checkpoint: Path, folder: Path, write_from: str) -> list[dict[str, Any]]:
    register_checkpoint_conversion_mapping("odd_to_save", CONVERSIONS, overwrite=True)
    if dist.get_rank() == 0:
        torch.manual_seed(3)
        OddModel(OddConfig()).save_pretrained(checkpoint)
    dist.barrier()
    plain = OddModel.from_pretrained(checkpoint)
    plain.save_pretrained(folder / "stock", max_shard_size="2KB")
    with hf_zero_stream.streaming():
        model = OddModel.from_pretrained(checkpoint, ds_config=ds_config())
    with saves_with(write_from=write_from, chunk_bytes=512, verify="full"):
        report = hf_zero_stream.save_pretrained(model, folder / "ours", max_shard_size="2KB")
    rounds = [rank.rounds for rank in report.ranks]
    return [dict(report.materialised), {"rounds": rounds[0]}]


@pytest.mark.parametrize("write_from", ["all", "rank0"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_reversed_by_value(cluster: None, tmp_path: Path, world_size: int, write_from: str) -> None:
    for materialised, other in run_ranks(world_size, save_odd, tmp_path / "odd", tmp_path, write_from):
        assert materialised.keys() == {"scaled.file_weight", "sorted.file_weight"}
        assert (other["rounds"] > 0) == (world_size > 1), "the transposed one should go through exchanges"
    assert different(tmp_path / "ours", tmp_path / "stock") == []


def test_in_one_process_without_a_group(tmp_path: Path) -> None:
    assert not dist.is_initialized()
    register_checkpoint_conversion_mapping("odd_to_save", CONVERSIONS, overwrite=True)
    OddModel(OddConfig()).save_pretrained(tmp_path / "odd")
    model = OddModel.from_pretrained(tmp_path / "odd")
    model.save_pretrained(tmp_path / "stock")
    with saves_with(verify="full"):
        report = hf_zero_stream.save_pretrained(model, tmp_path / "ours")
    assert report.materialised.keys() == {"scaled.file_weight", "sorted.file_weight"}
    assert different(tmp_path / "ours", tmp_path / "stock") == []


def adapted(folder: Path, **kwargs: Any) -> Any:
    """A model with a trained and a frozen adapter."""
    with hf_zero_stream.streaming():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **kwargs)
    lora = peft.LoraConfig(r=3, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, init_lora_weights=False)
    torch.manual_seed(0)
    model = peft.get_peft_model(model, lora)
    model.add_adapter("reference", lora)
    for name, param in model.named_parameters():
        param.requires_grad_(".default." in name)
    return model


def in_full(model: Any) -> dict[str, torch.Tensor]:
    """The values of both adapters."""
    return {name: value for name, value in whole_values(model).items() if "lora_" in name}


def by_engine(folder: Path, target: Path, stage: int) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """Train, save, train on; and the losses after a resume."""

    def engine_of() -> Any:
        config = state_config(stage, torch.float32)
        model = adapted(folder, ds_config=config) if stage == 3 else adapted(folder)
        trained = [param for param in model.parameters() if param.requires_grad]
        return deepspeed.initialize(model=model, config=config, model_parameters=trained)[0]

    engine = engine_of()
    train(engine, range(2))
    values = in_full(engine.module)
    hf_zero_stream.save_state(engine, target / "state")
    with hf_zero_stream.streaming():
        engine.save_checkpoint(str(target / "engine"))
    continued = train(engine, (3, 4))
    again = engine_of()
    with hf_zero_stream.streaming():
        again.load_checkpoint(str(target / "engine"))
    return values, continued, train(again, (3, 4))


class Tokens(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(5, 90, (9,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def by_trainer(folder: Path, target: Path, stage: int) -> dict[str, torch.Tensor]:
    """`stage` 0: FSDP2."""
    if stage:
        zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": stage == 3}
        sharding: dict[str, Any] = {
            "deepspeed": {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": zero},
            "use_cpu": True,
            "accelerator_config": None,
        }
    else:
        announce(cpu_ram_efficient_loading=False)
        force_fsdp_on_cpu()
        sharding = {"fsdp": True, "fsdp_config": {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}
    with hf_zero_stream.streaming():
        arguments = arguments_of(target / "trainer", max_steps=2, save_steps=2, **sharding)
        model = adapted(folder)
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Tokens())
        trainer.train()
        trainer.save_model(str(target / "saved"))
        state_dict = trainer.accelerator.get_state_dict(trainer.model_wrapped)
        inner = trainer.accelerator.unwrap_model(trainer.model)
        if torch.distributed.get_rank() == 0:
            inner.save_pretrained(str(target / "pretrained"), state_dict=state_dict)
    return in_full(inner)


def assert_are_saved(folder: Path, values: dict[str, torch.Tensor]) -> None:
    for name, place in (("default", folder), ("reference", folder / "reference")):
        saved = load_file(place / "adapter_model.safetensors")
        expected = {key.replace(f".{name}", ""): value for key, value in values.items() if f".{name}." in key}
        assert saved.keys() == expected.keys() and saved, place
        assert [key for key, value in saved.items() if not torch.equal(value, expected[key])] == [], place


@pytest.mark.slow
@pytest.mark.parametrize("stage", [3, 2])
def test_engines(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, stage: int) -> None:
    folder = zoo_checkpoint("llama")
    for values, continued, resumed in run_ranks(2, by_engine, folder, tmp_path, stage):
        assert resumed == continued
        for name in ("state", "engine"):
            assert_are_saved(tmp_path / name, values)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loaded: Any = peft.PeftModel.from_pretrained(base, str(tmp_path / "state"))
    loaded.load_adapter(str(tmp_path / "state" / "reference"), "reference")
    state_dict = loaded.state_dict()
    assert all(torch.equal(state_dict[name], value) for name, value in values.items())


@pytest.mark.parametrize("stage", [3, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (2, 0))])
def test_trainer(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, stage: int) -> None:
    """Stock saves the trained adapter's values in both folders at stage 3."""
    values = run_ranks(2, by_trainer, zoo_checkpoint("llama"), tmp_path, stage)[0]
    for name in ("saved", "pretrained", "trainer/checkpoint-2"):
        assert_are_saved(tmp_path / name, values)
