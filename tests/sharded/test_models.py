"""Models of unusual kinds loaded into shards, and faults in the middle of a load.

- Models and checkpoints of unusual kinds, loaded into shards, equal plain loading, as they do under ZeRO-3.
- Faults in the middle of a load into shards: all ranks raise, nobody hangs, and the next load succeeds.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import conversion_mapping
from transformers.core_model_loading import WeightConverter

import hf_zero_stream
from hf_zero_stream.holdings import fsdp
from tests import sampling
from tests.faults import test_one_faulty_rank
from tests.faults.test_one_faulty_rank import (
    Fault,
    fail_then_load,
    interrupted,
    io_error,
    no_memory_while_reading,
    replaced,
    truncated,
)
from tests.loading.test_odd_parameters import CLASSES, MISSING, ThroughNumpy, name_of, save, without
from tests.loading.test_remote_code import with_own_module_cache
from tests.sharded.test_load_into_sharded import with_both_ends
from tests.support import deaths, odd_models
from tests.support.cluster import run_ranks, run_ranks_expecting_errors
from tests.support.deaths import kill_in_first_read, load_with_a_victim
from tests.support.messages import error_of, message_of
from tests.support.odd_models import Odd
from tests.support.parity import ds_config
from tests.support.remote_code import make_remote_checkpoint
from tests.support.sharded import Case, Sizes, compare_sharded, even_model, wrong_cases
from tests.support.zoo import Checkpoint


CAUSAL = "AutoModelForCausalLM"

SCALARS = (odd_models.ParameterLists, odd_models.Scalars)
"""``fully_shard`` refuses them, in stock too; and a model whose root has a parameter that is kept in fp32."""

OF_FSDP = {"fsdp_size": 2, "fsdp_plan": {"first": "free_full_weight"}}
OF_TP = {"tp_size": 2, "tp_plan": {"first": "colwise"}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.sample(1)
def test_odd_models(cluster: None, tmp_path: Path, dtype: torch.dtype) -> None:
    """What is kept in fp32 is in fp32, as in plain loading."""
    cases: dict[str, Case] = {}
    for each in CLASSES:
        cases[each.__name__] = (name_of(each), save(each, tmp_path / each.__name__, dtype), {"dtype": dtype})
    refused = [*SCALARS, odd_models.KeepsFp32Strictly] if dtype != torch.float32 else SCALARS
    sharded = {name: case for name, case in cases.items() if name not in [each.__name__ for each in refused]}
    assert run_ranks(2, wrong_cases, sharded, [OF_FSDP]) == [{}, {}]
    assert run_ranks(2, wrong_cases, dict(sampling.every(3, cases.items())), [OF_TP]) == [{}, {}]


@pytest.mark.slow
def test_missing_ones_are_initialised_as_in_plain_loading(cluster: None, tmp_path: Path) -> None:
    cases: dict[str, Case] = {}
    for each, names in MISSING.items():
        if each not in SCALARS:
            name = f"tests.loading.test_odd_parameters:{each.__name__}Initialised"
            cases[each.__name__] = (name, without(save(each, tmp_path / each.__name__), *names), {})
    assert len(cases) > 5
    assert run_ranks(2, wrong_cases, cases, [OF_FSDP, OF_TP]) == [{}, {}]
    assert run_ranks(4, wrong_cases, cases, [{**OF_FSDP, "dp_replicate_size": 2}, OF_FSDP | OF_TP]) == [{}] * 4


class Doubling(Odd):
    """Its initialisation computes with loaded values, which it does not ask about."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.mul_(2)
            module.bias.data.zero_()


def test_initialisation_of_what_will_be_tied(cluster: None, tmp_path: Path) -> None:
    """Funnel's initialisation looks at the sizes of all weights."""
    sizes = {"d_model": 8, "n_head": 2, "d_head": 4, "d_inner": 16, "block_sizes": [1, 1], "vocab_size": 32}
    transformers.FunnelForMaskedLM(transformers.FunnelConfig(**sizes)).save_pretrained(tmp_path)
    cases: dict[str, Case] = {"funnel": ("AutoModelForMaskedLM", tmp_path, {})}
    assert run_ranks(2, wrong_cases, cases, [{"fsdp_size": 2}]) == [{}] * 2


def test_initialisation_of_loaded_values(cluster: None, tmp_path: Path) -> None:
    """Where several ranks hold the same, one of them counts."""
    folder = without(save(Doubling, tmp_path), "first.bias", "second.bias")
    cases: dict[str, Case] = {"doubling": (f"{__name__}:Doubling", folder, {})}
    of_sizes = [OF_FSDP | OF_TP, {**OF_FSDP, "dp_replicate_size": 2}]
    assert run_ranks(4, wrong_cases, cases, of_sizes) == [{}] * 4


