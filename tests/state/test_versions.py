"""States that earlier versions of this package wrote: in the hub's layout, with the names that wrappers gave."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.support.cluster import run_ranks
from tests.support.training_state import (
    all_in_one_group,
    different_states,
    resume_and_save,
    state_config,
    train_and_save,
)
from tests.support.zoo import Checkpoint


def as_version_1(checkpoint: Path, state: Path) -> None:
    """Rewrite a state: masters and moments as ``save_pretrained`` writes weights, names as of checkpointed blocks."""
    place = state / "global_step3"
    record = json.loads((place / "training_state.json").read_text())
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for key in record["keys"]:
        values = load_file(place / f"model.{key}.safetensors")
        assert model.load_state_dict(values, strict=False).unexpected_keys == []
        model.save_pretrained(place / "hub", variant=key)
        shutil.move(place / "hub" / f"model.{key}.safetensors", place / f"model.{key}.safetensors")
    shutil.rmtree(place / "hub")
    for group in record["groups"]:
        group["parameters"] = [
            name.replace(".self_attn.", "._checkpoint_wrapped_module.self_attn.") for name in group["parameters"]
        ]
    (place / "training_state.json").write_text(json.dumps({**record, "version": 1}))


@pytest.mark.slow
def test_a_state_of_version_1(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """What is saved again after a load of it is what was saved at first; experts are fused again."""
    folder, config = zoo_checkpoint("qwen3_moe"), state_config(3)
    run_ranks(2, train_and_save, folder, tmp_path, [config], [all_in_one_group], False)
    old = tmp_path / "old"
    shutil.copytree(tmp_path / "ours 0", old)
    as_version_1(folder, old)
    names = load_file(old / "global_step3" / "model.exp_avg.safetensors").keys()
    assert any(".experts.0." in name for name in names)
    run_ranks(2, resume_and_save, folder, old, config, all_in_one_group, tmp_path / "again")
    assert different_states(tmp_path / "ours 0", tmp_path / "again") == []
