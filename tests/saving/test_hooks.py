"""Inside ``streaming()`` the usual ways to save give what they give without it, and gather nothing."""

import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hf_zero_stream
from hf_zero_stream.errors import SaveError
from hf_zero_stream.ranks import rendezvous
from hf_zero_stream.saving import arguments as saving
from hf_zero_stream.saving.calls import run_on_leader
from tests import sampling
from tests.support.checkpoint_files import tensors_of
from tests.support.cluster import run_ranks, run_ranks_expecting_errors
from tests.support.messages import warnings_of
from tests.support.parity import ds_config
from tests.support.saving import SHARD_SIZE, different, gathers_counted, save_both_ways
from tests.support.trainers import by_deepspeed, join_as_launched, trainer_arguments
from tests.support.zoo import Checkpoint


INDEX = "model.safetensors.index.json"


def prepared(checkpoint: Path, stage: int = 3, **zero: Any) -> tuple[Any, Any]:
    """An accelerator and the engine that it made, as a training script has them."""
    config = ds_config(torch.bfloat16, stage=stage, stage3_gather_16bit_weights_on_model_save=True, **zero)
    accelerator = by_deepspeed(config)
    model = hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    return accelerator, accelerator.prepare(model)


def with_accelerate(checkpoint: Path, folder: Path, stage: int) -> dict[str, Any]:
    accelerator, engine = prepared(checkpoint, stage)
    found = save_both_ways(accelerator, engine, folder)
    if stage == 3:
        with hf_zero_stream.streaming(), gathers_counted() as gathers:
            engine.module.save_pretrained(folder / "alone", max_shard_size=SHARD_SIZE)
        found["alone"] = len(gathers)
    return found


@pytest.mark.parametrize("stage", [3, 2])
def test_accelerate(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, stage: int) -> None:
    checkpoint = zoo_checkpoint("qwen3_moe", torch.bfloat16)
    found = run_ranks(2, with_accelerate, checkpoint, tmp_path, stage)
    assert found == [{"stock": 2, "ours": 0, "alone": 0} if stage == 3 else {"stock": 0, "ours": 0}] * 2
    for name in ("state dict", "save_model"):
        differing = different(tmp_path / "ours" / name, tmp_path / "stock" / name)
        if stage == 3 and differing == [INDEX]:
            # Stock counts the elements of partitioned parameters as none, and padding as bytes of the checkpoint.
            ours, stock = (json.loads((tmp_path / how / name / INDEX).read_text()) for how in ("ours", "stock"))
            assert ours["weight_map"] == stock["weight_map"]
            differing = []
        assert differing == []
    if stage == 3:
        assert different(tmp_path / "alone", tmp_path / "ours" / "state dict") == []


def with_values_of_one(checkpoint: Path, folder: Path) -> None:
    """All ranks call, rank 0 with the values that DeepSpeed has gathered, the others with the None that it gave."""
    accelerator, engine = prepared(checkpoint)
    rank = dist.get_rank()
    for name, context in (("stock", nullcontext()), ("ours", hf_zero_stream.streaming())):
        values = engine._zero3_consolidated_16bit_state_dict()
        inner = values and {key.removeprefix("model."): value for key, value in values.items() if "model." in key}
        with context:
            engine.module.save_pretrained(
                folder / name / "main", is_main_process=rank == 0, state_dict=dict(values or {})
            )
            for late in (0, 2):
                dist.barrier()
                time.sleep(0.5 * (rank == late))
                of_all = folder / name / f"all, {late} late"
                engine.module.save_pretrained(of_all, state_dict=values and dict(values))
            engine.module.model.save_pretrained(folder / name / "a part", state_dict=inner)
            engine.module.save_pretrained(folder / name / "twice", state_dict=values and dict(values))
            engine.module.save_pretrained(folder / name / "twice", state_dict=values and dict(values))
            accelerator.save_model(engine, folder / f"{name} torch", safe_serialization=False)
        accelerator.wait_for_everyone()


