"""What ranks run to train from one home of the partitions with streaming and with stock, and a checkpoint for it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import transformers
from torch import nn

from tests.support.cluster import run_ranks
from tests.support.parity import differences, load_with, three_losses
from tests.support.zoo import ZOO


CAUSAL = "AutoModelForCausalLM"
OFFLOAD = {"offload_param": {"device": "cpu", "pin_memory": True}}
HPZ = {"zero_hpz_partition_size": 2}

Prepare = Callable[[nn.Module], nn.Module]
"""What a user does to a model between loading it and training it."""


def unchanged(model: nn.Module) -> nn.Module:
    return model


def train(how: str, folder: Path, config: dict[str, Any], prepare: Prepare = unchanged) -> dict[str, Any]:
    """Load `folder`, compare a streamed model with a plain one, let `prepare` change it, and train three steps."""
    dtype = torch.bfloat16 if config["bf16"]["enabled"] else torch.float32
    # Before the other one: a streamed model keeps ZeRO-3 on.
    plain = load_with("plain", CAUSAL, folder, {}, {"dtype": dtype})
    model = load_with(how, CAUSAL, folder, config, {"dtype": dtype})
    found: dict[str, Any] = {}
    if how == "streamed":
        rank = model.streaming_report.to_dict()["ranks"][torch.distributed.get_rank()]
        found["bytes needed"] = rank["bytes_needed"]
        found["second copies"] = sum(param.ds_secondary_tensor is not None for param in model.parameters())
        found["differences"] = differences(model, plain, dtype)
    torch.manual_seed(1)
    model = prepare(model)
    trained = [param for param in model.parameters() if param.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=trained)
    return {**found, "losses": three_losses(engine, ZOO["llama"].inputs)}


def assert_trains_as_stock(
    world_size: int, folder: Path, config: dict[str, Any], prepare: Prepare = unchanged, run: Any = train
) -> list[dict[str, Any]]:
    """Returns what the streamed run found on each rank; `run` is `train`, or something around it."""
    streamed = run_ranks(world_size, run, "streamed", folder, config, prepare)
    stock = run_ranks(world_size, run, "stock", folder, config, prepare)
    assert [rank["differences"] for rank in streamed] == [[]] * world_size
    assert [rank["losses"] for rank in streamed] == [rank["losses"] for rank in stock]
    assert len(set(streamed[0]["losses"])) == 3, "three steps must change the loss"
    return streamed


def make_even_llama(folder: Path, vocab_size: int = 320) -> Path:
    """A Llama with partitions of a multiple of 8 elements at 2 and 4 ranks, and with an even number of heads."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder
