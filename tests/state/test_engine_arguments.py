"""Arguments and config of an engine's ``save_checkpoint`` and ``load_checkpoint`` inside ``streaming()``."""

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import transformers

import hf_zero_stream
from hf_zero_stream.checkpoint.deepspeed_names import entries_of_deepspeed
from hf_zero_stream.state import foreign
from tests.support.cluster import run_ranks
from tests.support.messages import outcome_of
from tests.support.training_state import all_in_one_group, engine_of, state_config, train
from tests.support.zoo import Checkpoint


def saves_and_loads(folder: Path, target: Path) -> dict[str, dict[str, Any]]:
    """What DeepSpeed does ("stock"), and what happens inside ``streaming()`` ("ours")."""
    found: dict[str, dict[str, Any]] = {"stock": {}, "ours": {}}
    config = {**state_config(3), "checkpoint": {"tag_validation": "Fail"}}
    for how, it in found.items():
        engine, place = engine_of(folder, config, all_in_one_group), target / how
        train(engine, [0])
        with hf_zero_stream.streaming() if how == "ours" else nullcontext():
            it["same tag"] = engine.save_checkpoint(str(place), tag="same"), (place / "same").is_dir()
            dist.barrier()
            own = f"rank{dist.get_rank()}"
            it["own tags"] = outcome_of(lambda: engine.save_checkpoint(str(target / "own"), tag=own))
            for name in (None, ""):
                it[f"save_dir={name!r}"] = outcome_of(lambda: engine.save_checkpoint(name))
            it["load_dir=None"] = outcome_of(lambda: engine.load_checkpoint(None))
            it["nothing there"] = outcome_of(lambda: engine.load_checkpoint(str(target / "nothing")))
            it["no such tag"] = outcome_of(lambda: engine.load_checkpoint(str(place), tag="nothing"))
            it["a tag with a folder"] = engine.save_checkpoint(str(place), tag="a/b"), (place / "a" / "b").is_dir()
            found_there, client_state = engine.load_checkpoint(str(place))
            it["latest"] = found_there.startswith(str(place / "a" / "b")), client_state.get("epoch")
    return found


def test_as_deepspeed_does(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(2, saves_and_loads, zoo_checkpoint("llama"), tmp_path)):
        assert found["ours"] == found["stock"]
        assert f"[rank={rank}] The checkpoint tag name 'rank{rank}' is not consistent" in found["ours"]["own tags"]
        assert found["ours"]["save_dir=None"].startswith("ValueError: save_dir must be a non-empty string")
        assert found["ours"]["nothing there"] == (None, None) and found["ours"]["latest"] == (True, None)
    assert (tmp_path / "ours" / "same" / "model.safetensors").is_file()
    assert not (tmp_path / "own").exists() or not list((tmp_path / "own").iterdir())


def ours_alone(folder: Path, target: Path) -> dict[str, Any]:
    said: list[str] = []
    foreign.logger.warning_once = said.append  # type: ignore[method-assign]
    found: dict[str, Any] = {}
    config = {**state_config(3), "checkpoint": {"use_node_local_storage": True}}
    engine = engine_of(folder, config, all_in_one_group)
    train(engine, [0])
    with hf_zero_stream.streaming():
        engine.save_checkpoint(str(target / "local"))
        engine._config.use_node_local_storage = False
        engine.save_checkpoint(str(target / "ours"))
        found["custom"] = outcome_of(lambda: engine.load_checkpoint(str(target / "ours"), custom_load_fn=print))
        engine._config.load_universal_checkpoint = True
        found["universal"] = engine.load_checkpoint(str(target / "ours"))[0]
        (target / "ours" / "latest_universal").write_text("elsewhere")
        found["another universal"] = outcome_of(lambda: engine.load_checkpoint(str(target / "ours")))
        config = state_config(3)
        del config["optimizer"], config["scheduler"]
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, ds_config=config)
        without, *_ = deepspeed.initialize(model=model, config=config)
        without.load_checkpoint(str(target / "ours"))
    parts = [[param.ds_tensor.clone() for param in each.module.parameters()] for each in (engine, without)]
    found["weights"] = all(map(torch.equal, *parts))
    found["said"] = " | ".join(said)
    return found


def test_what_deepspeed_has_no_answer_for(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    results = run_ranks(2, ours_alone, zoo_checkpoint("llama", torch.bfloat16), tmp_path)
    for found in results:
        assert found["custom"].startswith("UnsupportedError: ") and "custom_load_fn" in found["custom"]
        assert found["universal"] == str(tmp_path / "ours" / "global_step1")
        assert re.match("[A-Za-z]*Error: ", str(found["another universal"])), "DeepSpeed looks for elsewhere/"
        assert found["weights"]
    assert "saved by DeepSpeed, in its own format: the config has use_node_local_storage" in results[0]["said"]
    assert list((tmp_path / "local").glob("*/*_optim_states.pt"))
    assert not any(map(entries_of_deepspeed, (tmp_path / "ours").iterdir()))