def test_values_that_rank_0_has(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Nobody waits for a save by all ranks."""
    run_ranks(3, with_values_of_one, zoo_checkpoint("llama", torch.bfloat16), tmp_path, timeout=120)
    for name in ("main", "all, 0 late", "all, 2 late", "a part", "twice"):
        assert different(tmp_path / "ours" / name, tmp_path / "stock" / name) == [], name
    ours, stock = (torch.load(tmp_path / f"{name} torch" / "pytorch_model.bin") for name in ("ours", "stock"))
    assert ours.keys() == stock.keys() and all(torch.equal(ours[name], value) for name, value in stock.items())


def share(model: Any, what: str) -> Any:
    """As scripts do after the load, without a word to the model."""
    first, second = model.model.layers[:2]
    if what == "layer":
        model.model.layers[1] = first
    elif what == "mlp":
        second.mlp = first.mlp
    elif what == "weight":
        second.mlp.up_proj.weight = first.mlp.up_proj.weight
    else:
        model.lm_head.weight = model.model.embed_tokens.weight
    return model


def with_shared_weights(checkpoint: Path, folder: Path, stage: int) -> None:
    for what in ("layer", "mlp", "weight", "head"):
        accelerator = by_deepspeed(
            ds_config(torch.float32, stage=stage, stage3_gather_16bit_weights_on_model_save=True)
        )
        model = hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        engine = accelerator.prepare(share(model, what))
        for name, context in (("stock", nullcontext()), ("ours", hf_zero_stream.streaming())):
            with context:
                values, place = accelerator.get_state_dict(engine), folder / f"{what} {name}"
                try:
                    engine.module.save_pretrained(place, state_dict=values, is_main_process=dist.get_rank() == 0)
                except RuntimeError as error:  # of rank 0, which alone has values
                    assert name == "stock" and "shared tensors" in str(error)
            dist.barrier()
        hf_zero_stream.save_state(engine, folder / f"{what} state")
        hf_zero_stream.load_state(engine, folder / f"{what} state")


@pytest.mark.parametrize("stage", [3, 2])
def test_shared_weights(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, stage: int) -> None:
    """Stock's tensors; and what it refuses at stage 3 is saved as it is at stage 2, by all names."""
    checkpoint = zoo_checkpoint("llama")
    run_ranks(2, with_shared_weights, checkpoint, tmp_path, stage, timeout=120)
    whole = tensors_of(checkpoint)
    for what in ("layer", "mlp", "weight", "head"):
        ours, stock = tmp_path / f"{what} ours", tmp_path / f"{what} stock"
        assert tensors_of(ours).keys() == tensors_of(tmp_path / f"{what} state").keys()
        if stage == 3 and what in ("mlp", "weight"):
            assert not (stock / "model.safetensors").exists()
            found = tensors_of(ours)
            names = [
                name
                for name in whole
                if name.startswith("model.layers.1.mlp") and ("up_proj" in name or what == "mlp")
            ]
            assert found.keys() == whole.keys() and names
            assert all(torch.equal(found[name], whole[name.replace(".1.", ".0.", 1)]) for name in names)
        else:
            assert different(ours, stock) == [], what
    assert len(tensors_of(tmp_path / "layer ours")) == len(whole) - (9 if stage == 3 else 0)


def values_of_one_among_others(checkpoint: Path, folder: Path) -> list[str]:
    """What rank 0 saves alone is no part of what all save next; what another rank alone was given is an error."""
    _, engine = prepared(checkpoint)
    model, rank = engine.module, dist.get_rank()
    values = engine._zero3_consolidated_16bit_state_dict()
    with hf_zero_stream.streaming():
        for number in range(3):
            for alone in ("first", "second"):
                if rank == 0:
                    model.save_pretrained(folder / f"{alone} {number}", state_dict=dict(values))
            time.sleep(0.3 * (rank == number))
            model.save_pretrained(folder / f"together {number}", state_dict=None)
        dist.barrier()
        given = {name: torch.zeros(1) for name in model.state_dict()} if rank == 1 else None
        errors = []
        if rank != 2:
            try:
                model.save_pretrained(folder / "of another", state_dict=given)
            except SaveError as error:
                errors.append(str(error))
        dist.barrier()
        model.save_pretrained(folder / "at the end")
    return errors


def test_values_of_one_among_others(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    checkpoint = zoo_checkpoint("llama", torch.bfloat16)
    errors = run_ranks(3, values_of_one_among_others, checkpoint, tmp_path, timeout=60)
    assert [len(found) for found in errors] == [1, 0, 0] and "another rank was given" in errors[0][0]
    saved = [f"{name} {number}" for name in ("first", "second", "together") for number in range(3)]
    for name in saved:
        assert different(tmp_path / name, tmp_path / "at the end") == [], name


def different_saves(checkpoint: Path, folder: Path) -> list[tuple[str, float]]:
    """Rank 0 saves alone, under ZeRO-3, while the others train on, come to another save, or have ended."""
    rendezvous.STUCK_S = 1.0
    accelerator, engine = prepared(checkpoint)
    rank, found = dist.get_rank(), []

    def errors_of(save: Callable[[], object]) -> None:
        began = time.monotonic()
        try:
            save()
        except SaveError as error:
            found.append((str(error), time.monotonic() - began))

    with hf_zero_stream.streaming():
        if rank == 0:
            errors_of(lambda: engine.module.save_pretrained(folder / "alone"))
        dist.barrier()
        if rank == 0:
            errors_of(lambda: accelerator.save_model(engine, folder / "alone"))
        dist.barrier()
        if rank == 0:
            errors_of(lambda: engine.module.save_pretrained(folder / "alone"))
        else:
            errors_of(lambda: hf_zero_stream.save_state(engine, folder / "state"))
        dist.barrier()
        engine.module.save_pretrained(folder / "together")
        if rank == 0:
            errors_of(lambda: engine.module.save_pretrained(folder / "alone"))
    return found


@pytest.mark.plugin("watch")
def test_saves_that_are_not_the_same(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """A rank that waits for one that goes on elsewhere is told so in seconds."""
    found = run_ranks(3, different_saves, zoo_checkpoint("llama", torch.bfloat16), tmp_path, timeout=60)
    assert [len(of_rank) for of_rank in found] == [4, 1, 1]
    goes_on = "has begun a collective without this rank"
    for (message, _), why in zip(found[0], (goes_on, goes_on, "different things", "has ended"), strict=True):
        assert why in message and ("take it out of" in message), message
    for message, _ in (found[0][2], found[1][0], found[2][0]):
        assert "Ranks came to save with different things" in message
        assert "a model" in message and "a training state" in message
    assert max(seconds for of_rank in found for _, seconds in of_rank) < 10
    assert sorted(path.name for path in tmp_path.iterdir()) == ["together"]


def with_trainer(checkpoint: Path, folder: Path, name: str) -> dict[str, Any]:
    if name != "ours, Trainer imported late":
        import transformers.trainer  # noqa: F401
    with hf_zero_stream.streaming() if name != "stock" else nullcontext(), gathers_counted() as gathers:
        from transformers import AutoModelForCausalLM, Trainer

        join_as_launched()
        arguments = trainer_arguments(folder / name / "run", max_steps=2, save_steps=2)
        assert arguments.world_size == 2
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        ids = torch.arange(16) * 37 % 300
        trainer = Trainer(model=model, args=arguments, train_dataset=[{"input_ids": ids, "labels": ids}] * 8)
        trainer.train()
        trainer.save_model(str(folder / name / "final"))
        dist.barrier()
    return {"gathers": len(gathers), "restored": "hf_zero_stream" not in Trainer.save_model.__code__.co_filename}


def test_trainer(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    checkpoint = zoo_checkpoint("qwen3_moe")
    gathers = {"stock": 2, "ours": 0, **({} if sampling.is_sample else {"ours, Trainer imported late": 0})}
    for name, count in gathers.items():
        found = run_ranks(2, with_trainer, checkpoint, tmp_path, name)
        assert found == [{"gathers": count, "restored": True}] * 2
        for folder in ("final", "run/checkpoint-2"):
            names = different(tmp_path / name / folder, tmp_path / "stock" / folder)
            assert set(names) <= {"training_args.bin", "trainer_state.json"}
            assert (tmp_path / name / folder / "model.safetensors").exists()


def saved_by_one(checkpoint: Path, folder: Path) -> None:
    saving.ARRIVAL_S = 1.0
    accelerator, engine = prepared(checkpoint)
    with hf_zero_stream.streaming():
        state_dict = accelerator.get_state_dict(engine)
        if accelerator.is_main_process:
            with pytest.raises(SaveError, match="Only 1 of 2 ranks .* accelerator.is_main_process"):
                accelerator.unwrap_model(engine).save_pretrained(folder / "alone", state_dict=state_dict)
        accelerator.wait_for_everyone()
        saving.ARRIVAL_S = 60.0
        accelerator.unwrap_model(engine).save_pretrained(folder / "together", state_dict=state_dict)


def test_saving_is_for_all_ranks(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    run_ranks(2, saved_by_one, zoo_checkpoint("qwen3_moe", torch.bfloat16), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["together"]


def by_rank_0_alone(checkpoint: Path, folder: Path, stage: int) -> None:
    """What needs no other rank, while these train on."""
    accelerator, engine = prepared(checkpoint, stage)
    for name, context in (("stock", nullcontext()), ("ours", hf_zero_stream.streaming())):
        with context:
            if accelerator.is_main_process:
                values = accelerator.get_state_dict(engine)
                accelerator.unwrap_model(engine).save_pretrained(folder / name, state_dict=values)
                torch.save(values, folder / name / "model.pt")
                accelerator.save_model(engine, folder / name / "save_model")
            accelerator.wait_for_everyone()


@pytest.mark.parametrize("stage", [1, 2])
def test_rank_0_alone(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, stage: int) -> None:
    """At stages 1 and 2 each rank has the whole model, and its state dict has values."""
    run_ranks(2, by_rank_0_alone, zoo_checkpoint("llama", torch.bfloat16), tmp_path, stage, timeout=60)
    for name in ("", "save_model"):
        assert different(tmp_path / "ours" / name, tmp_path / "stock" / name) == []
    ours, stock = (torch.load(tmp_path / name / "model.pt") for name in ("ours", "stock"))
    assert ours.keys() == stock.keys() and all(torch.equal(ours[name], value) for name, value in stock.items())


def reminded(checkpoint: Path, folder: Path) -> str:
    """What rank 0 says when it begins to wait for a save that ranks must make together."""
    saving.ARRIVAL_S = 3.0
    saving.SAVE = replace(saving.SAVE, reminder_s=0.5)
    accelerator, engine = prepared(checkpoint)
    with hf_zero_stream.streaming(), warnings_of("hf_zero_stream.ranks.rendezvous") as said:
        state_dict = accelerator.get_state_dict(engine)
        if accelerator.is_main_process:
            with pytest.raises(SaveError):
                accelerator.unwrap_model(engine).save_pretrained(folder, state_dict=state_dict)
        accelerator.wait_for_everyone()
    return "".join(said)


def test_the_first_reminder_says_what_to_change(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    said, _ = run_ranks(2, reminded, zoo_checkpoint("llama", torch.bfloat16), tmp_path)
    assert "for rank 1 to save. All of them must call save_pretrained" in said
    assert "take it out of `if accelerator.is_main_process:`" in said


def values_of_a_state_dict(checkpoint: Path) -> str:
    accelerator, engine = prepared(checkpoint)
    with hf_zero_stream.streaming():
        state_dict = accelerator.get_state_dict(engine)
        assert state_dict["model.embed_tokens.weight"].shape[1] == engine.module.config.hidden_size
        with pytest.raises(hf_zero_stream.errors.UnsupportedError, match="GatheredParameters") as caught:
            state_dict["model.embed_tokens.weight"].sum().item()
    return str(caught.value)


def test_a_state_dict_has_no_values(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    run_ranks(2, values_of_a_state_dict, zoo_checkpoint("qwen3_moe", torch.bfloat16))


def saved_while_leading(checkpoint: Path, folder: Path) -> None:
    """On one rank of two, what all ranks must call."""
    from hf_zero_stream import streaming

    accelerator, engine = prepared(checkpoint)
    with streaming():
        run_on_leader(engine, lambda: accelerator.save_model(engine, folder / "led"))


def test_save_model_in_a_save_that_rank_0_leads(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    first, second = run_ranks_expecting_errors(2, saved_while_leading, zoo_checkpoint("llama"), tmp_path)
    assert first.error_type == second.error_type == "UnsupportedError"
    assert "only rank 0 runs this code" in (first.error_message or "")
    assert max(first.seconds, second.seconds) < 60
