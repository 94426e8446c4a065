"""Training of streamed models under ZeRO-3.

- Training a streamed model gives the losses that training the stock one gives, to the last bit.
- transformers' own tests of the Trainer and of DeepSpeed's engine under ZeRO-3 hold for streamed models. Docstrings
  name the test that each stands for; tests/support/upstream.py says in which files those are.
- ZeRO-3: small parameters, which are in full between two steps, changed there by code that gathers nothing.
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from transformers.integrations.deepspeed import HfDeepSpeedConfig, is_deepspeed_zero3_enabled

import hf_zero_stream
from hf_zero_stream import streaming
from hf_zero_stream.errors import UnsupportedError
from hf_zero_stream.holdings.introspection import is_streamed
from tests.support.checkpoint_files import differing, tensors_of
from tests.support.cluster import run_ranks
from tests.support.messages import listen
from tests.support.parity import assert_same, compare, ds_config, load_with, three_losses, whole_values
from tests.support.trainers import arguments_of, join_as_launched, losses_of
from tests.support.training_state import all_in_one_group, engine_of, state_config, train
from tests.support.upstream import is_partitioned
from tests.support.zoo import ZOO, Checkpoint


# Stock's loading under ZeRO-3 raises for this one, so its losses have to come from plain loading.
STOCK_FAILS = {"qwen3_vl_moe_v5"}


def losses(name: str, folder: Path, dtype: torch.dtype, loader: str, zero: dict[str, Any]) -> list[float]:
    """Three steps of AdamW with `deepspeed.initialize`, each rank on the same tiny batch."""
    config = ds_config(dtype, **zero)
    auto_class = ZOO[name].auto_class
    keeps_zero3_on = HfDeepSpeedConfig(config) if loader != "plain" else None
    if loader == "streaming":
        model = getattr(hf_zero_stream, f"Streaming{auto_class}").from_pretrained(folder, dtype=dtype)
    else:
        model = getattr(transformers, auto_class).from_pretrained(folder, dtype=dtype)
    del keeps_zero3_on
    engine, *_ = deepspeed.initialize(model=model, config=config)
    return three_losses(engine, ZOO[name].inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", list(ZOO))
@pytest.mark.sample(1)
def test_losses_equal_stock(cluster: None, zoo_checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> None:
    folder = zoo_checkpoint(name, dtype)
    reference = "plain" if name in STOCK_FAILS else "stock"
    streamed = run_ranks(2, losses, name, folder, dtype, "streaming", {})
    assert streamed == run_ranks(2, losses, name, folder, dtype, reference, {})
    assert len(set(streamed[0])) == 3, "three steps must change the loss"


@pytest.mark.sample(1)
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_losses_equal_stock_at_other_world_sizes(cluster: None, zoo_checkpoint: Checkpoint, world_size: int) -> None:
    folder = zoo_checkpoint("qwen3_moe", torch.bfloat16)
    runs = [
        run_ranks(world_size, losses, "qwen3_moe", folder, torch.bfloat16, loader, {})
        for loader in ("streaming", "stock")
    ]
    assert runs[0] == runs[1]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "zero",
    [
        {"offload_param": {"device": "cpu", "pin_memory": False}},
        {"zero_hpz_partition_size": 2},
        {"stage3_param_persistence_threshold": 0},
    ],
    ids=["offload_cpu", "hpz", "no_persistence"],
)
def test_losses_equal_stock_with(cluster: None, zoo_checkpoint: Checkpoint, zero: dict[str, Any]) -> None:
    folder = zoo_checkpoint("qwen3_moe", torch.bfloat16)
    runs = [
        run_ranks(2, losses, "qwen3_moe", folder, torch.bfloat16, loader, zero) for loader in ("streaming", "stock")
    ]
    assert runs[0] == runs[1]


def make_trainer(folder: Path, output: Path, stream: bool, **arguments: Any) -> transformers.Trainer:
    join_as_launched()
    deepspeed = {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
    }
    settings = {"deepspeed": deepspeed, "learning_rate": 1e-3, "lr_scheduler_type": "constant", "save_strategy": "no"}
    args = arguments_of(output, **{**settings, **arguments})
    with streaming() if stream else nullcontext():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert is_streamed(model) is stream
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(5, 300, (16, 9), generator=generator)
    data = [{"input_ids": row, "labels": row} for row in rows]
    return transformers.Trainer(model=model, args=args, train_dataset=data, eval_dataset=data[:4])


def train_by_trainer(folder: Path, output: Path, stream: bool) -> dict[str, Any]:
    trainer = make_trainer(folder, output, stream, max_steps=3)
    seen = [trainer.is_deepspeed_enabled, is_deepspeed_zero3_enabled()]
    stage = trainer.accelerator.state.deepspeed_plugin.zero_stage
    trainer.train()
    seen += [is_deepspeed_zero3_enabled(), is_partitioned(trainer.model)]
    return {"seen": seen, "stage": stage, "losses": losses_of(trainer)}


@pytest.mark.slow
def test_trainer_sees_zero3(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """`test_ds_config_object`, `test_training`: ZeRO-3 is on for the Trainer, which trains as with stock's model."""
    streamed, stock = (
        run_ranks(2, train_by_trainer, zoo_checkpoint("llama"), tmp_path / str(stream), stream)
        for stream in (True, False)
    )
    for found in streamed:
        assert found["seen"] == [True, True, True, True] and found["stage"] == 3
    assert [found["losses"] for found in streamed] == [found["losses"] for found in stock]
    assert len(set(streamed[0]["losses"])) == 3


