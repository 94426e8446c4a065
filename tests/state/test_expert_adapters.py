"""LoRA on fused experts (PEFT's ``target_parameters``): trained, saved, resumed and merged in homes of all kinds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import peft
import pytest
import torch
import transformers

import hf_zero_stream
from tests.support.checkpoint_files import tensors_of
from tests.support.cluster import run_ranks
from tests.support.fsdp2 import announce, load, make_accelerator
from tests.support.parity import ds_config
from tests.support.trainings import Training
from tests.support.zoo import Checkpoint


MODEL = "qwen3_moe"


def adapted(base: Any) -> Any:
    torch.manual_seed(0)
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = peft.LoraConfig(r=3, target_modules=["q_proj"], target_parameters=experts, init_lora_weights=False)
    return peft.get_peft_model(base, lora)


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-3)


def whole(folder: Path) -> Training:
    """One process, without any sharding."""
    model = adapted(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    return Training(model, optimizer_of(model))


def zero3(folder: Path) -> Training:
    config = ds_config(stage3_param_persistence_threshold=0) | {"gradient_clipping": 0.0}
    with hf_zero_stream.streaming():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, ds_config=config)
    model = adapted(model)
    return Training(deepspeed.initialize(model=model, config=config, optimizer=optimizer_of(model))[0])


def fsdp2(folder: Path) -> Training:
    announce(cpu_ram_efficient_loading=True)
    accelerator = make_accelerator()
    model = adapted(load(MODEL, folder, dtype=torch.float32))
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    return Training(model, optimizer, accelerator)


HOMES: dict[str, Callable[[Path], Training]] = {"whole": whole, "zero3": zero3, "fsdp2": fsdp2}


def begun(folder: Path, home: str, target: Path) -> list[float]:
    training = HOMES[home](folder)
    losses = training.train(range(3))
    training.save(target)
    return losses + training.train(range(3, 6))


def resumed(folder: Path, home: str, source: Path) -> list[float]:
    training = HOMES[home](folder)
    training.load(source)
    return training.train(range(3, 6))


@pytest.fixture(scope="module")
def folder(zoo_checkpoint: Checkpoint) -> Path:
    return zoo_checkpoint(MODEL)


@pytest.fixture(scope="module")
def expected(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Path]:
    """Losses without any sharding, and the state in the middle of them."""
    target = tmp_path_factory.mktemp("whole") / "state"
    (losses,) = run_ranks(1, begun, folder, "whole", target)
    assert len(set(losses)) == 6
    return losses, target


@pytest.mark.parametrize(
    ("home", "ranks", "then", "then_ranks"),
    [("zero3", 2, "fsdp2", 3), ("fsdp2", 2, "zero3", 3), ("zero3", 3, "whole", 1), ("zero3", 2, "zero3", 2)],
)
@pytest.mark.sample(2)
def test_trained_and_resumed(
    cluster: None,
    folder: Path,
    expected: tuple[list[float], Path],
    tmp_path: Path,
    home: str,
    ranks: int,
    then: str,
    then_ranks: int,
) -> None:
    losses, state = expected
    for found in run_ranks(ranks, begun, folder, home, tmp_path / "state", timeout=200):
        assert found == pytest.approx(losses, abs=2e-5)
    for source in (tmp_path / "state", state):
        for found in run_ranks(then_ranks, resumed, folder, then, source, timeout=200):
            assert found == pytest.approx(losses[3:], abs=2e-5)


def merged(folder: Path, target: Path) -> None:
    training = zero3(folder)
    training.train(range(2))
    with hf_zero_stream.streaming():
        training.trains.module.save_pretrained(target / "adapters")
        training.trains.module.merge_and_unload().save_pretrained(target / "merged")


def test_merged(cluster: None, folder: Path, tmp_path: Path) -> None:
    """What PEFT makes of the saved adapters in one process, to the last bit."""
    run_ranks(2, merged, folder, tmp_path, timeout=200)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    peft.PeftModel.from_pretrained(base, tmp_path / "adapters").merge_and_unload().save_pretrained(tmp_path / "plain")
    found, plain, before = (tensors_of(each) for each in (tmp_path / "merged", tmp_path / "plain", folder))
    assert found.keys() == plain.keys() == before.keys()
    assert [name for name in plain if not torch.equal(plain[name], found[name])] == []
    changed = {name for name in before if not torch.equal(before[name], found[name])}
    assert any("experts" in name for name in changed)
