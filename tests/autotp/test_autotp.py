"""DeepSpeed's AutoTP is a sharding as any other: loads read parts, saves are whole, states fit any ranks."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState
from transformers.integrations import HfDeepSpeedConfig

import hf_zero_stream
from hf_zero_stream.errors import UnsupportedError
from hf_zero_stream.settings.scope import active_configs
from tests.support.checkpoint_files import differing, tensors_of
from tests.support.cluster import run_ranks
from tests.support.parity import ds_config
from tests.support.saving import SHARD_SIZE, different
from tests.support.trainers import arguments_of, join_as_launched, losses_of
from tests.support.training_state import train


INDEX = "model.safetensors.index.json"
TEXT = {"vocab_size": 321, "hidden_size": 48, "intermediate_size": 90, "num_hidden_layers": 2, "pad_token_id": 0}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "eos_token_id": 2}
ODD_HEADS = {"num_attention_heads": 3, "num_key_value_heads": 3, "attention_bias": True, "mlp_bias": True}
OPT = {"vocab_size": 321, "hidden_size": 48, "ffn_dim": 90, "num_hidden_layers": 2, "num_attention_heads": 4}
OPT |= {"max_position_embeddings": 64, "word_embed_proj_dim": 48, "dropout": 0.0, "tie_word_embeddings": False}

CONFIGS = {
    "plan": lambda: transformers.LlamaConfig(**TEXT),
    "tied": lambda: transformers.LlamaConfig(**TEXT, tie_word_embeddings=True),
    "uneven": lambda: transformers.LlamaConfig(**{**TEXT, **ODD_HEADS}),
    "one kv head": lambda: transformers.Qwen2Config(**{**TEXT, "num_key_value_heads": 1}),
    "custom": lambda: transformers.LlamaConfig(**TEXT),
    "heuristic": lambda: transformers.OPTConfig(**OPT),
    "fused": lambda: transformers.Phi3Config(**TEXT),
    "viewed": lambda: transformers.Phi3Config(**TEXT),
    "bigcode": lambda: transformers.GPTBigCodeConfig(
        vocab_size=321, n_embd=48, n_head=4, n_layer=2, n_positions=64, n_inner=90
    ),
}
"""Checkpoints: by transformers' plan, with a tied head, with an odd number of heads, with fewer heads than ranks, by
patterns of the user's, without a plan, and with fused weights.
"""


def _layer(kind: str, names: str, **more: Any) -> dict[str, Any]:
    return {"patterns": [rf".*\.({names})\.weight$"], "partition_type": kind, **more}


ROWS = _layer("row", "o_proj|down_proj")
LAYERS = {
    "custom": [ROWS, _layer("column", "q_proj|k_proj|v_proj|gate_proj|up_proj")],
    "fused": [
        ROWS,
        _layer("column", "qkv_proj", shape=[[48, 24, 24], -1], partition_dim=0),
        _layer("column", "gate_up_proj", shape=[2, -1], partition_dim=0),
    ],
    "viewed": [ROWS, _layer("column", "gate_up_proj", shape=[2, -1, 48], partition_dim=1)],
}


def config_of(model: str, stage: int, tp: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """A DeepSpeed config; one rank of tensor parallelism is none."""
    config: dict[str, Any] = ds_config(dtype, stage=stage, gather_16bit_weights_on_model_save=True)
    if tp > 1:
        layers = {"use_default_specs": False, "layer_specs": LAYERS.get(model)}
        custom = {"partition_config": layers} if model in LAYERS else {}
        config["tensor_parallel"] = {"autotp_size": tp, **custom}
    return config


def engine_of(folder: Path, config: dict[str, Any]) -> Any:
    # Stock transformers has no load for both: there DeepSpeed partitions what it has cut of a plain load.
    by_stock = not active_configs() and config["zero_optimization"]["stage"] == 3 and "tensor_parallel" in config
    keeps = None if by_stock else HfDeepSpeedConfig(config)
    dtype = torch.bfloat16 if config["bf16"]["enabled"] else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))
    engine.keeps = keeps
    return engine


def save_as_stock(engine: Any, folder: Path) -> None:
    values = engine._consolidated_16bit_state_dict()
    if dist.get_rank() == 0:
        if engine.module.config.tie_word_embeddings:  # it is gathered under both names, and would be saved twice
            assert torch.equal(values.pop("lm_head.weight"), values["model.embed_tokens.weight"])
        engine.module.save_pretrained(folder, state_dict=values, max_shard_size=SHARD_SIZE)
    dist.barrier()


def run_stock(checkpoint: Path, folder: Path, config: dict[str, Any], steps: int) -> list[float]:
    engine = engine_of(checkpoint, config)
    train(engine, range(steps))
    save_as_stock(engine, folder / "stock")
    engine.save_checkpoint(str(folder / "stock's state"))
    return train(engine, (3, 4)) if steps else []


def run_ours(checkpoint: Path, folder: Path, config: dict[str, Any], steps: int) -> dict[str, Any]:
    """The losses of a training, after saves of all kinds, of its own resume and of one from DeepSpeed's folder."""
    with hf_zero_stream.streaming():
        engine = engine_of(checkpoint, config)
        train(engine, range(steps))
        hf_zero_stream.save_pretrained(engine, folder / "ours", max_shard_size=SHARD_SIZE)
        hf_zero_stream.save_pretrained(engine, folder / "fp32", dtype=torch.float32)
        stream = hf_zero_stream.weight_stream(engine, to="rank0")
        streamed = {name: tensor.clone() for bucket in stream for name, tensor in bucket.tensors}
        engine.save_checkpoint(str(folder / "state"))
        found: dict[str, Any] = {"went on": train(engine, (3, 4)) if steps else []}
        for name in ("state", "stock's state"):
            engine.load_checkpoint(str(folder / name))
            found[name] = train(engine, (3, 4)) if steps else []
        found["loaded"] = [rank.bytes_needed for rank in engine.module.streaming_report.ranks]
        report = hf_zero_stream.load_into(engine, str(folder / "ours"))
        found["read"] = [rank.bytes_needed for rank in report.ranks]
        save_as_stock(engine, folder / "loaded")
    if dist.get_rank() == 0:
        found["streamed"] = differing(streamed, tensors_of(folder / "ours"))
    return found


