"""Every tiny model must be what the other tests take it for: sharded, reloadable, trainable, awkwardly sized."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open

from benchmarks.moe_checkpoint import make_moe_checkpoint, moe_config
from tests.support.zoo import ZOO, Checkpoint, build_model


DTYPES = [torch.float32, torch.bfloat16]


def shard_shapes(folder: Path) -> dict[str, list[int]]:
    """Shape of every tensor in the folder's shards."""
    shapes = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as shard:
            shapes |= {key: shard.get_slice(key).get_shape() for key in shard.keys()}
    return shapes


def load(name: str, folder: Path, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """Plain loading that must leave nothing over."""
    auto_class = getattr(transformers, ZOO[name].auto_class)
    model, info = auto_class.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ZOO)
def test_reloads_equal_and_trains(name: str, dtype: torch.dtype, zoo_checkpoint: Checkpoint) -> None:
    folder = zoo_checkpoint(name, dtype)
    assert len(list(folder.glob("*.safetensors"))) >= 2
    assert sum(path.stat().st_size for path in folder.glob("*.safetensors")) < 1.2e6

    model, expected = load(name, folder, dtype), build_model(name, dtype).state_dict()
    assert type(model) is type(build_model(name))
    assert model.state_dict().keys() == expected.keys()
    for key, value in model.state_dict().items():
        assert torch.equal(value, expected[key].to(value.dtype)), key

    inputs = ZOO[name].inputs()
    inputs = {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()}
    loss = model(**inputs).loss
    assert torch.isfinite(loss)
    loss.backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is None or torch.isfinite(parameter.grad).all(), key


@pytest.mark.parametrize("name", ZOO)
def test_sizes_are_awkward_and_values_unlike(name: str) -> None:
    model = build_model(name)
    for world_size in (3, 4) if name == "olmoe" else (2, 3, 4):
        assert sum(parameter.numel() % world_size != 0 for parameter in model.parameters()) >= 3
    for key, value in model.state_dict().items():
        assert not value.is_floating_point() or value.unique().numel() > value.numel() // 2, key


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3", "olmoe"])
def test_experts_are_saved_one_by_one(name: str, zoo_checkpoint: Checkpoint) -> None:
    assert any(".experts.4." in key for key in shard_shapes(zoo_checkpoint(name)))
    assert any(key.endswith(".experts.gate_up_proj") for key in build_model(name).state_dict())


def test_qwen3_vl_moe_experts_are_transposed(zoo_checkpoint: Checkpoint) -> None:
    key = "model.language_model.layers.0.mlp.experts.down_proj"
    experts, rows, columns = build_model("qwen3_vl_moe").state_dict()[key].shape
    assert shard_shapes(zoo_checkpoint("qwen3_vl_moe"))[key] == [experts, columns, rows]
    assert shard_shapes(zoo_checkpoint("qwen3_vl_moe_v5"))[key] == [experts, rows, columns]


def test_tied_model_saves_one_copy(zoo_checkpoint: Checkpoint) -> None:
    assert "lm_head.weight" not in shard_shapes(zoo_checkpoint("qwen3"))


@pytest.mark.parametrize("target_bytes, tolerance", [(1.2e8, 0.06), (1.6e9, 0.01), (3.4e9, 0.01), (60e9, 0.01)])
def test_moe_config_hits_the_size(target_bytes: float, tolerance: float) -> None:
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(moe_config(target_bytes))
    assert 2 * model.num_parameters() == pytest.approx(target_bytes, rel=tolerance)


def test_moe_checkpoint_loads(tmp_path: Path) -> None:
    folder = make_moe_checkpoint(tmp_path, 3e7, num_layers=2, num_experts=16)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shapes = shard_shapes(folder)
    assert len(set(index["weight_map"].values())) == 4 and index["weight_map"].keys() == shapes.keys()
    assert index["metadata"]["total_size"] == 2 * sum(torch.Size(shape).numel() for shape in shapes.values())

    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert model.dtype == torch.bfloat16
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.arange(12).view(1, 12)
    assert torch.isfinite(model(input_ids=tokens, labels=tokens).loss)