@pytest.mark.slow
def test_remote_code(cluster: None, tmp_path: Path) -> None:
    """Its ``_init_weights`` writes to all of a module's parameters, loaded ones too; so does plain loading."""
    plan = {"model.layers.*": "free_full_weight"}
    cases: dict[str, Case] = {}
    for names in ((), ("model.layers.1.up.bias",), ("model.scale",), ("lm_head.weight", "model.layers.0.norm.weight")):
        folder = make_remote_checkpoint(tmp_path / "+".join(names or ["whole"]), names)
        cases[str(names)] = (CAUSAL, folder, {"trust_remote_code": True})
    of_sizes = [{"fsdp_size": 2, "fsdp_plan": plan}, {"tp_size": 2, "tp_plan": {"model.layers.*.up": "colwise"}}]
    assert run_ranks(2, with_own_module_cache, tmp_path, wrong_cases, cases, of_sizes) == [{}, {}]


# ---------------------------------------------------------------------------------------------------------- an op


def load_with_op(folder: Path, of_sizes: list[Sizes]) -> dict[str, Any]:
    mapping: list[Any] = [WeightConverter("first.weight", "first.weight", [ThroughNumpy()])]
    conversion_mapping.register_checkpoint_conversion_mapping("Odd", mapping)
    return wrong_cases({"through numpy": ("tests.support.odd_models:Odd", folder, {})}, of_sizes)


def test_an_op_that_gives_values(cluster: None, tmp_path: Path) -> None:
    assert run_ranks(2, load_with_op, save(Odd, tmp_path), [OF_FSDP, OF_TP]) == [{}, {}]


# ---------------------------------------------------------------------------------------------------------------- ties


def test_both_ends_of_a_tie(cluster: None, tmp_path: Path) -> None:
    """Of equal values they are tied, of different ones not."""
    cases: dict[str, Case] = {
        name: (CAUSAL, with_both_ends(tmp_path / name, difference), {})
        for name, difference in (("same", 0.0), ("different", 1.0))
    }
    assert run_ranks(2, wrong_cases, cases, [{"fsdp_size": 2}, {"tp_size": 2}]) == [{}, {}]


def test_a_tie_that_the_model_made_itself(cluster: None, tmp_path: Path) -> None:
    """FSDP2 would compute with one end in both places, so that is an error."""
    folder = save(odd_models.TwoNames, tmp_path)
    values = load_file(folder / "model.safetensors")
    values["second_scale"] = values["scale"] + 1
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
    for found in run_ranks(2, wrong_cases, {"scale": (name_of(odd_models.TwoNames), folder, {})}, [OF_FSDP]):
        (message,) = found.values()
        assert message.startswith("UnsupportedError: The config ties scale and second_scale")


def test_a_tie_of_which_one_end_is_cut(cluster: None, tmp_path: Path) -> None:
    """By LFM2's own plan the head is. Stock's forward pass raises under FSDP2; else it has other logits."""
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.Lfm2Config(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=64,
        block_multiple_of=8,
        layer_types=["conv", "full_attention"],
        **sizes,
    )
    transformers.Lfm2ForCausalLM(config).save_pretrained(tmp_path)
    cases: dict[str, Case] = {"lfm2": (CAUSAL, tmp_path, {})}
    of_worlds: dict[int, list[Sizes]] = {
        2: [{"tp_size": 2}],
        4: [{"fsdp_size": 2, "tp_size": 2}, {"dp_replicate_size": 2, "tp_size": 2}],
    }
    both = {"tp_plan": {"model.embed_tokens": "embedding_rowwise"}}
    for world_size, apart in of_worlds.items():
        for found in run_ranks(world_size, wrong_cases, cases, apart):
            assert len(found) == len(apart)
            for message in found.values():
                assert message.startswith(
                    "UnsupportedError: The config ties model.embed_tokens.weight and lm_head.weight"
                )
        assert run_ranks(world_size, wrong_cases, cases, [each | both for each in apart]) == [{}] * world_size


# --------------------------------------------------------------------------------------------- settings of the stream


def load_verified(folder: Path, of_sizes: list[Sizes], read_from: str) -> list[Any]:
    """The digests at every sharding, and what is wrong."""
    config = hf_zero_stream.StreamingConfig(verify="full", read_from=read_from, strict=True)
    found = []
    with hf_zero_stream.streaming(config):
        for sizes in of_sizes:
            (result,) = compare_sharded(CAUSAL, folder, [sizes])
            found.append((result["digest"], result["differences"]))
    return found


def digest_of_one_rank(folder: Path) -> str:
    config = hf_zero_stream.StreamingConfig(verify="full")
    with hf_zero_stream.streaming(config):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, ds_config=ds_config())
    return str(model.streaming_report.digest)


