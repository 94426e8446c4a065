"""A load leaves each rank the random numbers that its reference leaves: stock's, or under ZeRO-3 a plain load's."""

import gc
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import transformers
from transformers.integrations import HfDeepSpeedConfig

import hf_zero_stream
from tests.support.cluster import run_ranks
from tests.support.fsdp2 import announce, count_lazy, make_accelerator
from tests.support.parity import ds_config
from tests.support.whole import whole_values
from tests.support.zoo import Checkpoint
from tests.sweep.loads import generators


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    numpy.random.seed(number)


def under_fsdp2(folder: Path, streams: bool, efficient: bool) -> list[str]:
    """The generators after loads of a model that lacks a head, and of one that lacks nothing."""
    announce(cpu_ram_efficient_loading=efficient)
    make_accelerator()
    found = []
    for name in ("AutoModelForSequenceClassification", "AutoModelForCausalLM"):
        for first in (5, 5 + dist.get_rank()):
            seed(first)
            with hf_zero_stream.streaming() if streams else nullcontext():
                model = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32)
            assert (count_lazy(model) > 0) == streams
            found.append(generators())
    return found


@pytest.mark.parametrize("efficient", [True, False])
def test_as_stock_under_fsdp2(cluster: None, zoo_checkpoint: Checkpoint, efficient: bool) -> None:
    """With efficient loading stock draws on the first rank of a host alone."""
    stock, ours = (run_ranks(2, under_fsdp2, zoo_checkpoint("llama"), streams, efficient) for streams in (False, True))
    assert ours == stock
    has_drawn = [of_rank[0] != of_rank[2] for of_rank in stock]
    assert has_drawn == [True, not efficient]


def under_zero3(folder: Path) -> list[Any]:
    """Generators and the new head after a plain load, ours, stock's, and ours as stock's.

    The model's ``__init__`` calls ``torch.randn``.
    """
    as_stock = hf_zero_stream.StreamingConfig(random_numbers="stock")
    found = []
    for is_zero3, block in (
        (False, nullcontext()),
        (True, hf_zero_stream.streaming()),
        (True, nullcontext()),
        (True, hf_zero_stream.streaming(as_stock)),
    ):
        config = HfDeepSpeedConfig(ds_config(torch.float32)) if is_zero3 else None
        seed(5)
        before = generators()
        with block:
            model = transformers.ViTForImageClassification.from_pretrained(folder, dtype=torch.float32)
        assert generators() != before, "the head is new"
        found.append((generators(), whole_values(model)["classifier.weight"].tolist()))
        del model, config
        gc.collect()
    return found


def test_as_a_plain_load_under_zero3(cluster: None, tmp_path: Path) -> None:
    """Or, if it is asked for, as stock's under ZeRO-3, which draws more."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8)
    transformers.ViTModel(config).save_pretrained(tmp_path)
    for plain, ours, stock, as_stock in run_ranks(2, under_zero3, tmp_path):
        assert ours == plain and as_stock == stock != plain