STEPS = dict(max_steps=4, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2)


def train_to_the_best(folder: Path, output: Path) -> dict[str, Any]:
    trainer = make_trainer(folder, output, True, load_best_model_at_end=True, **STEPS)
    trainer.train()
    found = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    return {"losses": losses_of(trainer), "evaluated": found, "best": trainer.evaluate()["eval_loss"]}


def resume(folder: Path, output: Path) -> list[float]:
    trainer = make_trainer(folder, output, True, **STEPS)
    trainer.train(resume_from_checkpoint=str(output / "checkpoint-2"))
    return losses_of(trainer)


@pytest.mark.slow
def test_resume_and_best_model(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """`test_can_resume_training_normal`, `test_load_best_model`: engine checkpoints of a streamed model load into one.

    The model that the Trainer saves beside them is a checkpoint like any other.
    """
    ranks = run_ranks(2, train_to_the_best, zoo_checkpoint("llama"), tmp_path)
    for found in ranks:
        assert len(found["losses"]) == 4 and len(found["evaluated"]) == 2
        assert found["best"] == min(found["evaluated"])
    assert run_ranks(2, resume, zoo_checkpoint("llama"), tmp_path) == [found["losses"] for found in ranks]
    assert_same(run_ranks(2, compare, "AutoModelForCausalLM", tmp_path / "checkpoint-4", {}))


def recover(name: str, folder: Path, output: Path) -> list[str]:
    """The names of the tensors that differ between the checkpoint of an engine, put together, and plain loading."""
    import deepspeed
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    plain = load_with("plain", ZOO[name].auto_class, folder, {}, {})
    model = load_with("streamed", ZOO[name].auto_class, folder, ds_config(), {})
    next(model.parameters()).requires_grad = False  # frozen parameters are kept apart in such a checkpoint
    engine, *_ = deepspeed.initialize(model=model, config=ds_config())
    engine.save_checkpoint(str(output))
    dist.barrier()
    return differing(get_fp32_state_dict_from_zero_checkpoint(str(output)), plain.state_dict())


@pytest.mark.parametrize("name", ["qwen3_moe", "t5"])
def test_zero_to_fp32(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, name: str) -> None:
    """`test_load_state_dict_from_zero_checkpoint`, `test_zero_to_fp32`: whole weights out of the ranks' partitions."""
    assert run_ranks(2, recover, name, zoo_checkpoint(name), tmp_path) == [[], []]


NORM = "model.norm.weight"


def in_place(folder: Path, target: Path, config: dict[str, Any]) -> list[str]:
    """Change a norm on all ranks, save in all ways, and train on; the warnings."""
    said = listen()
    engine = engine_of(folder, config, all_in_one_group)
    train(engine, range(2))
    norm = engine.module.get_parameter(NORM)
    norm.data[0] = 7  # an element of the first rank's partition
    hf_zero_stream.save_pretrained(engine, target / "weights")
    hf_zero_stream.save_state(engine, target / "state")
    assert norm.data[0] == 7 and norm.data.numel() > 1
    if norm.dtype == torch.bfloat16:
        with pytest.raises(UnsupportedError, match=f"code has changed {NORM} in place"):
            hf_zero_stream.save_pretrained(engine, target / "fp32", dtype=torch.float32)
    train(engine, (2,))
    assert norm.data[0] != 7
    hf_zero_stream.save_pretrained(engine, target / "after")
    return said


def one_rank_only(folder: Path, target: Path, config: dict[str, Any]) -> None:
    engine = engine_of(folder, config, all_in_one_group)
    train(engine, range(1))
    if torch.distributed.get_rank() == 0:
        engine.module.get_parameter(NORM).data.fill_(7)
    hf_zero_stream.save_pretrained(engine, target)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_what_memory_shows_is_saved(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, dtype: torch.dtype
) -> None:
    folder = zoo_checkpoint("llama", dtype)
    config = state_config(3, dtype, stage3_param_persistence_threshold=100)
    first, second = run_ranks(2, in_place, folder, tmp_path, config)
    assert first and all(text.startswith(f"{NORM}: code has changed") for text in first)
    assert not second  # its part has not changed
    for name in ("weights", "state"):
        assert tensors_of(tmp_path / name, "model*.safetensors")[NORM][0] == 7
    before, after = (tensors_of(tmp_path / name)[NORM] for name in ("weights", "after"))
    assert after[0] != 7 and torch.allclose(before[1:], after[1:], atol=0.02)
    run_ranks(2, one_rank_only, folder, tmp_path / "rank 0", config)
    assert tensors_of(tmp_path / "rank 0")[NORM].eq(7).all()


def merge(folder: Path, target: Path, config: dict[str, Any], how: str) -> dict[str, torch.Tensor] | None:
    """Train an adapter, merge it with nothing gathered, and save; what memory shows, on rank 0."""
    with hf_zero_stream.streaming():
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, ds_config=config)
        torch.manual_seed(0)
        lora = peft.LoraConfig(r=3, target_modules=["q_proj", "embed_tokens"], init_lora_weights=False)
        model = peft.get_peft_model(model, lora)
        trained = [param for param in model.parameters() if param.requires_grad]
        engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=trained)
        train(engine, range(2))
        hf_zero_stream.save_state(engine, target / "adapter")
        if how == "unload":
            model = model.merge_and_unload()
        else:
            model.merge_adapter()
            model.unmerge_adapter()
            model.merge_adapter(safe_merge=True)
            model = model.get_base_model()
        shown = whole_values(model)
        if how == "unload":
            model.save_pretrained(target / "merged")
    return shown if torch.distributed.get_rank() == 0 else None


@pytest.mark.parametrize(
    ("how", "threshold"),
    [
        ("unload", 1000),
        pytest.param("unload", 100_000, marks=pytest.mark.slow),
        pytest.param("adapter", 1000, marks=pytest.mark.slow),
    ],
)
def test_merged_adapters(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, how: str, threshold: int) -> None:
    folder = zoo_checkpoint("llama")
    config = state_config(3, torch.float32, stage3_param_persistence_threshold=threshold)
    shown = run_ranks(2, merge, folder, tmp_path, config, how)[0]
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain: Any = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter")).merge_and_unload()
    expected = plain.state_dict()
    for name, value in expected.items():
        key = name if how == "unload" else next(each for each in shown if each.replace(".base_layer", "") == name)
        assert torch.allclose(shown[key], value, atol=1e-6), name
        if how == "unload":
            assert torch.equal(tensors_of(tmp_path / "merged")[name], shown[name]), name
