"""States of models from quantised checkpoints, packed or dequantised, at another number of ranks, and back."""

from collections.abc import Callable
from pathlib import Path

import deepspeed
import pytest
import torch
import torch.distributed as dist
import transformers

import hf_zero_stream
from tests.support.checkpoint_files import differing
from tests.support.cluster import run_ranks
from tests.support.packed_training import dequantised, inputs, packed_names, with_adapters
from tests.support.parity import ds_config
from tests.support.quantised_checkpoints import fp8, mxfp4
from tests.support.training_state import different_states
from tests.support.trainings import Training
from tests.support.whole import whole_values


FORMATS: dict[str, Callable[[Path], None]] = {"fp8": fp8, "mxfp4": mxfp4}


def training_of(folder: Path, home: str, is_packed: bool) -> Training:
    """Of adapters beside packed weights, or of all of a dequantised model; by a ZeRO-3 engine, or under FSDP2."""
    config = ds_config(torch.bfloat16)
    how = {"ds_config": config}
    if home == "fsdp2":
        how = {"distributed_config": {"fsdp_size": dist.get_world_size()}}
    if not is_packed:
        folder, wish = dequantised(folder)
        how |= wish
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **how)
    assert bool(packed_names(model)) == is_packed
    model = with_adapters(model) if is_packed else model
    trained = [param for param in model.parameters() if param.requires_grad]
    if home == "zero3":
        engine = deepspeed.initialize(model=model, config=config, model_parameters=trained)[0]
        return Training(engine, by="engine", batch=batch)
    return Training(model, torch.optim.AdamW(trained, lr=1e-3), batch=batch)


def batch(number: int) -> dict[str, torch.Tensor]:
    return inputs(seed=number)


def go_on(folder: Path, root: Path, home: str, is_packed: bool, first: int) -> tuple[list[float], list[float]]:
    """Load the state of step `first` and save it again; losses of two steps, after which it saves, and of two more."""
    with hf_zero_stream.streaming(hf_zero_stream.StreamingConfig(progress=False)):
        training = training_of(folder, home, is_packed)
        if first:
            training.load(root / f"{first}")
            training.save(root / f"{first} again")
            found = whole_values(training.trains)
            if dist.get_rank() == 0:
                assert differing(found, torch.load(root / f"{first}.pt")) == []
        losses = training.train((first, first + 1))
        training.save(root / f"{first + 2}")
        found = whole_values(training.trains)
        if dist.get_rank() == 0:
            torch.save(found, root / f"{first + 2}.pt")
        return losses, training.train((first + 2, first + 3))


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
