"""Adapters trained on a base that stays in its files are bit for bit those that are trained on it in memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from benchmarks.moe_checkpoint import make_moe_checkpoint
from hf_zero_stream.plugins.from_files import arena
from tests.from_files.trainings import EXPERTS, adapted, config_for, digest, engine_of, load, measured, steps, train
from tests.support.cluster import run_ranks
from tests.support.quantised_checkpoints import bitsandbytes, fp8, mxfp4


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE of 40 MB in bf16, with a tensor for each expert in its four shards."""
    return make_moe_checkpoint(tmp_path_factory.mktemp("moe"), 4e7, num_layers=4, num_experts=8)


MIB = 2**20

TRAININGS: dict[str, Any] = {
    "attention": {},
    "experts": {"adapters": {"parameters": EXPERTS}},
    "no checkpointing": {"adapters": {"checkpointing": False}},
}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("how", [*TRAININGS])
def test_losses_and_adapters_are_those_in_memory(cluster: None, mixture: Path, world_size: int, how: str) -> None:
    from_files = run_ranks(world_size, train, mixture, "files", 6, TRAININGS[how])
    assert from_files == run_ranks(world_size, train, mixture, "memory", 6, TRAININGS[how])
    assert len({*from_files[0][0]}) == 6


def train_one_weight(folder: Path, frozen_weights: str, checkpointing: bool) -> tuple[list[float], str]:
    """A training of one fused weight of the first layer, whose inputs need no gradients; or the error."""
    config = config_for()
    model = load(folder, config, frozen_weights)
    model.requires_grad_(False)
    model.get_parameter("model.layers.0.mlp.experts.gate_up_proj").requires_grad_(True)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    engine = engine_of(model, config)
    try:
        return [*steps(engine, 4)], digest(model)
    except RuntimeError as error:
        return [], str(error)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("checkpointing", [True, False], ids=["checkpointing", "no checkpointing"])
def test_one_expert_weight_is_trained_as_in_memory(
    cluster: None, mixture: Path, world_size: int, checkpointing: bool
) -> None:
    """Without checkpointing DeepSpeed lets go of it before its gradient is there, and torch says so, in memory too."""
    from_files = run_ranks(world_size, train_one_weight, mixture, "files", checkpointing)
    assert from_files == run_ranks(world_size, train_one_weight, mixture, "memory", checkpointing)
    assert all(bool(losses) == checkpointing for losses, _ in from_files)


BESIDE: dict[str, Any] = {"persists": {"zero": {"stage3_param_persistence_threshold": 3000}}, "tied, in fp32": {}}


@pytest.mark.parametrize("how", [*BESIDE])
def test_small_tied_and_cast_weights(cluster: None, mixture: Path, tmp_path: Path, how: str) -> None:
    """Parameters that are kept in full beside others in files; one with two names; files of another dtype."""
    if how != "persists":
        config = transformers.LlamaConfig(
            vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4
        )
        config.tie_word_embeddings = True
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path, max_shard_size="200KB")
        mixture = tmp_path
    from_files = run_ranks(2, train, mixture, "files", 4, BESIDE[how])
    assert from_files == run_ranks(2, train, mixture, "memory", 4, BESIDE[how])


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_twenty_steps(cluster: None, mixture: Path, world_size: int) -> None:
    """With adapters on attention and experts, and an arena that all layers pass through."""
    how = {"adapters": {"parameters": EXPERTS}, "settings": {"frozen_bytes": 12 * MIB // world_size}}
    from_files = run_ranks(world_size, train, mixture, "files", 20, how, timeout=300)
    assert from_files == run_ranks(world_size, train, mixture, "memory", 20, how, timeout=300)


PACKED: dict[str, Any] = {
    "mxfp4": (mxfp4, {}),
    "fp8": (fp8, {"adapters": {"modules": ("o_proj",)}}),
    "nf4": (lambda folder: bitsandbytes(folder, "nf4"), {}),
    "experts in mxfp4": (mxfp4, {"adapters": {"parameters": EXPERTS}}),
}


def places(folder: Path) -> str:
    return load(folder, config_for(), "files").streaming_report.into


QUICK = [*((kind, 2, 4) for kind in PACKED), ("nf4", 1, 4)]
LONG = [pytest.param(kind, count, 20, marks=pytest.mark.slow) for kind in PACKED for count in (1, 2, 3)]


@pytest.mark.plugin("packed")
@pytest.mark.parametrize(("kind", "world_size", "steps"), [*QUICK, *LONG])
def test_packed_weights_stay_in_files(cluster: None, tmp_path: Path, kind: str, world_size: int, steps: int) -> None:
    make, how = PACKED[kind]
    make(tmp_path)
    for into in run_ranks(world_size, places, tmp_path):
        assert "stay in files" in into and "whose values no file has" not in into
    from_files = run_ranks(world_size, train, tmp_path, "files", steps, how, timeout=300)
    assert from_files == run_ranks(world_size, train, tmp_path, "memory", steps, how, timeout=300)


def quantised_while_loading(folder: Path, frozen_weights: str) -> tuple[list[float], str]:
    config, nf4 = config_for(), transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = load(folder, config, frozen_weights, quantization_config=nf4)
    into = model.streaming_report.into
    return [*steps(engine_of(adapted(model), config), 3)], into


@pytest.mark.plugin("packed")
def test_what_is_quantised_while_it_is_loaded_stays_in_memory(cluster: None, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    ((from_files, into),) = run_ranks(1, quantised_while_loading, tmp_path, "files")
    ((in_memory, _),) = run_ranks(1, quantised_while_loading, tmp_path, "memory")
    assert from_files == in_memory and "whose values no file has, in memory" in into


def without_references(folder: Path) -> tuple[list[float], str]:
    """A training whose arena takes parts again that autograd still refers to: all of it is one part."""

    def take(self: arena.Arena, nbytes: int) -> torch.Tensor:
        at = self.taken = (getattr(self, "taken", 0) + nbytes) % max(1, self.nbytes - nbytes)
        return self._memory[at // 256 * 256 :][:nbytes]

    arena.Arena.take = take  # type: ignore[method-assign]
    return train(folder, "files", 4, {"adapters": {"checkpointing": False}})


def test_memory_that_is_taken_again_too_early_gives_other_losses(cluster: None, mixture: Path) -> None:
    """On one rank, without checkpointing: so the row above shows that it is not."""
    early = run_ranks(1, without_references, mixture)
    assert early != run_ranks(1, train, mixture, "memory", 4, {"adapters": {"checkpointing": False}})


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_reads_its_weights_twice_at_most(cluster: None, mixture: Path, world_size: int) -> None:
    """By what the kernel counts, of all ranks."""
    ranks = run_ranks(world_size, measured, mixture, {"settings": {"frozen_bytes": 12 * MIB // world_size}})
    of_steps = [sum(of_step) for of_step in zip(*(multiples for multiples, *_ in ranks), strict=True)]
    assert all(1.2 < multiple <= 2.0 for multiple in of_steps), of_steps
