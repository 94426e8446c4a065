"""Methods that somebody has put in place of accelerate's, the Trainer's, DeepSpeed's or a model's own: they count."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from transformers import Trainer, TrainingArguments

import hf_zero_stream
from hf_zero_stream.checkpoint.deepspeed_names import entries_of_deepspeed
from tests import sampling
from tests.saving.test_hooks import prepared
from tests.support.checkpoint_files import tensors_of
from tests.support.cluster import run_ranks, run_ranks_expecting_errors
from tests.support.parity import ds_config, load_with, three_losses
from tests.support.saving import different
from tests.support.trainers import join_as_launched
from tests.support.zoo import ZOO, Checkpoint


def renamed(entries: dict[str, Any] | None) -> dict[str, Any] | None:
    """As instructlab-training does: other names, and values that are changed on the way."""
    return entries and {f"renamed.{name}": value * 2 for name, value in entries.items()}


# ---------------------------------------------------------------------------------------------------------- accelerate


@contextmanager
def replaced(accelerator: Any, where: str) -> Iterator[Any]:
    """Another `get_state_dict` (or `save`) on the object, in a subclass or on the class; gives what must stay."""
    cls, name = type(accelerator), "save" if where == "save" else "get_state_dict"
    before, bound = getattr(cls, name), getattr(accelerator, name)

    def on_object(*args: Any, **kwargs: Any) -> Any:
        if where == "save":
            return bound(renamed(args[0]), *args[1:], **kwargs)
        return renamed(bound(*args, **kwargs))

    def on_class(self: Any, *args: Any, **kwargs: Any) -> Any:
        return renamed(before(self, *args, **kwargs))

    if where == "subclass":
        accelerator.__class__ = type("Own", (cls,), {name: on_class})
    elif where == "class":
        setattr(cls, name, functools.wraps(before)(on_class))
    else:
        setattr(accelerator, name, on_object)
    found = getattr(accelerator, name)
    try:
        yield lambda: getattr(accelerator, name) == found
    finally:
        accelerator.__class__ = cls
        vars(accelerator).pop(name, None)
        setattr(cls, name, before)


def save_model(checkpoint: Path, folder: Path, places: list[str]) -> list[Any]:
    accelerator, engine = prepared(checkpoint)
    found = []
    for where in places:
        with replaced(accelerator, where) as is_there:
            for how in ("stock", "ours"):
                with hf_zero_stream.streaming() if how == "ours" else nullcontext():
                    accelerator.save_model(engine, folder / where / how)
                accelerator.wait_for_everyone()
                found.append(is_there())
        with hf_zero_stream.streaming(), replaced(accelerator, where) as is_there:  # put there inside of the block
            accelerator.save_model(engine, folder / where / "inside")
            accelerator.wait_for_everyone()
            found.append(is_there())
    return found


PLACES = ["object", "subclass", "class", "save"]


def test_of_an_accelerator(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    places = sampling.every(2, PLACES)
    assert run_ranks(2, save_model, zoo_checkpoint("llama"), tmp_path, places) == [[True] * 3 * len(places)] * 2
    for where in places:
        assert "renamed.lm_head.weight" in tensors_of(tmp_path / where / "stock")
        for how in ("ours", "inside"):
            assert different(tmp_path / where / how, tmp_path / where / "stock") == [], (where, how)


# -------------------------------------------------------------------------------------------------------- the Trainer


def save_by_trainer(checkpoint: Path, folder: Path, how: str, where: str) -> None:
    before = Trainer.save_model
    if where == "class":  # a script's own, before there is any block of ours
        Trainer.save_model = save_gathered
    join_as_launched()
    config = ds_config(stage3_gather_16bit_weights_on_model_save=True)
    del config["optimizer"]
    with hf_zero_stream.streaming() if how == "ours" else nullcontext():
        arguments = TrainingArguments(
            output_dir=str(folder / "run"),
            deepspeed=config,
            max_steps=1,
            per_device_train_batch_size=1,
            learning_rate=1e-3,
            save_strategy="no",
            report_to=[],
            accelerator_config={"use_configured_state": True},
        )
        model = load_with("plain", "AutoModelForCausalLM", checkpoint, {}, {})
        ids = torch.arange(16) * 37 % 300
        trainer = Trainer(model=model, args=arguments, train_dataset=[{"input_ids": ids, "labels": ids}] * 16)
        trainer.train()
        if where == "accelerator":
            get = trainer.accelerator.get_state_dict
            trainer.accelerator.get_state_dict = lambda *args, **kwargs: renamed(get(*args, **kwargs))
        elif where == "_save":
            save = trainer._save

            @functools.wraps(save)  # so that it says it is of the Trainer's module
            def save_renamed(output_dir: Any = None, state_dict: Any = None) -> None:
                save(output_dir, renamed(state_dict))

            trainer._save = save_renamed
        trainer.save_model(str(folder / where / how))
    Trainer.save_model = before


def save_gathered(self: Any, output_dir: Any = None, _internal_call: bool = False) -> None:
    """Waits for all ranks."""
    values = renamed(self.accelerator.get_state_dict(self.deepspeed))
    dist.barrier()
    if self.args.should_save:
        self._save(output_dir, state_dict=values)


@pytest.mark.parametrize("where", ["accelerator", "_save", "class"])
@pytest.mark.sample(1)
def test_of_a_trainer(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, where: str) -> None:
    checkpoint = zoo_checkpoint("llama")
    for how in ("stock", "ours"):
        run_ranks(2, save_by_trainer, checkpoint, tmp_path, how, where)
    assert "renamed.lm_head.weight" in tensors_of(tmp_path / where / "stock")
    differing = different(tmp_path / where / "ours", tmp_path / where / "stock")
    assert [name for name in differing if name != "training_args.bin"] == []


# ---------------------------------------------------------------------------------------------------------- a model's


def save_with_own(checkpoint: Path, folder: Path) -> dict[str, Any]:
    """What stands in for methods of a model during a save is gone afterwards, and the user's own is there."""
    model = load_with("streamed", "AutoModelForCausalLM", checkpoint, ds_config(), {})
    own: dict[str, Any] = {"num_parameters": lambda *args, **kwargs: 7, "get_parameter": model.get_parameter}
    vars(model).update(own)
    before = dict(vars(model))
    hf_zero_stream.save_pretrained(model, folder / "all")
    found = {"as before": vars(model).keys() == before.keys() and all(vars(model)[name] is own[name] for name in own)}
    calls = []

    def save_noted(save_directory: Any, *args: Any, **kwargs: Any) -> None:
        calls.append(save_directory)
        type(model).save_pretrained(model, save_directory, *args, **kwargs)
        (Path(save_directory) / "note.txt").write_text("saved")

    model.save_pretrained = save_noted
    hf_zero_stream.save_pretrained(model, folder / "own")
    return {**found, "stays": model.save_pretrained is save_noted, "calls": len(calls)}


