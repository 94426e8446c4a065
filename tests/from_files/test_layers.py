"""Micro-batches that each layer takes of a batch while its weights are there."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import transformers

from hf_zero_stream.errors import ConfigError, UnsupportedError
from hf_zero_stream.plugins.from_files import layers
from hf_zero_stream.plugins.from_files.engine import lines_for_checkpointing
from hf_zero_stream.plugins.from_files.layers import split_in_layers
from tests.from_files.test_training import mixture as mixture
from tests.from_files.trainings import (
    EXPERTS,
    adapted,
    config_for,
    digest,
    engine_of,
    frozen_bytes,
    load,
    steps,
    swapper_of,
)
from tests.support.cluster import run_ranks


COUNT = 4


def begun(folder: Path, frozen_weights: str, parameters: Any = (), **settings: Any) -> Any:
    """An engine with adapters, whose layers take micro-batches."""
    config = {**config_for(), "train_micro_batch_size_per_gpu": COUNT}
    if frozen_weights == "files":
        settings = {"micro_batches_in_layers": COUNT, **settings}
    model = adapted(load(folder, config, frozen_weights, **settings), parameters=parameters, checkpointing=False)
    model.enable_input_require_grads()
    if frozen_weights == "memory":
        split_in_layers(model, COUNT)
    return engine_of(model, config)


def in_layers(folder: Path, frozen_weights: str, parameters: Any) -> tuple[list[float], str]:
    engine = begun(folder, frozen_weights, parameters)
    return [*steps(engine, 5, batch=COUNT)], digest(engine.module)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("parameters", [(), EXPERTS], ids=["attention", "experts"])
def test_losses_and_adapters_are_those_in_memory(
    cluster: None, mixture: Path, world_size: int, parameters: Any
) -> None:
    from_files = run_ranks(world_size, in_layers, mixture, "files", parameters)
    assert from_files == run_ranks(world_size, in_layers, mixture, "memory", parameters)
    assert len({*from_files[0][0]}) == 5


def read_in_steps(folder: Path) -> list[float]:
    """How many times the frozen bytes each step has read, over all ranks."""
    engine = begun(folder, "files")
    frozen, before, found = frozen_bytes(engine.module), 0.0, []
    for _ in steps(engine, 4, batch=COUNT):
        total = torch.tensor(swapper_of(engine.module).bytes_read, dtype=torch.float64)
        dist.all_reduce(total)
        found.append((total.item() - before) / frozen)
        before = total.item()
    return found


def accumulated(folder: Path) -> list[float]:
    """Losses of steps over the same samples by accumulation of gradients, in memory."""
    config = {**config_for(), "gradient_accumulation_steps": COUNT}
    model = adapted(load(folder, config, "memory"))
    engine, losses = engine_of(model, config), []
    for step in range(5):
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        samples = torch.randint(0, model.config.vocab_size, (COUNT, 16), generator=generator)
        loss = 0.0
        for ids in samples.split(1):
            part = engine(input_ids=ids, labels=ids).loss
            engine.backward(part)
            engine.step()
            loss += part.item() / COUNT
        losses.append(loss)
    return losses


@pytest.mark.slow
def test_a_step_reads_twice(cluster: None, mixture: Path) -> None:
    """Whatever the number of micro-batches; accumulation reads twice for each, and has the same losses nearly."""
    for found in run_ranks(2, read_in_steps, mixture):
        assert max(found) <= 2.0 and min(found) > 1.0
    of_ranks = run_ranks(2, in_layers, mixture, "files", ())
    for (losses, _), expected in zip(of_ranks, run_ranks(2, accumulated, mixture), strict=True):
        assert losses[0] == pytest.approx(expected[0], abs=1e-5)
        assert losses == pytest.approx(expected, abs=6e-3)  # in bf16, with sums in another order


def evaluated(folder: Path) -> tuple[int, int]:
    engine = begun(folder, "files")
    engine.eval()
    ids = torch.arange(3 * 7).view(3, 7) % engine.module.config.vocab_size
    with torch.no_grad():
        return tuple(engine(input_ids=ids).logits.shape[:2])


def refused_settings(folder: Path) -> None:
    with pytest.raises(ConfigError, match='frozen_weights="files"'):
        load(folder, config_for(), "memory", micro_batches_in_layers=2)
    config = config_for()
    model: Any = load(folder, config, "files", micro_batches_in_layers=2)
    model.config.output_router_logits = True
    with pytest.raises(UnsupportedError, match="output_router_logits"):
        engine_of(adapted(model), config)


def test_other_batches(cluster: None, mixture: Path) -> None:
    """In evaluation a batch is whole."""
    assert run_ranks(2, evaluated, mixture) == [(3, 7), (3, 7)]
    run_ranks(2, refused_settings, mixture)


SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
LLAMA = transformers.LlamaConfig(**SIZES, intermediate_size=64, num_attention_heads=4, initializer_range=0.3)
MPT = transformers.MptConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=8, expansion_ratio=2, max_seq_len=32)
BLOOM = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)


TOWER = transformers.CLIPVisionConfig(
    hidden_size=32, num_hidden_layers=2, intermediate_size=64, num_attention_heads=2, image_size=16, patch_size=8
)
LLAVA = transformers.LlavaConfig(vision_config=TOWER, text_config=LLAMA, image_token_index=63, vision_feature_layer=-1)


def losses(config: Any, batch: int, *, splits: bool, images: int = 0) -> list[float]:
    """Of three steps of a small model in fp32, whose batches have padding."""
    torch.manual_seed(0)
    auto = transformers.AutoModelForImageTextToText if images else transformers.AutoModelForCausalLM
    model: Any = auto.from_config(config).train()
    if splits:
        split_in_layers(model, COUNT)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.5), []
    mask = torch.ones(batch, 12, dtype=torch.long)
    mask[0, :5] = 0
    for _ in range(3):
        ids = torch.randint(0, 63, (batch, 12))
        ids[:images, 6:10] = 63
        pixels = {"pixel_values": torch.randn(images, 3, 16, 16)} if images else {}
        loss = model(input_ids=ids, attention_mask=mask, labels=ids, **pixels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("use_cache", [True, False])
def test_micro_batches_do_not_see_the_keys_of_others(use_cache: bool) -> None:
    config = transformers.LlamaConfig(**{**LLAMA.to_dict(), "use_cache": use_cache})
    assert losses(config, 8, splits=True) == pytest.approx(losses(config, 8, splits=False), abs=1e-4)


@pytest.mark.parametrize("batch", [COUNT + 1, COUNT - 1])
def test_batches_that_are_no_multiple(batch: int, caplog: pytest.LogCaptureFixture) -> None:
    """As the last one of an epoch: parts differ by a sample, and a batch too small for all of them is told."""
    layers._warn_of_small_batch.cache_clear()
    assert losses(LLAMA, batch, splits=True) == pytest.approx(losses(LLAMA, batch, splits=False), abs=1e-4)
    assert ("got a batch of 3" in caplog.text) == (batch < COUNT)


@pytest.mark.parametrize("images", [5, 2])
def test_a_tower_has_as_many_samples_as_there_are_images(images: int) -> None:
    whole, parts = (losses(LLAVA, 2 * COUNT, splits=splits, images=images) for splits in (False, True))
    assert parts == pytest.approx(whole, abs=1e-4)


def test_arguments_of_heads_are_not_taken_for_those_of_samples() -> None:
    """A bias for each head is like one for each sample where there are as many; BLOOM has both in one dimension."""
    assert losses(MPT, 4, splits=True) == pytest.approx(losses(MPT, 4, splits=False), abs=1e-4)
    for config, batch in ((MPT, 8), (BLOOM, 4)):
        with pytest.raises(UnsupportedError, match=r"micro_batches_in_layers: (position_bias|alibi) of shape"):
            losses(config, batch, splits=True)


def test_keys_of_a_prefix_are_not_left_out() -> None:
    prefix = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model: Any = peft.get_peft_model(transformers.LlamaForCausalLM(LLAMA), prefix).train()
    split_in_layers(model, COUNT)
    ids = torch.randint(0, 64, (COUNT, 12))
    with pytest.raises(UnsupportedError, match="prefix tuning"):
        model(input_ids=ids, labels=ids)


def test_layers_that_are_split_are_checkpointed() -> None:
    """In train mode alone; the advice for another mode is that of layers of transformers."""
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    model = transformers.LlamaForCausalLM(config)
    split_in_layers(model, 2)
    assert lines_for_checkpointing(model.train()) == []
    assert lines_for_checkpointing(model.eval()) == ["model.train()"]
