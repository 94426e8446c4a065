"""States of models from quantised checkpoints, packed or dequantised, at another number of ranks, and back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

import hf_zero_stream
from tests.state.test_state import different_states
from tests.support.changed_models import whole_values
from tests.support.checkpoint_files import differing
from tests.support.cluster import run_ranks
from tests.support.packed_training import dequantised, inputs, packed_names, with_adapters
from tests.support.parity import ds_config
from tests.support.quantised_checkpoints import fp8, mxfp4


FORMATS: dict[str, Callable[[Path], None]] = {"fp8": fp8, "mxfp4": mxfp4}


class Training:
    """Of adapters beside packed weights, or of all of a dequantised model; by a ZeRO-3 engine, or under FSDP2."""

    def __init__(self, folder: Path, home: str, is_packed: bool) -> None:
        config = ds_config(torch.bfloat16)
        how = {"ds_config": config}
        if home == "fsdp2":
            how = {"distributed_config": {"fsdp_size": dist.get_world_size()}}
        if not is_packed:
            folder, wish = dequantised(folder)
            how |= wish
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **how)
        assert bool(packed_names(model)) == is_packed
        self.model: Any = with_adapters(model) if is_packed else model
        trained = [param for param in self.model.parameters() if param.requires_grad]
        self.engine, self.optimizer = None, torch.optim.AdamW(trained, lr=1e-3)
        if home == "zero3":
            import deepspeed

            self.engine, *_ = deepspeed.initialize(model=self.model, config=config, model_parameters=trained)

    def train(self, *steps: int) -> list[float]:
        losses = []
        for number in steps:
            loss = (self.engine or self.model)(**inputs(seed=number)).loss
            if self.engine is not None:
                self.engine.backward(loss)
                self.engine.step()
            else:
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def save(self, target: Path) -> None:
        if self.engine is not None:
            self.engine.save_checkpoint(str(target))
        else:
            hf_zero_stream.save_state(self.model, target, optimizer=self.optimizer)

    def load(self, source: Path) -> None:
        if self.engine is not None:
            assert self.engine.load_checkpoint(str(source))[0] is not None
        else:
            hf_zero_stream.load_state(self.model, source, optimizer=self.optimizer)


def go_on(folder: Path, root: Path, home: str, is_packed: bool, first: int) -> tuple[list[float], list[float]]:
    """Load the state of step `first` and save it again; losses of two steps, after which it saves, and of two more."""
    with hf_zero_stream.streaming(hf_zero_stream.StreamingConfig(progress=False)):
        training = Training(folder, home, is_packed)
        if first:
            training.load(root / f"{first}")
            training.save(root / f"{first} again")
            found = whole_values(training.model)
            if dist.get_rank() == 0:
                assert differing(found, torch.load(root / f"{first}.pt")) == []
        losses = training.train(first, first + 1)
        training.save(root / f"{first + 2}")
        found = whole_values(training.model)
        if dist.get_rank() == 0:
            torch.save(found, root / f"{first + 2}.pt")
        return losses, training.train(first + 2, first + 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("home", ["zero3", "fsdp2"])
@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "dequantised"])
def test_resumed_elsewhere(cluster: None, tmp_path: Path, name: str, home: str, is_packed: bool) -> None:
    """Of 2 ranks on 3, and of 3 on 2: values, moments and steps are those that were saved; so are later losses."""
    FORMATS[name](folder := tmp_path / "model")
    on_two, on_three, on_two_again = (
        run_ranks(world_size, go_on, folder, tmp_path, home, is_packed, first)[0]
        for world_size, first in ((2, 0), (3, 2), (2, 4))
    )
    assert len({*on_two[0], *on_two[1]}) == 4, "each step must change the loss"
    assert on_three[0] == pytest.approx(on_two[1], rel=2e-3)  # in bf16
    assert on_two_again[0] == pytest.approx(on_three[1], rel=2e-3)
    for step in (2, 4):
        assert different_states(tmp_path / f"{step}", tmp_path / f"{step} again") == []
