"""accelerate inside ``streaming()``.

- accelerate inside ``streaming()``: all that ``save_state`` saves of a script comes back, as without us.
- Accumulation of gradients by accelerate: states are saved after any step, and not saved or loaded within one.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from torch.utils.data import DataLoader

import hf_zero_stream
from hf_zero_stream import StreamingConfig
from hf_zero_stream.checkpoint.deepspeed_names import is_guard_file
from hf_zero_stream.state import callers, foreign
from tests.state.test_homes import decayed_or_not
from tests.state.test_refused import message_of
from tests.support.cluster import run_ranks
from tests.support.fsdp2 import announce, force_fsdp_on_cpu, load
from tests.support.parity import ds_config
from tests.support.trainers import by_deepspeed, own_optimizer
from tests.support.training_state import accelerated_steps
from tests.support.trainings import Training
from tests.support.zoo import Checkpoint


class Position:
    """What a script registers for its checkpoints."""

    batches = 0

    def state_dict(self) -> dict[str, int]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.batches = state["batches"]


def accelerator_of(kind: str, project: Path) -> Any:
    """One that names its checkpoints itself, and keeps two; `kind`: FSDP2, or the stage of ZeRO."""
    naming = ProjectConfiguration(project_dir=str(project), automatic_checkpoint_naming=True, total_limit=2)
    if kind == "FSDP2":
        announce(cpu_ram_efficient_loading=True, state_dict_type="SHARDED_STATE_DICT")
        force_fsdp_on_cpu()
        return Accelerator(project_config=naming)
    return by_deepspeed(own_optimizer(ds_config(stage=int(kind))), project_config=naming)


def train(folder: Path, project: Path, kind: str, resumes: bool, config: StreamingConfig) -> dict[str, Any]:
    """Six steps, with saves after the first four; or the last two, from the newest save."""
    accelerator = accelerator_of(kind, project)
    rows = torch.randint(5, 300, (36, 9), generator=torch.Generator().manual_seed(1))
    loader = DataLoader(list(rows), batch_size=3, shuffle=True)  # type: ignore[arg-type]
    hooked: list[tuple[Any, ...]] = []
    steps = []
    with hf_zero_stream.streaming(config):
        torch.manual_seed(2)
        model = load("llama", folder)
        optimizer = torch.optim.AdamW(decayed_or_not(model, freezes=True), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        position = Position()
        accelerator.register_for_checkpointing(position)
        accelerator.register_save_state_pre_hook(lambda models, weights, to: hooked.append((len(models), weights)))
        accelerator.register_load_state_pre_hook(lambda models, place: hooked.append((models, Path(place).name)))
        if resumes:
            accelerator.load_state()
        batches = accelerator.skip_first_batches(loader, position.batches)
        for _, ids in zip(range(position.batches, 6), batches, strict=False):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            position.batches += 1
            steps.append((accelerator.gather(loss.detach()).tolist(), scheduler.get_last_lr(), ids.tolist()))
            if not resumes and position.batches <= 4:
                accelerator.save_state()
    return {"steps": steps, "hooked": hooked}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["3", "1", "FSDP2"])
def test_what_a_script_saves(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, kind: str) -> None:
    """Registered objects, hooks, names and numbers of checkpoints, two groups, frozen parameters, data, rates."""
    found, kept = {}, {}
    for name, config in (("ours", StreamingConfig()), ("stock", StreamingConfig(training_state=False))):
        arguments = (zoo_checkpoint("llama"), tmp_path / name, kind)
        first, again = (run_ranks(2, train, *arguments, resumes, config) for resumes in (False, True))
        assert [rank["steps"][4:] for rank in first] == [rank["steps"] for rank in again], name
        assert again[0]["hooked"] == [([], "checkpoint_3")]
        found[name] = first + again
        folders = sorted((tmp_path / name / "checkpoints").iterdir())
        assert [folder.name for folder in folders] == ["checkpoint_2", "checkpoint_3"]
        kept[name] = any(folders[1].glob("pytorch_model/*/training_state.json"))
    assert found["ours"] == found["stock"] and kept == {"ours": True, "stock": False}


def train_two(folder: Path, target: Path) -> dict[str, Any]:
    """Two models that one accelerator has prepared, under FSDP2: two steps, and two more, twice."""
    announce(cpu_ram_efficient_loading=True, state_dict_type="SHARDED_STATE_DICT")
    force_fsdp_on_cpu()
    accelerator = Accelerator()
    trained = []
    with hf_zero_stream.streaming():
        for number in (1, 2):
            model = load("llama", folder)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 / number)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
            model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
            trained.append(Training(model, optimizer, accelerator, scheduler))

        def steps(numbers: range) -> list[Any]:
            return [(each.train([n]), each.scheduler.get_last_lr()) for n in numbers for each in trained]

        steps(range(2))
        accelerator.save_state(str(target))
        continued = steps(range(2, 4))
        accelerator.load_state(str(target))
        return {"continued": continued, "resumed": steps(range(2, 4))}


@pytest.mark.slow
def test_two_models(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Each has a folder of its own."""
    for found in run_ranks(2, train_two, zoo_checkpoint("llama"), tmp_path):
        assert found["resumed"] == found["continued"]
    for name in ("pytorch_model", "pytorch_model_1"):
        assert (tmp_path / name / "global_step2" / "training_state.json").exists()


def accumulating(zero: bool) -> Any:
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
    notices: list[str] = []
    callers.logger.log = lambda level, text: notices.append(text)  # type: ignore[method-assign]
    accelerator = accumulating(zero)
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
            "notices": notices,
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
    assert [len(of_rank["notices"]) for of_rank in found] == [1, 0] and "--stock-states" in found[0]["notices"][0]
    assert list((tmp_path / "between").glob("pytorch_model/*/training_state.json"))
    assert list((tmp_path / "middle").rglob("*_optim_states.pt" if zero else "optimizer_0/*.distcp"))
    beside = [*(tmp_path / "middle").glob("*"), *(tmp_path / "middle").glob("*/*")]
    assert not any(map(is_guard_file, beside))
