"""What a plan says of the bytes that a step sends, and of activations, beside what is sent and kept."""

from collections import Counter
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hf_zero_stream
from hf_zero_stream.errors import ConfigError, UnsupportedError
from hf_zero_stream.plugins.forecast import wire
from hf_zero_stream.plugins.forecast.activations import activations, of_layer
from tests.support.cluster import run_ranks
from tests.support.parity import ds_config
from tests.support.zoo import Checkpoint


SMALL_BYTES = 64
"""Norms, flags and losses, which are not planned."""

WAYS = {"allreduce_": 2, "_allgather_base_": 1, "_reduce_scatter_base_": 1, "reduce_": 1, "allgather_": 1}
"""How many times the larger of a collective's tensors passes each rank, but for its own share."""


class Traffic(TorchDispatchMode):
    """Bytes that this rank sends, by the name of the collective."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._opname
            sizes = [sum(each.nbytes for each in tree_leaves(it) if isinstance(each, torch.Tensor)) for it in args]
            if max(sizes) > SMALL_BYTES and name != "broadcast_":  # of the order in which parameters are used
                self.sent[name] += WAYS[name] * wire.one_way(max(sizes), dist.get_world_size())
        return func(*args, **(kwargs or {}))


def sent_in_a_step(folder: Path, config: dict[str, Any]) -> dict[str, int]:
    """What this rank sends in the second step."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    tokens = torch.arange(5, 37).view(1, -1)

    def step() -> None:
        for _ in range(config["gradient_accumulation_steps"]):
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()

    step()
    with Traffic() as traffic:
        step()
    return dict(traffic.sent)


GATHERED_TWICE = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
"""Else all of a small model stays gathered for the backward pass."""


@pytest.mark.parametrize(
    ("stage", "changes", "times"),
    [
        (1, {}, 3),
        (1, {"gradient_accumulation_steps": 2}, 3),
        (2, {}, 3),
        (2, {"gradient_accumulation_steps": 2}, 5),
        (2, {"zero_optimization": {"use_multi_rank_bucket_allreduce": False}}, 2),
        (3, {}, 2),
        (3, {"zero_optimization": GATHERED_TWICE}, 3),
        (3, {"zero_optimization": GATHERED_TWICE, "gradient_accumulation_steps": 2}, 6),
    ],
)
@pytest.mark.sample(2)
def test_a_step_sends_what_is_planned(
    cluster: None, zoo_checkpoint: Checkpoint, stage: int, changes: dict[str, Any], times: int
) -> None:
    folder = zoo_checkpoint("llama", torch.bfloat16)
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **changes.get("zero_optimization", {})}
    config = {
        **ds_config(torch.bfloat16),
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "gradient_accumulation_steps": 1,
        **changes,
        "zero_optimization": zero,
    }
    planned = hf_zero_stream.plan(folder, world_size=2, ds_config=config).wire
    whole = sum(param.nbytes for param in transformers.AutoModelForCausalLM.from_pretrained(folder).parameters())
    assert sum(planned.values()) == pytest.approx(times * whole / 2, rel=0.001)
    for found in run_ranks(2, sent_in_a_step, folder, config):
        assert sum(found.values()) == pytest.approx(sum(planned.values()), rel=0.02), (planned, found)


