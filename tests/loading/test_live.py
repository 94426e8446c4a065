"""`load_into`: a model that exists holds another checkpoint's values afterwards, and trains on from there."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import hf_zero_stream
from hf_zero_stream.errors import LoadError
from tests.support.cluster import RankFailure, run_ranks
from tests.support.loading import load_with
from tests.support.parity import ds_config, three_losses, unequal
from tests.support.zoo import ZOO, Checkpoint, make_checkpoint


Checkpoints = Callable[..., tuple[Path, Path]]


@pytest.fixture(scope="module")
def checkpoints(zoo_checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """A zoo model's folder in bf16, and another of the same architecture with other values."""

    def make(name: str, second_dtype: torch.dtype = torch.bfloat16) -> tuple[Path, Path]:
        second = make_checkpoint(name, tmp_path_factory.mktemp(name), second_dtype)
        generator = torch.Generator().manual_seed(17)
        for path in second.glob("*.safetensors"):
            tensors = load_file(path)
            for key, tensor in tensors.items():
                if tensor.is_floating_point():
                    tensors[key] = (tensor + torch.randn(tensor.shape, generator=generator) / 8).to(tensor.dtype)
            save_file(tensors, path, metadata={"format": "pt"})
        return zoo_checkpoint(name, torch.bfloat16), second

    return make


def plain_model(name: str, folder: Path, dtype: torch.dtype) -> Any:
    return load_with("plain", ZOO[name].auto_class, folder, {}, {"dtype": dtype})


def streamed(name: str, folder: Path, config: dict[str, Any]) -> Any:
    return load_with("streamed", ZOO[name].auto_class, folder, config, {})


def reload(name: str, first: Path, second: Path, zero: dict[str, Any]) -> list[str]:
    dtype = torch.bfloat16
    plain = plain_model(name, second, dtype)
    model = streamed(name, first, ds_config(dtype, **zero))
    assert unequal(model, plain), "the two checkpoints should differ"
    report = hf_zero_stream.load_into(model, str(second))
    assert sum(rank.bytes_read for rank in report.ranks) >= sum(p.nbytes for p in plain.parameters()) * 0.9
    return unequal(model, plain)


@pytest.mark.parametrize("name", ["qwen3_moe", "t5", "gpt_oss", "qwen3_vl_moe"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.sample(2)
def test_partitions_hold_the_new_values(cluster: None, checkpoints: Checkpoints, name: str, world_size: int) -> None:
    first, second = checkpoints(name)
    assert run_ranks(world_size, reload, name, first, second, {}) == [[]] * world_size


@pytest.mark.usefixtures("async_io")
@pytest.mark.parametrize(
    "zero",
    [{"offload_param": {"device": "cpu"}}, {"zero_hpz_partition_size": 2}, "nvme"],
    ids=["offload_cpu", "hpz", "offload_nvme"],
)
def test_in_every_home(cluster: None, checkpoints: Checkpoints, tmp_path: Path, zero: Any) -> None:
    if zero == "nvme":
        zero = {"offload_param": {"device": "nvme", "nvme_path": str(tmp_path), "buffer_size": 2**20}}
    first, second = checkpoints("qwen3_moe")
    assert run_ranks(2, reload, "qwen3_moe", first, second, zero) == [[], []]


def losses_after_reload(first: Path, second: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Three steps on `first`, then `second` is loaded into the engine; and an engine that began with `second`."""
    from deepspeed.utils import safe_get_full_fp32_param

    recipe = ZOO["qwen3_moe"]
    stage = config["zero_optimization"]["stage"]
    dtype = torch.bfloat16
    plain = plain_model("qwen3_moe", second, torch.float32)

    def engine_on(folder: Path) -> Any:
        model = streamed("qwen3_moe", folder, config) if stage == 3 else plain_model("qwen3_moe", folder, dtype)
        return deepspeed.initialize(model=model, config=config)[0]

    used, fresh = engine_on(first), engine_on(second)
    three_losses(used, recipe.inputs)
    hf_zero_stream.load_into(used, str(second))
    masters = [
        name
        for (name, param), expected in zip(used.module.named_parameters(), plain.parameters(), strict=True)
        if not torch.equal(safe_get_full_fp32_param(param), expected)
    ]
    with torch.no_grad():
        pair = [float(engine(**recipe.inputs()).loss) for engine in (used, fresh)]
    return {"masters": masters, "equal": pair[0] == pair[1], "losses": three_losses(used, recipe.inputs)}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16_file", "fp32_file"])
@pytest.mark.sample(1)
def test_a_training_engine_gets_masters_and_weights(
    cluster: None, checkpoints: Checkpoints, stage: int, dtype: torch.dtype
) -> None:
    config = ds_config(torch.bfloat16)
    config["zero_optimization"]["stage"] = stage
    first, second = checkpoints("qwen3_moe", dtype)
    for result in run_ranks(2, losses_after_reload, first, second, config):
        assert result["masters"] == []
        assert result["equal"], "the forward pass should see the new weights"
        assert len(set(result["losses"])) == 3


def refused(first: Path, second: Path) -> tuple[str, bool]:
    """The error, and whether the partitions are as they were."""
    model = streamed("qwen3_moe", first, ds_config(torch.bfloat16))
    before = [param.ds_tensor.clone() for param in model.parameters()]
    try:
        hf_zero_stream.load_into(model, str(second))
    except (LoadError, RuntimeError) as error:
        same = all(torch.equal(old, param.ds_tensor) for old, param in zip(before, model.parameters(), strict=True))
        return str(error), same
    return "", False


def test_a_checkpoint_that_lacks_a_tensor_changes_nothing(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = zoo_checkpoint("qwen3_moe", torch.bfloat16)
    model = plain_model("qwen3_moe", folder, torch.bfloat16)
    state = {key: value for key, value in model.state_dict().items() if "norm" not in key}
    model.save_pretrained(tmp_path, state_dict=state)
    for message, unchanged in run_ranks(2, refused, folder, tmp_path):
        assert "missing" in message and "norm" in message
        assert unchanged


def load_into_meta(folder: Path) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    hf_zero_stream.load_into(model, str(folder))


def test_a_model_without_memory(cluster: None, checkpoints: Checkpoints) -> None:
    with pytest.raises(RankFailure, match="LoadError: load_into: the model's model.* is on the meta device.*to_empty"):
        run_ranks(1, load_into_meta, checkpoints("qwen3_moe")[0])


def test_only_models_of_transformers(cluster: None) -> None:
    with pytest.raises(RankFailure, match="expected a transformers model"):
        run_ranks(1, load_into_linear)


def load_into_linear() -> None:
    hf_zero_stream.load_into(nn.Linear(2, 2), "nowhere")


def without_zero(first: Path, second: Path) -> list[str]:
    model = plain_model("qwen3_moe", first, torch.bfloat16)
    report = hf_zero_stream.load_into(model, str(second))
    assert len(report.ranks) == (dist.get_world_size() if dist.is_initialized() else 1)
    return unequal(model, plain_model("qwen3_moe", second, torch.bfloat16))


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_plain_model(cluster: None, checkpoints: Checkpoints, world_size: int) -> None:
    first, second = checkpoints("qwen3_moe")
    assert run_ranks(world_size, without_zero, first, second) == [[]] * world_size
