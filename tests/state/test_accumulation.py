"""Accumulation of gradients by accelerate: states are saved after any step, and not saved or loaded within one."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

import hf_zero_stream
from hf_zero_stream.state import foreign
from tests.state.test_refused import message_of
from tests.support.cluster import run_ranks
from tests.support.fsdp2 import announce, force_fsdp_on_cpu, load
from tests.support.parity import ds_config
from tests.support.trainers import by_deepspeed, own_optimizer
from tests.support.training_state import accelerated_steps
from tests.support.zoo import Checkpoint


def accelerator_of(zero: bool) -> Any:
    """One that accumulates two batches."""
    if not zero:
        announce(cpu_ram_efficient_loading=True, state_dict_type="SHARDED_STATE_DICT")
        force_fsdp_on_cpu()
        return Accelerator(gradient_accumulation_steps=2)
    config = own_optimizer(ds_config()) | {"gradient_accumulation_steps": 2}
    return by_deepspeed(config, gradient_accumulation_steps=2)


def accumulate(folder: Path, target: Path, zero: bool) -> dict[str, Any]:
    said: list[str] = []
    foreign.logger.warning_once = said.append  # type: ignore[method-assign]
    accelerator = accelerator_of(zero)
    with hf_zero_stream.streaming():
        model = load("llama", folder)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

        train = partial(accelerated_steps, accelerator, model, optimizer)

        def norm() -> float:
            param = next(model.parameters())
            return float((param.ds_tensor if zero else param.to_local()).detach().norm())

        train(range(2))
        accelerator.save_state(str(target / "between"))
        accelerator.save_state(str(target / "middle"))
        expected = train(range(4))
        train(range(1))
        saved = norm()
        accelerator.save_state(str(target / "middle"))
        refused = message_of(lambda: accelerator.load_state(str(target / "between")))
        train(range(1))
        accelerator.load_state(str(target / "middle"))
        loaded = norm()
        accelerator.load_state(str(target / "between"))
        return {
            "expected": expected,
            "resumed": train(range(4)),
            "refused": refused,
            "said": said,
            "middle": (saved, loaded),
        }


@pytest.mark.parametrize("zero", [True, False], ids=["ZeRO-3", "FSDP2"])
def test_in_the_middle(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, zero: bool) -> None:
    found = run_ranks(2, accumulate, zoo_checkpoint("llama"), tmp_path, zero)
    for of_rank in found:
        assert of_rank["resumed"] == of_rank["expected"]
        assert of_rank["middle"][0] == of_rank["middle"][1], "not the state that was in the folder before"
        assert of_rank["refused"].startswith("UnsupportedError: load_state: gradients are being accumulated")
    whose = "DeepSpeed" if zero else "accelerate"
    assert len(found[0]["said"]) == 1 and f"saved by {whose}, in its own format" in found[0]["said"][0]
    assert list((tmp_path / "between").glob("pytorch_model/*/training_state.json"))
    assert list((tmp_path / "middle").rglob("*_optim_states.pt" if zero else "optimizer_0/*.distcp"))