def test_of_a_model(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """A `save_pretrained` in place of its class's is run by rank 0, as that of a class of its own."""
    found = run_ranks(2, save_with_own, zoo_checkpoint("llama"), tmp_path)
    assert found == [{"as before": True, "stays": True, "calls": calls} for calls in (1, 0)]
    assert different(tmp_path / "own", tmp_path / "all") == ["note.txt"]


def save_other_state_dict(checkpoint: Path, folder: Path, keep_vars: bool) -> None:
    """As recipes of adapters have it: `model.state_dict` gives a part."""
    model = load_with("streamed", "AutoModelForCausalLM", checkpoint, ds_config(), {})
    whole = model.state_dict

    def only_the_head(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {name: value for name, value in whole(keep_vars=keep_vars).items() if "lm_head" in name}

    model.state_dict = only_the_head
    hf_zero_stream.save_pretrained(model, folder)


def test_of_a_models_state_dict(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Under ZeRO-3, where a state dict has no values, one that gives no parameters is refused. It was saved, empty."""
    run_ranks(2, save_other_state_dict, zoo_checkpoint("llama"), tmp_path / "vars", True)
    assert tensors_of(tmp_path / "vars").keys() == {"lm_head.weight"}
    for outcome in run_ranks_expecting_errors(
        2, save_other_state_dict, zoo_checkpoint("llama"), tmp_path / "n", False
    ):
        assert outcome.error_type == "UnsupportedError"
        assert "LlamaForCausalLM.state_dict() gives for lm_head.weight neither a parameter" in outcome.error_message


# -------------------------------------------------------------------------------------------------------- an engine's


def save_by_engine(checkpoint: Path, folder: Path, where: str) -> bool:
    """Whether the checkpoint is DeepSpeed's own, with what somebody's method has put into it."""
    config = ds_config()
    model = load_with("streamed", "AutoModelForCausalLM", checkpoint, config, {})
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
    three_losses(engine, ZOO["llama"].inputs)
    get = engine.module_state_dict
    if where == "object":
        engine.module_state_dict = lambda **kwargs: {**get(**kwargs), "mine": torch.ones(1)}
    with hf_zero_stream.streaming():
        engine.save_checkpoint(str(folder), tag="now")
    dist.barrier()
    if not entries_of_deepspeed(folder / "now"):
        return False
    files = sorted((folder / "now").glob("*model_states.pt"))
    return all("mine" in torch.load(path, weights_only=False)["module"] for path in files)


def test_of_an_engine(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    for where, is_deepspeeds in sampling.every(2, (("object", True), ("nowhere", False))):
        assert run_ranks(2, save_by_engine, zoo_checkpoint("llama"), tmp_path / where, where) == [is_deepspeeds] * 2