def resume(checkpoint: Path, folder: Path, config: dict[str, Any]) -> list[float]:
    with hf_zero_stream.streaming():
        engine = engine_of(checkpoint, config)
        engine.load_checkpoint(str(folder / "state"))
        return train(engine, (3, 4))


def checkpoint_of(model: str, folder: Path) -> Path:
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(CONFIGS[model]()).save_pretrained(folder)
    return folder


BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.plugin("stream")
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("model", "stage", "dtype"),
    [
        ("plan", 1, FP32),
        ("plan", 0, FP32),
        ("plan", 0, BF16),
        ("plan", 1, BF16),
        ("plan", 2, BF16),
        ("tied", 2, FP32),
        ("tied", 1, BF16),
        ("uneven", 1, FP32),
        ("one kv head", 2, FP32),
        ("custom", 1, FP32),
        ("heuristic", 1, FP32),
        ("plan", 3, FP32),
        ("plan", 3, BF16),
        ("tied", 3, BF16),
        ("uneven", 3, FP32),
        ("custom", 3, BF16),
        ("heuristic", 3, FP32),
    ],
)
def test_trains_as_stock(cluster: None, tmp_path: Path, model: str, stage: int, dtype: torch.dtype) -> None:
    checkpoint, config = checkpoint_of(model, tmp_path / "checkpoint"), config_of(model, stage, 2, dtype)
    ranks = 4 if stage == 3 else 2
    stock = run_ranks(ranks, run_stock, checkpoint, tmp_path, config, 3)
    ours = run_ranks(ranks, run_ours, checkpoint, tmp_path, config, 3)
    for losses, found in zip(stock, ours, strict=True):
        assert found["went on"] == found["state"] == found["stock's state"] == losses
        assert len(set(losses)) == 2
    assert ours[0]["streamed"] == []
    assert _different(tmp_path / "ours", tmp_path / "stock") == []
    assert _different(tmp_path / "loaded", tmp_path / "stock") == []
    assert (tmp_path / "state" / "global_step3" / "training_state.json").exists()
    whole = sum(tensor.nbytes for tensor in tensors_of(tmp_path / "stock").values())
    if dtype == FP32 and stage > 0:
        for reads in (ours[0]["read"], ours[0]["loaded"]):
            assert max(reads) < 0.9 * whole, "each rank reads its part"
    masters = tensors_of(tmp_path / "fp32")
    for name, values in tensors_of(tmp_path / "stock").items():
        assert torch.equal(masters[name].to(values.dtype), values), name

    # At other numbers of ranks sums are rounded otherwise. At stage 3 DeepSpeed cannot train a part of which a rank
    # has no element, as of one head of two ranks.
    of_four = 2 if model == "one kv head" else {1: 1, 2: 3}.get(stage, 2)
    for world_size, tp, other in ((2, 1, 3), (4, 2, of_four), (1, 1, 2)):
        resumed = run_ranks(world_size, resume, checkpoint, tmp_path, config_of(model, other, tp, dtype))
        tolerance = 2e-2 if dtype == BF16 else 2e-5
        torch.testing.assert_close(resumed[0], stock[0], rtol=tolerance, atol=0)


def _different(folder: Path, expected: Path) -> list[str]:
    """Names of files that differ, but for the index, in which transformers counts the elements of one rank's part."""
    maps = [json.loads((place / INDEX).read_text())["weight_map"] for place in (folder, expected)]
    return [name for name in different(folder, expected) if name != INDEX or maps[0] != maps[1]]


