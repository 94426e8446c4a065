"""`load_into` models that exist.

- `load_into`: a model that exists holds another checkpoint's values afterwards, and trains on from there.
- `load_into` with PEFT's wrappers around modules.
- `load_into` a model that a DeepSpeed optimizer trains: the fp32 values that the optimizer keeps are loaded too.
  Whatever is passed, the engine or the model inside it: an optimizer step copies the optimizer's values into the
  model.
"""

import gc
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import peft
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, ResNetConfig, ResNetForImageClassification

import hf_zero_stream
from hf_zero_stream.errors import HfZeroStreamError, LoadError
from tests.support.cluster import RankFailure, run_ranks
from tests.support.parity import ds_config, load_with, three_losses, unequal
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


@pytest.mark.plugin("nvme")
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


def test_a_wrapped_module_with_buffers(tmp_path: Path) -> None:
    """`modules_to_save` renames buffers as it does parameters: here the statistics of batch norms."""
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=3)
    saved = ResNetForImageClassification(config)
    with torch.no_grad():
        for buffer in saved.buffers():
            buffer.add_(3)
    saved.save_pretrained(tmp_path)
    around = peft.LoraConfig(r=2, target_modules=["convolution"], modules_to_save=["normalization"])
    model = peft.get_peft_model(ResNetForImageClassification(config), around).get_base_model()
    hf_zero_stream.load_into(model, str(tmp_path))
    found = {
        name.replace(".base_layer", "").replace(".original_module", ""): tensor
        for name, tensor in model.state_dict().items()
    }
    assert [name for name, tensor in saved.state_dict().items() if not torch.equal(found[name], tensor)] == []


Folders = tuple[Path, Path, Path, Path]


@pytest.fixture(scope="module")
def folders(zoo_checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A Llama in bf16; the same architecture with other values, in fp32 and in bf16, and a part of those."""
    narrow, wide = (make_checkpoint("llama", tmp_path_factory.mktemp("llama"), torch.bfloat16) for _ in range(2))
    part = tmp_path_factory.mktemp("part")
    shutil.copy(wide / "config.json", part)
    generator = torch.Generator().manual_seed(17)
    for path in wide.glob("*.safetensors"):
        tensors = {key: torch.randn(tensor.shape, generator=generator) for key, tensor in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})
        rounded = {key: tensor.to(torch.bfloat16) for key, tensor in tensors.items()}
        save_file(rounded, narrow / path.name, metadata={"format": "pt"})
        if "lm_head.weight" in rounded:
            head = {"lm_head.weight": rounded["lm_head.weight"]}
            save_file(head, part / "model.safetensors", metadata={"format": "pt"})
    return zoo_checkpoint("llama", torch.bfloat16), wide, narrow, part


def config_of(stage: int, dtype: torch.dtype = torch.bfloat16, **sections: Any) -> dict[str, Any]:
    """A config whose optimizer changes nothing: after a step the model has the values that the optimizer keeps."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": {"stage": stage, **sections.pop("zero", {})},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0, "weight_decay": 0.0, "torch_adam": True}},
        **sections,
    }


OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
CONFIGS = {
    "stage 0, FP16_UnfusedOptimizer": (config_of(0), torch.bfloat16),
    "stage 1, BF16_Optimizer": (config_of(1, data_types={"grad_accum_dtype": "fp32"}), torch.bfloat16),
    "stage 1, DeepSpeedZeroOptimizer": (config_of(1), torch.bfloat16),
    "stage 2, DeepSpeedZeroOptimizer": (config_of(2, zero={"round_robin_gradients": True}), torch.bfloat16),
    "stage 2, DeepSpeedZeroOptimizer, offloaded": (
        config_of(2, zero=OFFLOAD, zero_force_ds_cpu_optimizer=False),
        torch.bfloat16,
    ),
    "stage 2, DeepSpeedZeroOptimizer, fp32": (config_of(2, torch.float32), torch.float32),
    "stage 0, AdamW": (config_of(0, torch.float32), torch.float32),
    "stage 3, DeepSpeedZeroOptimizer_Stage3": (config_of(3), torch.bfloat16),
}


