"""Whose the weights are that lie beside a state."""

import shutil
from pathlib import Path

import hf_zero_stream
from hf_zero_stream.state.tensors import has_other_weights
from tests.support.cluster import run_ranks
from tests.support.training_state import all_in_one_group, engine_of, plain_training, state_config
from tests.support.zoo import Checkpoint


def test_whoever_wrote_them_last(zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    model, optimizer, _ = plain_training(zoo_checkpoint("llama"), None)
    place = tmp_path / "state"

    def save(**how: object) -> None:
        hf_zero_stream.save_state(model, place, optimizer=optimizer, tag="last", **how)

    assert not has_other_weights(place, "last"), "there are none"
    save(max_shard_size="40KB")
    assert not has_other_weights(place, "last")
    assert not has_other_weights(shutil.move(place, tmp_path / "moved"), "last")
    shutil.move(tmp_path / "moved", place)
    model.save_pretrained(place, max_shard_size="40KB")  # the best one, maybe
    assert has_other_weights(place, "last")
    save()
    assert not has_other_weights(place, "last")
    (place / "model.safetensors").unlink()
    assert has_other_weights(place, "last"), "config.json is no longer of these"
    save(with_weights=False)
    assert has_other_weights(place, "last")
    shutil.rmtree(place / "last")
    assert has_other_weights(place, "last")


def save_by_engine(folder: Path, target: Path) -> list[bool]:
    """Whether the file of weights is another one after each of four saves, the third of which is the script's own."""
    engine = engine_of(folder, state_config(2), all_in_one_group)
    weights, found = target / "model.safetensors", []
    with hf_zero_stream.streaming():
        for number in range(4):
            before = weights.stat().st_ino if weights.exists() else 0
            if number == 2:
                engine.module.save_pretrained(target)
            else:
                engine.save_checkpoint(str(target))
            found.append(weights.stat().st_ino != before)
        assert engine.load_checkpoint(str(target))[0] is not None
    return found


def test_an_engine_replaces_its_own_alone(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    assert run_ranks(1, save_by_engine, zoo_checkpoint("llama"), tmp_path) == [[True, True, True, False]]
