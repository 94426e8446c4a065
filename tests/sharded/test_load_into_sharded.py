"""`load_into` of models that DTensor shards, whoever sharded them: new values in the same memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hf_zero_stream
from hf_zero_stream.errors import LoadError
from hf_zero_stream.holdings.introspection import local_of
from tests import sampling
from tests.support.cluster import run_ranks, run_ranks_expecting_errors
from tests.support.sharded import Sizes, even_inputs, even_model, load_sharded, sharded_differences
from tests.support.zoo import Checkpoint


CAUSAL = transformers.AutoModelForCausalLM


def build(how: str, folder: Path) -> Any:
    """A sharded model without values, as somebody's own training code makes it."""
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = CAUSAL.from_config(config)
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    kwargs: dict[str, Any] = {"mesh": mesh}
    if how in ("hsdp", "dp_tp"):
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("outer", "inner"))
        kwargs["mesh"] = mesh if how == "hsdp" else mesh["outer"]
    if how == "dp_tp":
        plan = {"q_proj": ColwiseParallel(), "o_proj": RowwiseParallel()}
        for layer in model.model.layers:
            parallelize_module(layer.self_attn, mesh["inner"], plan)
    if how == "offload":
        kwargs["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for layer in model.model.layers:
        fully_shard(layer, **kwargs)
    if how != "layers":
        fully_shard(model, **kwargs)
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        local.detach().fill_(7)
    return model


def addresses(model: nn.Module) -> list[int]:
    return [(p.to_local() if isinstance(p, DTensor) else p).data_ptr() for p in model.parameters()]


def fill(hows: list[str], folder: Path) -> dict[str, Any]:
    """What of a model that was filled is not as in plain loading."""
    plain, found = CAUSAL.from_pretrained(folder), {}
    for how in hows:
        model = build(how, folder).eval()
        before = addresses(model)
        report = hf_zero_stream.load_into(model, str(folder))
        moved = [] if addresses(model) == before else ["moved"]
        mine = report.ranks[dist.get_rank()]
        read_too_much = ["read too much"] if mine.bytes_read > 1.3 * mine.bytes_needed else []
        found[how] = sharded_differences(model, plain) + moved + read_too_much
    return found


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_a_model_that_somebody_sharded(cluster: None, zoo_checkpoint: Checkpoint, name: str) -> None:
    """Computed buffers get their values too, which ``to_empty`` lost."""
    folder, hows = zoo_checkpoint(name), ["fsdp", "layers", "offload"]
    assert run_ranks(2, fill, hows, folder) == [dict.fromkeys(hows, [])] * 2
    assert run_ranks(3, fill, hows[:1], folder) == [{"fsdp": []}] * 3


def test_two_dimensions(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    hows = ["hsdp", "dp_tp"]
    assert run_ranks(4, fill, hows, zoo_checkpoint("llama")) == [dict.fromkeys(hows, [])] * 4


def train_and_fill(first: Path, second: Path, of_sizes: list[Sizes]) -> list[Any]:
    """Train on `first`, load `second`, look, and train on; the same of a model that began with `second`."""
    inputs = even_inputs()
    plain, found = CAUSAL.from_pretrained(second), []

    def step(model: Any, optimizer: Any) -> float:
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    for sizes in of_sizes:
        model, fresh = (load_sharded(CAUSAL, folder, sizes) for folder in (first, second))
        optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (model, fresh)]
        step(model, optimizers[0])
        with torch.no_grad():
            model(**inputs)  # FSDP2 leaves parameters gathered
        hf_zero_stream.load_into(model, str(second))
        before = addresses(model)
        differing = sharded_differences(model, plain)
        pair = step(model, optimizers[0]), step(fresh, optimizers[1])
        kept = addresses(model) == before and all(param in optimizers[0].state for param in model.parameters())
        found.append((sizes, differing, pair[0] == pair[1], kept))
    return found


@pytest.mark.parametrize(
    ("world_size", "of_sizes"),
    [
        (2, [{"fsdp_size": 2}, {"tp_size": 2}, {"tp_size": 2, "ep_size": 2}]),
        (4, [{"fsdp_size": 2, "tp_size": 2}, {"dp_replicate_size": 2, "fsdp_size": 2}]),
    ],
)
@pytest.mark.sample(1)
def test_in_the_middle_of_training(cluster: None, tmp_path: Path, world_size: int, of_sizes: list[Sizes]) -> None:
    model = even_model("qwen3_moe")
    model.save_pretrained(tmp_path / "first")
    for param in model.parameters():
        param.data += torch.rand(param.shape) / 8
    model.save_pretrained(tmp_path / "second")
    of_sizes = sampling.every(2, of_sizes)
    for found in run_ranks(world_size, train_and_fill, tmp_path / "first", tmp_path / "second", of_sizes):
        assert found == [(sizes, [], True, True) for sizes in of_sizes]


# ------------------------------------------------------------------------------------------------------- no such load


def with_both_ends(folder: Path, difference: float) -> Path:
    """A tied model whose checkpoint has both ends."""
    model = even_model("llama")
    model.config.tie_word_embeddings = True
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    values = load_file(path)
    values["lm_head.weight"] = values["model.embed_tokens.weight"] + difference
    save_file(values, path, metadata={"format": "pt"})
    return folder


def fill_tied(same: Path, different: Path) -> list[Any]:
    found: list[Any] = []
    for folder in (same, different):
        model = build("fsdp", folder)
        model.tie_weights()
        assert model.lm_head.weight is model.model.embed_tokens.weight
        try:
            hf_zero_stream.load_into(model, str(folder))
            found.append(sharded_differences(model.eval(), CAUSAL.from_pretrained(folder)))
        except LoadError as error:
            found.append(str(error))
    return found


def test_both_ends_of_a_tie(cluster: None, tmp_path: Path) -> None:
    """The model has one place for them; if the checkpoint has other values for each, that is an error."""
    folders = with_both_ends(tmp_path / "same", 0.0), with_both_ends(tmp_path / "different", 1.0)
    for same, different in run_ranks(2, fill_tied, *folders):
        assert same == []
        assert "has lm_head.weight tied to another parameter" in different


def fill_without_memory(folder: Path) -> None:
    with torch.device("meta"):
        model = CAUSAL.from_config(transformers.AutoConfig.from_pretrained(folder))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    hf_zero_stream.load_into(model, str(folder))


def test_a_model_without_memory(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    for outcome in run_ranks_expecting_errors(2, fill_without_memory, zoo_checkpoint("llama")):
        assert outcome.error_type == "LoadError" and "to_empty(device=...)" in (outcome.error_message or "")


def fill_with_another(folder: Path, another: Path, how: str) -> Any:
    """The error, which comes before anything is read, and whether the model is as it was."""
    model = build("fsdp", folder)
    before = [local.clone() for local in map(local_of, model.parameters())]
    path = another if how == "another" or dist.get_rank() == 1 else folder
    try:
        hf_zero_stream.load_into(model, str(path))
    except Exception as error:
        return type(error).__name__, all(map(torch.equal, before, map(local_of, model.parameters())))
    return "no error", False


@pytest.mark.parametrize(
    ("how", "expected"), [("another", "RuntimeError"), ("other on one rank", "DisagreementError")]
)
def test_another_checkpoint(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, how: str, expected: str
) -> None:
    even_model("llama").save_pretrained(tmp_path)
    assert run_ranks(2, fill_with_another, zoo_checkpoint("llama"), tmp_path, how) == [(expected, True)] * 2
