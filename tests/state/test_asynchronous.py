"""Training states that are saved in the background.

- ``save_state(asynchronous=True)``: the files of a synchronous save, errors on all ranks, one save at a time.
- Programs that end while a state is saved in the background: the save comes to its end, or says that it did not.
"""

import errno
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
import torch.distributed as dist
from safetensors.torch import load_file

import hf_zero_stream
from hf_zero_stream import StreamingConfig
from hf_zero_stream.checkpoint.formats import UNFINISHED
from hf_zero_stream.errors import SaveError
from hf_zero_stream.saving import pending, preparation
from hf_zero_stream.saving.room import Room
from tests import sampling
from tests.support.cluster import free_port, run_ranks, run_ranks_expecting_errors
from tests.support.commands import command_environment
from tests.support.forks import Forks
from tests.support.saving import saves_with
from tests.support.trainers import losses_of
from tests.support.training_state import all_in_one_group, engine_of, plain_training, state_config, train, train_plain
from tests.support.zoo import Checkpoint
from tests.zero.test_training import make_trainer


SHARDS = {"max_shard_size": "40KB"}
CONFIGS = {
    "stage 3": state_config(3),
    "stage 2": state_config(2),
    "offload": state_config(3, offload_optimizer={"device": "cpu"}, offload_param={"device": "cpu"}),
}


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its path there."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextmanager
def full_disk(rank: int) -> Iterator[None]:
    """Inside, writes of `rank` fail."""

    def pwritev(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    original = os.pwritev
    if dist.get_rank() == rank:
        os.pwritev = pwritev  # type: ignore[assignment]
    try:
        yield
    finally:
        os.pwritev = original


def save_both_ways(
    folder: Path, target: Path, configs: dict[str, Any], room: int | Literal["all"] | None
) -> dict[str, Any]:
    """For each config, states of two steps, saved in both ways; those saved in the background train on meanwhile."""
    planned: list[str] = []
    plan_anew = preparation.SavePlanner._planned

    def counted(*args: Any, **kwargs: Any) -> Any:
        planned.append(name)
        return plan_anew(*args, **kwargs)

    preparation.SavePlanner._planned = counted  # type: ignore[method-assign]
    memories: dict[str, list[int]] = {}
    for name, config in configs.items():
        engine = engine_of(folder, config, all_in_one_group)
        for steps in (range(2), range(2, 3)):
            train(engine, steps)
            hf_zero_stream.save_state(engine, target / name / "waited", data={"step": steps[-1]}, **SHARDS)
            with saves_with(verify="full"):
                where = {"folder": target / name / "background", "data": {"step": steps[-1]}, "snapshot_bytes": room}
                saved = hf_zero_stream.save_state(engine, asynchronous=True, **where, **SHARDS)
            assert isinstance(saved, hf_zero_stream.PendingSave)
            train(engine, (7, 8))  # changes all values
            report = saved.wait()
            assert saved.done and report.verified and report.ranks[1].seconds["copy"] > 0
            engine_bytes = sum(path.stat().st_size for path in (target / name / "background").rglob("*.safetensors"))
            assert 0 < report.bytes_written <= engine_bytes
            mine = report.ranks[dist.get_rank()]
            if room == "all":
                assert mine.bytes_copied == mine.bytes_written
                kept = Room.of_model(engine.module, mine.bytes_written)
            else:
                assert mine.bytes_copied <= mine.bytes_written // 8
                kept = Room.of_model(engine.module, mine.bytes_written // 8)
            memories.setdefault(name, []).append(id(kept))
            hf_zero_stream.load_state(engine, target / name / "waited")  # as before the two steps
    return {"planned": planned, "memories": memories}


@pytest.mark.parametrize("room", [None, "all"])
def test_files_are_those_of_a_synchronous_save(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, room: int | Literal["all"] | None
) -> None:
    configs = dict(sampling.every(2, CONFIGS.items()))
    found = run_ranks(2, save_both_ways, zoo_checkpoint("qwen3_moe"), tmp_path, configs, room, timeout=300)
    for name in configs:
        waited, background = tmp_path / name / "waited", tmp_path / name / "background"
        assert sorted(path.name for path in waited.glob("global_step*")) == ["global_step2", "global_step3"]
        assert tree(waited) == tree(background), name
        assert not list(background.glob(f"{UNFINISHED}*"))
    for of_rank in found:
        assert of_rank["planned"] == [*configs], "the plan is kept"
        assert all(len(set(pointers)) == 1 for pointers in of_rank["memories"].values()), "the copies' memory, too"


def save_with_errors(folder: Path, target: Path) -> list[float]:
    engine = engine_of(folder, state_config(3), all_in_one_group)
    train(engine, range(2))
    save = {"folder": target, "asynchronous": True, **SHARDS}
    hf_zero_stream.save_state(engine, **save)
    train(engine, range(2, 4))
    with full_disk(1):
        saved = hf_zero_stream.save_state(engine, **save)  # after the one that is under way
        with pytest.raises(SaveError, match="No space left"):
            saved.wait()
        hf_zero_stream.save_state(engine, **save)
        with pytest.raises(SaveError, match="No space left"):  # at the next call: nobody has waited
            hf_zero_stream.save_state(engine, **save)
    assert (target / "latest").read_text() == "global_step2"
    dist.barrier()
    resumed = hf_zero_stream.load_state(engine, target)
    assert resumed.tag == "global_step2"
    losses = train(engine, (2, 3))
    hf_zero_stream.save_state(engine, **save)
    assert hf_zero_stream.load_state(engine, target).tag == "global_step4"  # it waits
    hf_zero_stream.save_state(engine, tag="last", **save)  # as does the end of the process
    return losses


def test_errors_and_order(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    run_ranks(2, save_with_errors, zoo_checkpoint("llama"), tmp_path / "state")
    assert (tmp_path / "state" / "latest").read_text() == "last"
    assert sorted(path.name for path in (tmp_path / "state").iterdir() if path.is_dir()) == [
        "global_step2",
        "global_step4",
        "last",
    ]


def die_in_the_background(folder: Path, target: Path, dying: int) -> None:
    engine = engine_of(folder, state_config(3), all_in_one_group)
    hf_zero_stream.save_state(engine, target, **SHARDS)
    train(engine, range(1))

    def end(*_: Any) -> int:
        os._exit(1)

    if dist.get_rank() == dying:
        os.pwritev = end  # type: ignore[assignment]
    hf_zero_stream.save_state(engine, target, asynchronous=True, **SHARDS).wait()  # type: ignore[union-attr]


@pytest.mark.plugin("watch")
@pytest.mark.parametrize("dying", [0, 1])
def test_a_rank_dies(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, dying: int) -> None:
    outcomes = run_ranks_expecting_errors(2, die_in_the_background, zoo_checkpoint("llama"), tmp_path, dying)
    assert outcomes[dying].error_type == "Died"
    other = outcomes[1 - dying]
    assert other.error_type == "PeerError" and f"rank {dying} has died" in str(other.error_message)
    assert (tmp_path / "latest").read_text() == "global_step0"


def save_without_engine(folder: Path, target: Path, sizes: dict[str, Any] | None) -> None:
    training = plain_training(folder, sizes)
    train_plain(*training, range(2))
    model, optimizer, scheduler = training
    arguments = {"optimizer": optimizer, "scheduler": scheduler, **SHARDS}
    hf_zero_stream.save_state(model, target / "waited", **arguments)
    hf_zero_stream.save_state(model, target / "background", asynchronous=True, **arguments)
    with saves_with(write_from="rank0"):
        at_once = hf_zero_stream.save_state(model, target / "one writer", asynchronous=True, **arguments)
    assert isinstance(at_once, hf_zero_stream.PendingSave) and at_once.done and at_once.wait().bytes_written
    model.config.use_cache = not model.config.use_cache  # what a kept plan has written before
    hf_zero_stream.save_state(model, target / "other config", asynchronous=True, **arguments)
    train_plain(*training, (7,))


@pytest.mark.parametrize("sizes", [{"fsdp_size": 2}, None], ids=["fsdp", "one rank"])
def test_without_an_engine(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, sizes: dict[str, Any] | None
) -> None:
    run_ranks(1 if sizes is None else 2, save_without_engine, zoo_checkpoint("llama"), tmp_path, sizes)
    waited, background, other = (tree(tmp_path / name) for name in ("waited", "background", "other config"))
    assert waited == background == tree(tmp_path / "one writer")
    assert waited.keys() == other.keys()
    assert {name for name in waited if waited[name] != other[name]} == {"config.json"}


TRAINER: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}


def train_by_trainer(folder: Path, output: Path, asynchronous: bool) -> dict[str, Any]:
    """Three checkpoints, of which the best and the last stay."""
    saved_by: set[str] = set()
    run = pending.PendingSave._run

    def noted(self: Any, work: Any) -> None:
        saved_by.add(threading.current_thread().name)
        run(self, work)

    config = StreamingConfig(asynchronous_save=asynchronous, progress=False)
    evaluates: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    with hf_zero_stream.streaming(config), pytest.MonkeyPatch.context() as patch:
        patch.setattr(pending.PendingSave, "_run", noted)
        trainer = make_trainer(folder, output, True, max_steps=3, **TRAINER, **evaluates)
        trainer.train()
        best = Path(trainer.state.best_model_checkpoint).name
        evaluated = trainer.evaluate()["eval_loss"]
        kept = sorted(path.name for path in output.glob("checkpoint-*"))
    return {"losses": losses_of(trainer), "best": best, "evaluated": evaluated, "kept": kept, "saved_by": saved_by}


def resume_by_trainer(folder: Path, output: Path) -> list[float]:
    from transformers import Trainer  # noqa: F401 - before the block, as scripts do

    with hf_zero_stream.streaming(StreamingConfig(asynchronous_save=True)):
        trainer = make_trainer(folder, output, True, max_steps=4, **TRAINER)
        trainer.train(resume_from_checkpoint=True)
    return losses_of(trainer)


@pytest.mark.slow
def test_trainer(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """What stays, the best model, and what a resume finds are those of saves that the Trainer waits for."""
    found = {}
    for asynchronous in (False, True):
        output = tmp_path / str(asynchronous)
        for of_rank in run_ranks(2, train_by_trainer, zoo_checkpoint("llama"), output, asynchronous):
            assert of_rank.pop("saved_by") == ({"hf_zero_stream-save"} if asynchronous else set())
            assert of_rank["best"] in of_rank["kept"] and len(of_rank["kept"]) == 2
            found[asynchronous] = of_rank
    assert found[True] == found[False]
    waited, background = (tree(tmp_path / str(asynchronous)) for asynchronous in (False, True))
    compared = [name for name in waited if name.endswith(".safetensors") and "rng" not in name]
    assert waited.keys() == background.keys() and len(compared) == 4  # weights and a state in each
    assert all(waited[name] == background[name] for name in compared)
    dead = output / "checkpoint-9"  # as a save that has died leaves it
    (dead / f"{UNFINISHED}dead").mkdir(parents=True)
    assert run_ranks(2, resume_by_trainer, zoo_checkpoint("llama"), output)[0][:3] == found[True]["losses"]


PROGRAM = """
import os
import sys
import threading
import time

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import hf_zero_stream

folder, ending = sys.argv[-2:]
dist.init_process_group("gloo")
tiny = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=9)
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**tiny))
optimizer = torch.optim.AdamW(model.parameters())
hf_zero_stream.save_state(model, folder, optimizer=optimizer)
write = os.pwritev


def write_when_the_program_ends(*arguments):
    while threading.main_thread().is_alive():
        time.sleep(0.01)
    if ending == "failure" and dist.get_rank() == 1:
        raise OSError(28, "No space left on device")
    return write(*arguments)


os.pwritev = write_when_the_program_ends
how = {"asynchronous": True, "snapshot_bytes": "all"}  # so that values may be changed
saved = hf_zero_stream.save_state(model, folder, optimizer=optimizer, tag="last", **how)
with torch.no_grad():
    for param in model.parameters():
        param.fill_(7)  # the bytes are those of the call
assert not saved.done
if ending == "destroyed":
    dist.destroy_process_group()
if ending == "exit":
    sys.exit(3)
if ending == "error" or (ending == "error of rank 1" and dist.get_rank() == 1):
    raise RuntimeError("the training has failed")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "ending"),
    [
        ("deepspeed", "exit"),
        ("torchrun", "failure"),
        ("torchrun", "end"),
        ("deepspeed", "end"),
        ("deepspeed", "destroyed"),
        ("torchrun", "destroyed"),
        ("torchrun", "error"),
        ("deepspeed", "error"),
        ("torchrun", "error of rank 1"),
        ("deepspeed", "failure"),
    ],
)
def test_a_program_ends(tmp_path: Path, launcher: str, ending: str) -> None:
    """Under torchrun the store is the launcher's; under deepspeed it is in the process of rank 0, which ends too."""
    (tmp_path / "program.py").write_text(PROGRAM)
    options = {"torchrun": ["--standalone", "--nproc-per-node", "2"], "deepspeed": ["--num_accelerators", "2"]}[
        launcher
    ]
    if launcher == "deepspeed":
        options += ["--master_port", str(free_port())]
    done = subprocess.run(
        [launcher, *options, "program.py", str(tmp_path / "state"), ending],
        cwd=tmp_path,
        env=command_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    check(tmp_path, ending, done.returncode, done.stdout)


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks("import torch, transformers.modeling_utils", environment=command_environment()) as forks:
        yield forks


@pytest.mark.parametrize("ending", ["failure", "error"])
def test_a_program_without_a_launcher_ends(forks: Forks, tmp_path: Path, ending: str) -> None:
    """The store is in the process of rank 0."""
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [forks.start(PROGRAM, str(tmp_path / "state"), ending, **group, RANK=str(rank)) for rank in range(2)]
    codes, *printed = zip(*(rank.ended() for rank in ranks), strict=True)
    check(tmp_path, ending, max(codes), "\n".join(text for of_ranks in printed for text in of_ranks))


def check(tmp_path: Path, ending: str, code: int, printed: str) -> None:
    said = "A save in the background has failed" in printed
    assert said == (ending == "failure"), printed
    assert (code == 0) == (ending in ("end", "destroyed", "failure")), printed
    newest = (tmp_path / "state" / "latest").read_text()
    assert newest == ("global_step0" if ending == "failure" else "last"), printed
    assert not list((tmp_path / "state").glob(".*")) or ending == "failure"
    states = [path.name for path in (tmp_path / "state").iterdir() if (path / "training_state.json").exists()]
    assert newest in states and len(states) == (1 if ending == "failure" else 2)
    weights = load_file(tmp_path / "state" / "model.safetensors")
    assert not any((value == 7).all() for value in weights.values())
