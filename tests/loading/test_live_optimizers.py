"""`load_into` a model that a DeepSpeed optimizer trains: the fp32 values that the optimizer keeps are loaded too.

Whatever is passed, the engine or the model inside it: an optimizer step copies the optimizer's values into the model.
"""

import gc
import shutil
from pathlib import Path
from typing import Any

import deepspeed
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import hf_zero_stream
from hf_zero_stream.errors import HfZeroStreamError
from tests.support.cluster import run_ranks
from tests.support.parity import unequal
from tests.support.zoo import ZOO, Checkpoint, make_checkpoint


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

    # FP16_Optimizer, which an engine makes for FusedAdam, and that gc.freeze() hides from the garbage collector.
    model = llama(first, dtype)
    optimizer = FP16_Optimizer(torch.optim.AdamW(model.parameters(), lr=0.0), low_precision_dtype=dtype)
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