@pytest.mark.plugin("stream")
@pytest.mark.parametrize("model", ["fused", "viewed"])
def test_fused_weights(cluster: None, tmp_path: Path, model: str) -> None:
    """DeepSpeed cuts them, and leaves it to users to have the model compute with what is left."""
    checkpoint, config = checkpoint_of(model, tmp_path / "checkpoint"), config_of(model, 1, 2)
    run_ranks(2, run_stock, checkpoint, tmp_path, config, 0)
    ours = run_ranks(2, run_ours, checkpoint, tmp_path, config, 0)
    assert ours[0]["streamed"] == []
    assert _different(tmp_path / "ours", tmp_path / "stock") == []
    assert _different(tmp_path / "loaded", tmp_path / "stock") == []


def refuse(checkpoint: Path, folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """A layout that ranks hold partly in common: refused by name, and saved by DeepSpeed."""
    with hf_zero_stream.streaming():
        engine = engine_of(checkpoint, config)
        with pytest.raises(UnsupportedError) as refused:
            hf_zero_stream.save_pretrained(engine, folder / "ours")
        engine.save_checkpoint(str(folder / "state"))
        engine.load_checkpoint(str(folder / "state"))
    return {"refused": str(refused.value)}


def test_what_is_held_in_common(cluster: None, tmp_path: Path) -> None:
    checkpoint = checkpoint_of("bigcode", tmp_path / "checkpoint")
    for found in run_ranks(2, refuse, checkpoint, tmp_path, config_of("bigcode", 1, 2)):
        assert "in common" in found["refused"] and "c_attn" in found["refused"]
    assert not (tmp_path / "ours").exists()
    assert (tmp_path / "state" / "global_step0" / "mp_rank_01_model_states.pt").exists()


def inside_zero_init(checkpoint: Path, config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """There each parameter is partitioned over all ranks, and DeepSpeed gathers those that it cuts."""
    keeps = HfDeepSpeedConfig(config)
    with hf_zero_stream.streaming():
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
        engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))
        hf_zero_stream.save_pretrained(engine, folder / "ours")
        found = {"losses": train(engine, range(2))}
        # As an engine would be whose parts are partitioned over ranks that have others.
        engine.module.model.layers[0].mlp.up_proj.weight.ds_process_group = dist.group.WORLD
        with pytest.raises(UnsupportedError, match="up_proj.weight: .* ranks that have other parts of it"):
            hf_zero_stream.save_pretrained(engine, folder / "refused")
    del keeps
    return found


def test_inside_zero_init(cluster: None, tmp_path: Path) -> None:
    checkpoint, config = checkpoint_of("plan", tmp_path / "checkpoint"), config_of("plan", 3, 2)
    first, *others = run_ranks(4, inside_zero_init, checkpoint, config, tmp_path)
    assert all(found == first for found in others) and not (tmp_path / "refused").exists()
    assert differing(tensors_of(tmp_path / "ours"), tensors_of(checkpoint)) == []


def with_trainer(checkpoint: Path, folder: Path, stage: int, how: str) -> dict[str, Any]:
    """Four steps with a checkpoint after two, `save_model`, and the last two steps again from the checkpoint."""
    join_as_launched()
    config = config_of("plan", stage, 2)
    del config["optimizer"]
    data = [{"input_ids": row, "labels": row} for row in torch.arange(6, 6 + 8 * 9).view(8, 9)]

    def trainer(**changes: Any) -> Any:
        arguments = arguments_of(folder / how, deepspeed=config, max_steps=4, use_cpu=True, **changes)
        AcceleratorState._reset_state()
        model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
        return transformers.Trainer(model=model, args=arguments, train_dataset=data)

    with hf_zero_stream.streaming() if how == "ours" else nullcontext():
        first = trainer(save_strategy="steps", save_steps=2)
        first.train()
        first.save_model(str(folder / how / "model"))
        second = trainer(save_strategy="no")
        second.train(resume_from_checkpoint=str(folder / how / "checkpoint-2"))
    return {"first": losses_of(first), "second": losses_of(second)[-2:]}


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_trainer(cluster: None, tmp_path: Path, stage: int) -> None:
    """Stock's Trainer has no load for stage 3, whose losses are those of stage 1."""
    checkpoint = checkpoint_of("plan", tmp_path / "checkpoint")
    stock = run_ranks(2, with_trainer, checkpoint, tmp_path, min(stage, 1), "stock")
    ours = run_ranks(2, with_trainer, checkpoint, tmp_path, stage, "ours")
    assert [found["first"] for found in ours] == [found["first"] for found in stock]
    assert [found["second"] for found in ours] == [found["first"][-2:] for found in stock]
    for name in ("model", "checkpoint-2"):
        mine, theirs = tensors_of(tmp_path / "ours" / name), tensors_of(tmp_path / "stock" / name)
        assert mine.keys() == theirs.keys()
        tolerance = {"rtol": 1e-5, "atol": 1e-5} if stage == 3 else {"rtol": 0, "atol": 0}
        for key, values in theirs.items():
            torch.testing.assert_close(mine[key], values, **tolerance)
    assert (tmp_path / "ours" / "checkpoint-2" / "global_step2" / "training_state.json").exists()
