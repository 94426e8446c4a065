"""Several models, or parts of models, that are partitioned together: a second load beside a first, a streamed model
inside the user's own, groups of ranks. Losses are stock's to the last bit; the table is docs/support.md.
"""

from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from deepspeed.utils import groups
from torch import nn
from transformers.integrations.deepspeed import HfDeepSpeedConfig
from transformers.modeling_outputs import SequenceClassifierOutput

from hf_zero_stream.holdings.introspection import is_streamed
from tests.support.cluster import run_ranks
from tests.support.homes import CAUSAL, HPZ, OFFLOAD, make_even_llama
from tests.support.parity import differences, ds_config, load_with, three_losses
from tests.support.zoo import ZOO, Checkpoint


# ------------------------------------------------------------------------------------------------ one after another


def distil(how: str, teacher_folder: Path, student_folder: Path, zero: dict[str, Any]) -> dict[str, Any]:
    """A teacher in bf16, which is not trained, and then a student in fp32, with an engine each."""
    teacher_config, student_config = ds_config(torch.bfloat16, **zero), ds_config(torch.float32, **zero)
    del teacher_config["optimizer"]
    plain_teacher = load_with("plain", CAUSAL, teacher_folder, {}, {"dtype": torch.bfloat16})
    plain_student = load_with("plain", CAUSAL, student_folder, {}, {"dtype": torch.float32})
    teacher = load_with(how, CAUSAL, teacher_folder, teacher_config, {"dtype": torch.bfloat16})
    student = load_with(how, CAUSAL, student_folder, student_config, {"dtype": torch.float32})
    found = []
    if how == "streamed":
        found += differences(teacher, plain_teacher, torch.bfloat16)
        found += differences(student, plain_student, torch.float32)
    teacher_engine, *_ = deepspeed.initialize(model=teacher.eval(), config=teacher_config)
    student_engine, *_ = deepspeed.initialize(model=student, config=student_config)

    student_engine.train()
    inputs = ZOO["llama"].inputs()
    losses = []
    for _ in range(3):
        with torch.no_grad():
            expected = teacher_engine(**inputs).logits.float().softmax(-1)
        logits = student_engine(**inputs).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), expected.flatten(0, 1))
        student_engine.backward(loss)
        student_engine.step()
        losses.append(loss.item())
    return {"differences": found, "losses": losses}


@pytest.mark.parametrize(("world_size", "zero"), [(2, {}), (3, OFFLOAD)], ids=["device", "offload"])
@pytest.mark.sample(1)
def test_teacher_and_student(cluster: None, zoo_checkpoint: Checkpoint, world_size: int, zero: dict[str, Any]) -> None:
    assert_distils_as_stock(world_size, zoo_checkpoint, zero, zero)


def assert_distils_as_stock(world_size: int, checkpoint: Checkpoint, zero: Any, of_stock: Any) -> None:
    folders = checkpoint("qwen3_moe", torch.bfloat16), checkpoint("llama")
    streamed = run_ranks(world_size, distil, "streamed", *folders, zero)
    stock = run_ranks(world_size, distil, "stock", *folders, of_stock)
    assert [rank["differences"] for rank in streamed] == [[]] * world_size
    assert [rank["losses"] for rank in streamed] == [rank["losses"] for rank in stock]
    assert len(set(streamed[0]["losses"])) == 3


def second_load_of_stock(folder: Path) -> str:
    for _ in range(2):
        try:
            model = load_with("stock", CAUSAL, folder, ds_config(**HPZ), {})
        except AssertionError as error:
            return str(error)
    return f"loaded {type(model).__name__} twice"


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_teacher_and_student_with_hpz(cluster: None, zoo_checkpoint: Checkpoint, world_size: int) -> None:
    """A second `zero.Init` of stock's fails; losses are those without hpZ, which copies values and changes none."""
    for message in run_ranks(world_size, second_load_of_stock, zoo_checkpoint("llama")):
        assert "group is already initialized" in message
    assert_distils_as_stock(world_size, zoo_checkpoint, HPZ, {})


# ------------------------------------------------------------------------------------------- inside a user's own model


class Classifier(nn.Module):
    """A user's own model: a streamed one, frozen in part, and a head of their own."""

    def __init__(self, how: str, folder: Path, config: dict[str, Any]) -> None:
        super().__init__()
        self.backbone = load_with(how, "AutoModel", folder, config, {})
        self.backbone.get_input_embeddings().requires_grad_(False)
        torch.manual_seed(3)
        self.head = nn.Linear(self.backbone.config.hidden_size, 3)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> Any:
        hidden = self.backbone(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        loss = nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten() % 3)
        return SequenceClassifierOutput(loss=loss)


