"""Checkpoints of the Trainer and of accelerate under FSDP2 inside ``streaming()``: any number of ranks goes on."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.utils.data import DataLoader

import hf_zero_stream
from hf_zero_stream import StreamingConfig
from hf_zero_stream.state.callers import Caller, entered
from tests.support.cluster import run_ranks
from tests.support.fsdp2 import announce, force_fsdp_on_cpu, load, make_accelerator
from tests.support.parity import ds_config
from tests.support.trainers import arguments_of, join_as_launched
from tests.support.training_state import TrainerRun
from tests.support.zoo import Checkpoint


def trainer_of(folder: Path, output: Path, run: TrainerRun) -> tuple[transformers.Trainer, list[list[int]]]:
    """A Trainer under FSDP2 or ZeRO-3, or of one rank alone, and the samples that it takes, batch by batch."""
    if run.zero:
        join_as_launched()
        config = ds_config(torch.float32, stage=run.stage)
        del config["optimizer"]
        settings: dict[str, Any] = {"deepspeed": {**config, "train_micro_batch_size_per_gpu": "auto"}}
    elif dist.get_world_size() == 1:
        force_fsdp_on_cpu()
        settings = {}
    else:
        force_fsdp_on_cpu()
        settings = {"fsdp": True, "fsdp_config": {"version": 2, "state_dict_type": run.state_dict_type}}
    args = arguments_of(
        output,
        per_device_train_batch_size=6 // dist.get_world_size() // run.accumulation,
        gradient_accumulation_steps=run.accumulation,
        per_device_eval_batch_size=2,
        max_steps=6,
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        learning_rate=1e-2,
        warmup_steps=2,
        **settings,
        **run.arguments,
    )
    model = load("llama", folder)
    rows = torch.randint(5, 300, (40, 9), generator=torch.Generator().manual_seed(1))
    taken: list[list[int]] = []

    def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
        if samples[0]["number"] >= 0:
            taken.append([sample["number"] for sample in samples])
        ids = torch.stack([sample["ids"] for sample in samples])
        return {"input_ids": ids, "labels": ids}

    data = [{"ids": row, "number": number} for number, row in enumerate(rows[:36])]
    eval_data = [{"ids": row, "number": -1} for row in rows[36:]]
    trainer = transformers.Trainer(
        model,
        args,
        data_collator=collate,
        train_dataset=data,
        eval_dataset=eval_data,  # type: ignore[arg-type]
    )
    return trainer, taken


def train(folder: Path, output: Path, run: TrainerRun) -> dict[str, Any]:
    with hf_zero_stream.streaming():
        trainer, taken = trainer_of(folder, output, run)
        trainer.args.remove_unused_columns = False
        trainer.train(resume_from_checkpoint=None if run.resume is None else str(run.resume))
    history = trainer.state.log_history
    return {
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "rates": [entry["learning_rate"] for entry in history if "loss" in entry],
        "best": min(entry["eval_loss"] for entry in history if "eval_loss" in entry),
        "at the end": trainer.evaluate()["eval_loss"],
        "taken": taken,
    }


def samples(found: list[dict[str, Any]], steps: int) -> list[list[int]]:
    """The samples that all ranks together took in each of the last steps, of 6 samples."""
    batches = list(zip(*(rank["taken"] for rank in found), strict=True))
    per_step = 6 // sum(map(len, batches[-1]))
    last = batches[-steps * per_step :]
    taken = [sum(last[number : number + per_step], ()) for number in range(0, len(last), per_step)]
    return [sorted(sum(of_step, [])) for of_step in taken]


EXPECTED = {
    "config.json",
    "generation_config.json",
    "latest",
    "model.safetensors",
    "rng_state_0.pth",
    "rng_state_1.pth",
    "scheduler.pt",
    "trainer_state.json",
    "training_args.bin",
}


@pytest.fixture(scope="module")
def trained(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, list[dict[str, Any]]]:
    """The model, the folder of a training of 6 steps by 2 ranks under FSDP2, and what these found."""
    folder, output = zoo_checkpoint("llama"), tmp_path_factory.mktemp("trained")
    run = TrainerRun(arguments={"save_total_limit": 2, "load_best_model_at_end": True})
    return folder, output, run_ranks(2, train, folder, output, run)


def test_folders_of_the_trainer(trained: tuple[Path, Path, list[dict[str, Any]]]) -> None:
    """What one expects of the Trainer, and beside it a state; the best model is loaded at the end."""
    folder, output, continued = trained
    assert all(found["best"] == found["at the end"] for found in continued)
    kept = sorted(path.name for path in output.iterdir() if path.name.startswith("checkpoint"))
    assert len(kept) == 2 and kept[-1] == "checkpoint-6"
    names = {path.name for path in (output / kept[0]).iterdir() if not path.name.startswith("pytorch_model_fsdp")}
    state = next((output / kept[0]).glob("global_step*/training_state.json"))
    assert (output / kept[0] / "model.safetensors").stat().st_mtime_ns < state.stat().st_mtime_ns, "saved once"
    assert names == EXPECTED | {f"global_step{kept[0].removeprefix('checkpoint-')}"}


@pytest.mark.slow
def test_trainer(trained: tuple[Path, Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    """With the same global batch, 3 ranks go on with the samples and the learning rates that 2 would have had."""
    folder, _, _ = trained
    first = tmp_path / "first"
    continued = run_ranks(2, train, folder, first, TrainerRun(state_dict_type="SHARDED_STATE_DICT"))
    same = run_ranks(2, train, folder, tmp_path / "same", TrainerRun(first / "checkpoint-2"))
    assert [found["losses"] for found in same] == [found["losses"] for found in continued]
    again = TrainerRun(first / "checkpoint-2", arguments={"ignore_data_skip": True})
    anew = run_ranks(2, train, folder, tmp_path / "anew", again)
    # The last one that it took was for a step that it did not make.
    assert samples(anew, len(anew[0]["taken"]))[:4] == samples(continued, 6)[:4]
    three = run_ranks(3, train, folder, tmp_path / "three", TrainerRun(first / "checkpoint-2", accumulation=2))
    assert samples(three, 4) == samples(continued, 4) and len(set(map(tuple, samples(three, 4)))) == 4
    assert three[0]["rates"] == continued[0]["rates"]
    assert three[0]["losses"] == pytest.approx(continued[0]["losses"], rel=1e-3)
    back = run_ranks(2, train, folder, tmp_path / "back", TrainerRun(tmp_path / "three" / "checkpoint-4"))
    assert samples(back, 2) == samples(continued, 2) and back[0]["rates"] == continued[0]["rates"]
    assert back[0]["losses"] == pytest.approx(three[0]["losses"], rel=1e-3)
    alone = run_ranks(1, train, folder, tmp_path / "alone", TrainerRun(first / "checkpoint-2"))
    assert samples(alone, 4) == samples(continued, 4) and alone[0]["rates"] == continued[0]["rates"]
    assert alone[0]["losses"] == pytest.approx(continued[0]["losses"], rel=1e-3)
    zero = run_ranks(3, train, folder, tmp_path / "zero", TrainerRun(first / "checkpoint-2", zero=True))
    assert zero[0]["losses"] == pytest.approx(continued[0]["losses"], rel=1e-3)
    last = run_ranks(2, train, folder, tmp_path / "last", TrainerRun(tmp_path / "zero" / "checkpoint-4"))
    assert last[0]["losses"] == pytest.approx(continued[0]["losses"], rel=1e-3)
    assert last[0]["rates"] == continued[0]["rates"] and samples(last, 2) == samples(continued, 2)


STEPS = 6


def accelerated(folder: Path, target: Path, source: Path | None, streams: bool) -> dict[str, Any]:
    """Save after two of six steps under accelerate's FSDP2, or go on from there; a step has 6 samples."""
    announce(cpu_ram_efficient_loading=True, state_dict_type="SHARDED_STATE_DICT")
    accelerator = make_accelerator()
    batch = 6 // dist.get_world_size()
    rows = torch.randint(5, 300, (36, 9), generator=torch.Generator().manual_seed(1))
    loader = DataLoader(list(rows), batch_size=batch)  # type: ignore[arg-type]
    model = load("llama", folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = transformers.get_cosine_schedule_with_warmup(optimizer, len(loader) // STEPS, len(loader))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses, rates = [], []
    with hf_zero_stream.streaming(StreamingConfig(training_state=streams)):
        if source is not None:
            accelerator.load_state(str(source))
        for step, ids in enumerate(loader):
            if source is not None and step < 2:
                continue
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
            rates.append(scheduler.get_last_lr()[0])
            if source is None and step == 1:
                accelerator.save_state(str(target))
    return {"losses": losses[-4:], "rates": rates[-4:]}


@pytest.mark.slow
def test_accelerate(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Rates too: accelerate steps a scheduler once for each rank. Its own folders load as before."""
    folder = zoo_checkpoint("llama")
    first = run_ranks(2, accelerated, folder, tmp_path / "first", None, True)[0]
    state = tmp_path / "first" / "pytorch_model"
    assert (state / "model.safetensors").exists() and (state / "latest").read_text() == "global_step2"
    assert not [*state.parent.glob("optimizer*"), *state.parent.rglob("*.distcp")]
    assert run_ranks(2, accelerated, folder, tmp_path, tmp_path / "first", True)[0] == first
    others = run_ranks(3, accelerated, folder, tmp_path, tmp_path / "first", True)[0]
    assert others["rates"] == pytest.approx(first["rates"], rel=1e-12)
    assert others["losses"] == pytest.approx(first["losses"], rel=1e-3)
    run_ranks(2, accelerated, folder, tmp_path / "theirs", None, False)
    assert not (tmp_path / "theirs" / "pytorch_model").exists()
    assert run_ranks(2, accelerated, folder, tmp_path, tmp_path / "theirs", True)[0] == first


def test_a_model_without_its_optimizer_is_saved() -> None:
    saved: list[str] = []
    with entered(Caller()) as caller:
        caller.waiting[0] = lambda: saved.append("model")
    assert saved == ["model"]