def test_zero_plus_plus() -> None:
    """Table 1 of the paper: with M bytes of parameters 3 M, 1.5 M for gathers in 8 bits, and 0.25 M for gradients."""
    whole = 10**6
    plain = wire.of_stage_3(whole // 2, 2, whole, 10**6, wire.ZeroTraffic())
    quantised = wire.of_stage_3(whole // 2, 2, whole, 10**6, wire.ZeroTraffic(True, True, 8))
    assert {name: round(nbytes / whole, 2) for name, nbytes in plain.items()} == {
        "forward gathers": 1,
        "backward gathers": 1,
        "gradients": 1,
    }
    assert {name: round(nbytes / whole, 2) for name, nbytes in quantised.items()} == {
        "forward gathers": 0.5,
        "backward gathers within a node": 0.44,
        "gradients": 0.25,
    }


def test_shards(zoo_checkpoint: Checkpoint) -> None:
    def sent(**sizes: int) -> dict[str, int]:
        ranks = sizes.get("fsdp_size", 1) * sizes.get("tp_size", 1) * sizes.get("dp_replicate_size", 1)
        folder = str(zoo_checkpoint("llama"))
        found = hf_zero_stream.plan(folder, world_size=ranks, distributed_config=sizes, tokens=64)
        return {**found.wire, "held": sum(found.memory.partitions.values())}

    fsdp2 = sent(fsdp_size=4)
    assert fsdp2 == dict.fromkeys(("forward gathers", "backward gathers", "gradients"), 3 * fsdp2["held"]) | {
        "held": fsdp2["held"]
    }
    hsdp = sent(fsdp_size=2, dp_replicate_size=4)
    assert hsdp["gradients of replicas"] == 2 * hsdp["held"] * 3 // 4
    config = transformers.AutoConfig.from_pretrained(zoo_checkpoint("llama"))
    layers, hidden = config.num_hidden_layers, config.hidden_size
    assert (
        sent(fsdp_size=1, tp_size=2)["tensor parallelism"] == layers * 4 * 64 * hidden * 4
    )  # fp32, 2 (t - 1) / t = 1
    experts = hf_zero_stream.plan(
        str(zoo_checkpoint("deepseek_v3")), world_size=2, distributed_config={"fsdp_size": 2, "ep_size": 2}
    )
    assert experts.wire == {}


def test_seconds() -> None:
    assert wire.seconds(25 * 10**9, 400) == 0.5
    with pytest.raises(ConfigError, match="more than 0 gigabits a second; got -1"):
        wire.seconds(1, -1)


# ------------------------------------------------------------------------------------------------- activations


def test_the_papers_layer() -> None:
    """34 s b h, of which tensor parallelism cuts 24."""
    assert of_layer(2048, 12288) == 34 * 2048 * 12288
    assert of_layer(2048, 12288, tp_ranks=8) == 13 * 2048 * 12288


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_activations_beside_what_autograd_keeps(name: str, is_checkpointed: bool) -> None:
    """A layer with a gated MLP and norms in fp32 keeps half as much again as the paper's."""
    config = getattr(transformers, f"{name}Config")(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    if is_checkpointed:
        model.gradient_checkpointing_enable()
    own = {param.untyped_storage().data_ptr() for param in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if (pointer := tensor.untyped_storage().data_ptr()) not in own:
            kept[pointer] = tensor
        return tensor

    ids = torch.arange(1024).remainder(512).view(2, 512)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=ids, labels=ids, use_cache=False)
    found = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    estimate = activations(config, ids.numel())
    if is_checkpointed:  # one layer is computed again later, and is not among these
        assert found <= estimate["checkpointed"] < estimate["kept"] / 3
    else:
        assert 1 <= found / estimate["kept"] < 1.7


def test_what_is_not_estimated(zoo_checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match="tokens: expected the tokens of a micro-batch, 1 or more; got 0"):
        hf_zero_stream.plan(str(zoo_checkpoint("llama")), world_size=2, tokens=0)
    with pytest.raises(ConfigError, match="config says num_hidden_layers; got T5Config, .* Leave tokens out"):
        activations(transformers.T5Config(num_hidden_layers=None), 5)


# ------------------------------------------------------------------------------------------------- stages 1 and 2


@pytest.mark.parametrize("stage", [1, 2])
def test_reads(zoo_checkpoint: Checkpoint, stage: int) -> None:
    """Each rank reads all, or with share_reads its part."""
    folder = str(zoo_checkpoint("llama"))
    alone = hf_zero_stream.plan(folder, world_size=4, ds_config={"zero_optimization": {"stage": stage}}).load
    assert alone.cost.bytes_read >= alone.checkpoint_bytes * 0.9
    config = {"zero_optimization": {"stage": stage}, "hf_zero_stream": {"share_reads": True}}
    parts = [hf_zero_stream.plan(folder, world_size=4, rank=rank, ds_config=config).load for rank in range(4)]
    assert sum(part.cost.bytes_needed for part in parts) == pytest.approx(alone.cost.bytes_needed, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"zero_optimization": {"stage": 0}}, ConfigError, "expected zero_optimization.stage 1, 2 or 3; got 0"),
        ({"tensor_parallel": {"autotp_size": 2}}, UnsupportedError, "tensor_parallel.autotp_size is not planned at"),
        (
            {"tensor_parallel": {"autotp_size": 2}, "zero_optimization": {"stage": 3}},
            UnsupportedError,
            "tensor_parallel.autotp_size is not planned at stage 3",
        ),
        ({"expert_parallel": {"enabled": True}}, UnsupportedError, "expert_parallel is not planned at stage 2"),
    ],
)
def test_refused(zoo_checkpoint: Checkpoint, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    config = {"zero_optimization": {"stage": 2}, **changes}
    with pytest.raises(error, match=message):
        hf_zero_stream.plan(str(zoo_checkpoint("llama")), world_size=2, ds_config=config)