def classify(how: str, folder: Path, zero: dict[str, Any], init: str) -> dict[str, Any]:
    """Where `init` is "second", the user partitions the whole model with a `zero.Init` of their own."""
    config = ds_config(**zero)
    model = Classifier(how, folder, config)
    if init == "second":
        hpz_group = groups._get_zero_param_intra_parallel_group()
        deepspeed.zero.Init(module=model, config_dict_or_path=config, zero_param_parallel_group=hpz_group)
        assert all(hasattr(param, "ds_tensor") for param in model.head.parameters())
    trained = [param for param in model.parameters() if param.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=trained)
    assert all(hasattr(param, "ds_tensor") for param in model.parameters())
    return {
        "losses": three_losses(engine, ZOO["llama"].inputs),
        "streams": is_streamed(model.backbone),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "zero", "init"),
    [(2, {}, "second"), (2, HPZ, "initialize"), (3, OFFLOAD, "initialize"), (4, HPZ, "second")],
    ids=["device", "hpz_2", "offload", "hpz_4"],
)
def test_own_model_around_a_streamed_one(
    cluster: None, zoo_checkpoint: Checkpoint, world_size: int, zero: dict[str, Any], init: str
) -> None:
    folder = zoo_checkpoint("llama")
    streamed = run_ranks(world_size, classify, "streamed", folder, zero, init)
    stock = run_ranks(world_size, classify, "stock", folder, zero, init)
    assert [rank["losses"] for rank in streamed] == [rank["losses"] for rank in stock]
    assert all(rank["streams"] for rank in streamed)
    assert len(set(streamed[0]["losses"])) == 3


def classify_under_init(how: str, folder: Path) -> dict[str, Any]:
    """The user's model is built under `zero.Init`, and loads its backbone there."""
    config = ds_config()
    keeps_zero3_on = HfDeepSpeedConfig(config)
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = Classifier(how, folder, config)
    del keeps_zero3_on
    trained = [param for param in model.parameters() if param.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=trained)
    return {
        "losses": three_losses(engine, ZOO["llama"].inputs),
        "streams": is_streamed(model.backbone),
    }


@pytest.mark.slow
def test_own_model_built_under_init(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    folder = zoo_checkpoint("llama")
    streamed = run_ranks(2, classify_under_init, "streamed", folder)
    stock = run_ranks(2, classify_under_init, "stock", folder)
    assert [rank["losses"] for rank in streamed] == [rank["losses"] for rank in stock]
    assert all(rank["streams"] for rank in streamed)


# ------------------------------------------------------------------------------------------------- groups of ranks


def sequence_parallel_losses(how: str, folder: Path, zero: dict[str, Any]) -> list[float]:
    """Two ranks share each sequence (DeepSpeed's Ulysses), as accelerate sets it up; partitions are over all ranks."""
    config = ds_config(**zero)
    model = load_with(how, CAUSAL, folder, config, {"attn_implementation": "sdpa"})
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model, core_attn_implementation="sdpa", sequence_parallel_size=2, micro_batch_size=1
    )
    engine, *_ = deepspeed.initialize(model=model, config=config, mpu=mpu)
    assert {param.ds_zero_partition_world_size for param in model.parameters()} == {torch.distributed.get_world_size()}
    rank, length = mpu.get_sequence_parallel_rank(), 4
    tokens = ZOO["llama"].inputs()["input_ids"][:1]
    own = slice(rank * length, (rank + 1) * length)
    batch = {
        "input_ids": tokens[:, own],
        "position_ids": torch.arange(2 * length)[None, own],
        "labels": tokens[:, 1:][:, own],
        "shift_labels": tokens[:, 1:][:, own],
    }
    return three_losses(engine, lambda: batch)


@pytest.mark.parametrize(("world_size", "zero"), [(2, {}), (4, OFFLOAD)], ids=["device", "offload"])
@pytest.mark.sample(1)
def test_sequence_parallel(cluster: None, tmp_path: Path, world_size: int, zero: dict[str, Any]) -> None:
    folder = make_even_llama(tmp_path)
    streamed = run_ranks(world_size, sequence_parallel_losses, "streamed", folder, zero)
    stock = run_ranks(world_size, sequence_parallel_losses, "stock", folder, zero)
    assert streamed == stock
    assert len({loss for losses in streamed[:2] for loss in losses}) == 6, "each rank sees its half of the tokens"
