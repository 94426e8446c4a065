"""Models without a checkpoint: initialised parameter by parameter, with rank 0's random numbers, on no rank whole."""

from contextlib import nullcontext
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import transformers
from transformers.distributed import DistributedConfig
from transformers.integrations import HfDeepSpeedConfig

import hf_zero_stream
from hf_zero_stream.holdings.deepspeed.partitions import own_range
from hf_zero_stream.reports.measures import AnonymousMemory
from tests.support.cluster import run_ranks
from tests.support.parity import ds_config, whole_values


SIZES: dict[str, Any] = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
LARGE = {**SIZES, "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12}
"""200 MB, of which the largest parameter has 8."""


def config_of(sizes: dict[str, Any]) -> Any:
    return transformers.LlamaConfig(**sizes)


def zero3(how: str, sizes: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """What this rank holds of each parameter, all of it, and what it draws next."""
    keeps = HfDeepSpeedConfig(ds_config(dtype))
    torch.manual_seed(3 + dist.get_rank())
    with hf_zero_stream.streaming() if how == "ours" else nullcontext():
        model = transformers.AutoModelForCausalLM.from_config(config_of(sizes), dtype=dtype)
    del keeps
    held = {}
    for name, param in model.named_parameters():
        _, start, stop = own_range(param)
        held[name] = param.ds_tensor[: stop - start].clone()
    return {"held": held, "drawn": torch.rand(4), "whole": whole_values(model)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero3_is_stocks(cluster: None, dtype: torch.dtype) -> None:
    """Bit for bit, with the random numbers that follow; at any number of ranks the same model."""
    stock, ours = (run_ranks(2, zero3, how, SIZES, dtype) for how in ("stock", "ours"))
    for expected, found in zip(stock, ours, strict=True):
        assert all(torch.equal(found["held"][name], part) for name, part in expected["held"].items())
        assert torch.equal(found["drawn"], expected["drawn"])
    (alone,) = run_ranks(1, zero3, "ours", SIZES, dtype)
    assert all(torch.equal(alone["whole"][name], values) for name, values in ours[0]["whole"].items())


def fsdp2(sizes: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(3 + dist.get_rank())
    memory = AnonymousMemory()
    with memory, hf_zero_stream.streaming():
        model = transformers.LlamaForCausalLM.from_pretrained(
            None,
            config=config_of(sizes),
            state_dict={},
            distributed_config=DistributedConfig(fsdp_size=dist.get_world_size()),
        )
        memory.sample()
    params = dict(model.named_parameters())
    found = {"grown": memory.growth_peak, "size": sum(param.nbytes for param in params.values())}
    return found | {"whole": {name: param.full_tensor() for name, param in params.items()} if sizes == SIZES else {}}


def plain(sizes: dict[str, Any]) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM.from_pretrained(None, config=config_of(sizes), state_dict={})
    return {name: param.detach() for name, param in model.named_parameters()}


def test_fsdp2_is_a_plain_model(cluster: None) -> None:
    """Of the seed that rank 0 has, cut."""
    expected = plain(SIZES)
    for ranks in (2, 3):
        for found in run_ranks(ranks, fsdp2, SIZES):
            assert all(torch.equal(found["whole"][name], values) for name, values in expected.items())


def test_fsdp2_is_on_no_rank_whole(cluster: None) -> None:
    for found in run_ranks(4, fsdp2, LARGE):
        assert found["grown"] < 0.6 * found["size"], found["grown"]


def prebuilt(sizes: dict[str, Any]) -> dict[str, Any]:
    """A model that exists is partitioned by DeepSpeed's own way, also inside ``streaming()``."""
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(config_of(sizes))
    expected = {name: param.detach().clone() for name, param in model.named_parameters()}
    with hf_zero_stream.streaming():
        deepspeed.zero.Init(module=model, config_dict_or_path=ds_config())
    values = whole_values(model)
    return {"same": all(torch.equal(values[name], it) for name, it in expected.items())}


def test_prebuilt(cluster: None) -> None:
    assert all(found["same"] for found in run_ranks(2, prebuilt, SIZES))