def llama(folder: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def engine_on(folder: Path, config: dict[str, Any], dtype: torch.dtype) -> Any:
    return deepspeed.initialize(model=llama(folder, dtype), config=config)[0]


def step(engine: Any) -> None:
    loss = engine(**ZOO["llama"].inputs()).loss
    engine.backward(loss)
    engine.step()


def weights_and_masters(folders: Folders, out: Path) -> dict[str, list[str]]:
    """What is wrong right after loading into the model inside an engine, and after a step."""
    first, wide, narrow, _ = folders
    found: dict[str, list[str]] = {}
    for kind, (config, dtype) in CONFIGS.items():
        expected = llama(wide, dtype)
        engine = engine_on(first, config, dtype)
        step(engine)
        assert unequal(engine.module, expected), "a step should leave the values of the first checkpoint"
        assert type(engine.optimizer).__name__ in kind
        wrong = found[kind] = []
        # Frozen too late for the optimizer: it goes on copying its values into the model.
        engine.module.get_parameter("model.norm.weight").requires_grad_(False)
        hf_zero_stream.load_into(engine.module, str(wide))
        wrong.extend(f"loaded: {name}" for name in unequal(engine.module, expected))
        step(engine)
        wrong.extend(f"after a step: {name}" for name in unequal(engine.module, expected))
        hf_zero_stream.save_pretrained(engine.module, out / kind, dtype="float32")
        saved = llama(out / kind, torch.float32)
        wrong.extend(f"saved: {name}" for name in unequal(saved, llama(wide, torch.float32)))
        # A checkpoint in the model's own dtype, and the engine itself.
        hf_zero_stream.load_into(engine, str(narrow))
        step(engine)
        wrong.extend(f"from 16 bit: {name}" for name in unequal(engine.module, llama(narrow, dtype)))
        engine.destroy()
    return found


@pytest.mark.slow
def test_weights_stay_after_a_step(cluster: None, folders: Folders, tmp_path: Path) -> None:
    """A checkpoint of fp32 values comes back out of the optimizer, too, without having been rounded."""
    for found in run_ranks(2, weights_and_masters, folders, tmp_path):
        assert found == dict.fromkeys(CONFIGS, [])


def around_and_beside(folders: Folders) -> dict[str, Any]:
    """Loads into what users have in their hands, and into what cannot be loaded into."""
    from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

    first, wide, _, part = folders
    dtype = torch.bfloat16
    expected = llama(wide, dtype)
    found: dict[str, Any] = {}

    # FP16_Optimizer, which an engine makes for FusedAdam; and gc.freeze() hides the engine from the garbage collector.
    engine = engine_on(first, config_of(0), dtype)
    model = engine.module
    optimizer = FP16_Optimizer(torch.optim.AdamW(model.parameters(), lr=0.0), low_precision_dtype=dtype)
    engine.optimizer = optimizer
    gc.freeze()
    hf_zero_stream.load_into(torch.nn.parallel.DistributedDataParallel(torch.compile(model)), str(wide))
    assert gc.get_freeze_count() > 0
    gc.unfreeze()
    for flat, half in zip(optimizer.fp32_groups_flat, optimizer.fp16_groups_flat, strict=True):
        found["fused"] = [unequal(model, expected), torch.equal(flat.to(dtype), half), torch.equal(flat, half.float())]

    # With an adapter around, and one beside, modules.
    adapted = peft.get_peft_model(
        llama(first, dtype), peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    )
    hf_zero_stream.load_into(adapted.get_base_model(), str(wide))
    base = dict(adapted.get_base_model().named_parameters())
    for name, value in expected.named_parameters():
        value.requires_grad = False
        found.setdefault("peft", []).extend(
            [name]
            if not any(
                torch.equal(base[inner], value)
                for inner in base
                if inner.replace(".base_layer", "").replace(".original_module", "") == name
            )
            else []
        )

    # What is missing stays as it is, in the optimizer too.
    engine = engine_on(first, config_of(2), dtype)
    groups = engine.optimizer.single_partition_of_fp32_groups
    for group in groups:
        group.data *= 1.0 + 2.0**-12
    before = [group.clone() for group in groups]
    hf_zero_stream.load_into(engine.module, str(part), strict=False)
    found["changed"] = sum(int((group != old).sum()) for group, old in zip(groups, before, strict=True))
    found["loaded"] = engine.module.lm_head.weight.numel()

    # The engine has put its values elsewhere: refused, until they are back.
    found["refused"] = []
    for states in ([OffloadStateTypeEnum.hp_params], [OffloadStateTypeEnum.lp_params]):
        engine.optimizer.offload_states(include=states, pin_memory=False)
        try:
            hf_zero_stream.load_into(engine.module, str(wide))
        except HfZeroStreamError as error:
            found["refused"].append("reload_states" in str(error) and states[0].value in str(error))
        engine.optimizer.reload_states()
    hf_zero_stream.load_into(engine.module, str(wide))
    step(engine)
    found["after offloading"] = unequal(engine.module, expected)
    return found


@pytest.mark.slow
def test_what_is_around_and_beside(cluster: None, folders: Folders) -> None:
    results = run_ranks(2, around_and_beside, folders)
    assert 0 < sum(found.pop("changed") for found in results) <= results[0]["loaded"]
    for found in results:
        del found["loaded"]
        assert found == {"fused": [[], True, False], "peft": [], "refused": [True, True], "after offloading": []}