@pytest.mark.plugin("verify")
@pytest.mark.parametrize("read_from", ["all", pytest.param("rank0", marks=pytest.mark.plugin("relay"))])
@pytest.mark.sample(1)
def test_digests(cluster: None, tmp_path: Path, read_from: str) -> None:
    """That of one rank's load: replicas count once."""
    even_model("qwen3_moe").save_pretrained(tmp_path, max_shard_size="60KB")
    digest, *_ = run_ranks(1, digest_of_one_rank, tmp_path)
    worlds: list[tuple[int, list[Sizes]]] = [
        (2, [{"fsdp_size": 2}, {"tp_size": 2}, {"fsdp_size": 2, "ep_size": 2}]),
        (4, [{"dp_replicate_size": 2, "fsdp_size": 2}, {"fsdp_size": 2, "tp_size": 2}]),
    ]
    for world_size, of_sizes in sampling.every(2, worlds):
        for found in run_ranks(world_size, load_verified, tmp_path, of_sizes, read_from):
            assert found == [(digest, [])] * len(of_sizes)


def load(folder: Path, *args: Any, **settings: Any) -> Any:
    config = hf_zero_stream.StreamingConfig(reader_threads=2, staging_bytes=8 * 4096, **settings)
    with hf_zero_stream.streaming(config):
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, distributed_config={"fsdp_size": dist.get_world_size()}
        )


def no_memory(folder: Path) -> Any:
    """As torch's allocator on a CPU says it, for the storage that FSDP2 owns."""

    class Torch:
        def __getattr__(self, name: str) -> Any:
            return empty if name == "empty" else getattr(torch, name)

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory")

    return replaced(fsdp, "torch", Torch())


def fail_then_load_sharded(folder: Path, own: Path, fault: Fault) -> dict[str, Any]:
    test_one_faulty_rank.load = load  # type: ignore[assignment]
    return fail_then_load(folder, own, fault)


FAULTS: dict[Fault, tuple[str, str]] = {
    io_error: ("ReadError", "Input/output error"),
    truncated: ("CheckpointError", "was truncated while it was being loaded"),
    no_memory: ("LoadError", "out of memory on rank 1"),
    no_memory_while_reading: ("LoadError", "out of memory on rank 1"),
    interrupted: ("PeerError", "rank 1 failed"),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_one_faulty_rank_among_three(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, fault: Fault) -> None:
    kind, text = FAULTS[fault]
    results = run_ranks(3, fail_then_load_sharded, zoo_checkpoint("qwen3_moe"), tmp_path, fault, timeout=90)
    for rank, result in enumerate(results):
        if rank == 1 and fault is interrupted:
            assert result["error"][0] == "KeyboardInterrupt", result
        else:
            assert result["error"][0] == kind and text in result["error"][1], result
        assert result["loaded"] == 3 and result["threads"] == [] and not result["patched"]


def load_with_a_victim_sharded(folder: Path, victim: int, settings: dict[str, Any]) -> dict[str, Any]:
    deaths.load = load  # type: ignore[assignment]
    return load_with_a_victim(folder, victim, kill_in_first_read, None, None, settings)


@pytest.mark.plugin("watch")
@pytest.mark.parametrize(
    ("victim", "settings"),
    [(2, {}), pytest.param(0, {"read_from": "rank0"}, marks=pytest.mark.plugin("relay"))],
)
def test_killed(cluster: None, zoo_checkpoint: Checkpoint, victim: int, settings: dict[str, Any]) -> None:
    outcomes = run_ranks_expecting_errors(
        3, load_with_a_victim_sharded, zoo_checkpoint("qwen3_moe"), victim, settings, timeout=90
    )
    assert outcomes[victim].error_type == "Died", outcomes[victim]
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            kind, message = outcome.value["caught"]
            assert kind == "PeerError" and f"rank {victim} " in message, outcome.value
            assert not outcome.value["patched"] and outcome.value["shards open"] == []


def load_another(folder: Path, others: Path) -> str:
    return error_of(lambda: load(folder if dist.get_rank() else others))[0]


def test_another_checkpoint_on_one_rank(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    found = run_ranks(2, load_another, zoo_checkpoint("llama"), zoo_checkpoint("qwen3_moe"), timeout=90)
    assert found == ["CheckpointError"] * 2


def load_on_rank_0(folder: Path) -> str:
    deaths.make_contact()
    if dist.get_rank():
        os._exit(0)  # a script that ends without the call
    return message_of(lambda: load(folder))


@pytest.mark.plugin("watch")
def test_one_rank_alone(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    """In stock it waits for the other until the process group's time limit."""
    found, _ = run_ranks_expecting_errors(2, load_on_rank_0, zoo_checkpoint("llama"), timeout=90)
    assert found.value is not None and found.value.startswith("PeerError") and "rank 1 " in found.value, found
