"""Loads that each rank makes by itself wait for nobody; what all must do fails alike."""

import hashlib
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

import hf_zero_stream
from hf_zero_stream.errors import ConfigError, HfZeroStreamError, PeerError, ReadError
from hf_zero_stream.holdings.introspection import is_streamed
from hf_zero_stream.ranks import coordinator as coordinator_module
from hf_zero_stream.ranks import presence, rendezvous
from hf_zero_stream.ranks.coordinator import Coordinator, meeting
from hf_zero_stream.ranks.rendezvous import LOAD
from tests.support.cluster import SOON_S, run_ranks
from tests.support.messages import error_of, message_of
from tests.support.parity import ds_config
from tests.support.zoo import Checkpoint


def digest(model: Any) -> str:
    state = hashlib.sha256()
    for name, value in model.state_dict().items():
        state.update(name.encode() + value.contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def load(folder: Path, share_reads: bool = True, **kwargs: Any) -> dict[str, Any]:
    """How long a load takes outside ZeRO-3, whether ranks shared it, and what it gives; or what it raised."""
    began, found = time.monotonic(), dict[str, Any]()
    try:
        with hf_zero_stream.streaming(hf_zero_stream.StreamingConfig(share_reads=share_reads)):
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, **kwargs)
        found = {"shared": is_streamed(model), "digest": digest(model), "error": ""}
    except (RuntimeError, ValueError) as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    return found | {"seconds": time.monotonic() - began}


def together(folders: list[Path]) -> dict[str, Any]:
    return load(folders[0])


def one_after_the_other(folders: list[Path]) -> dict[str, Any]:
    """As ``with accelerator.main_process_first()``; of loads that are not shared none waits for another rank."""
    if dist.get_rank():
        dist.barrier()
    found = load(folders[0], share_reads=False)
    if not dist.get_rank():
        dist.barrier()
    return found


def on_rank_0(folders: list[Path]) -> dict[str, Any] | None:
    return load(folders[0], share_reads=False) if dist.get_rank() == 0 else None


def different_models_of_their_own(folders: list[Path]) -> dict[str, Any]:
    return load(folders[dist.get_rank() % 2], share_reads=False)


def on_two_ranks(folders: list[Path]) -> dict[str, Any] | None:
    return load(folders[0]) if dist.get_rank() < 2 else None


def different_models(folders: list[Path]) -> dict[str, Any]:
    return load(folders[dist.get_rank() % 2])


def different_dtypes(folders: list[Path]) -> dict[str, Any]:
    return load(folders[0], dtype=torch.bfloat16 if dist.get_rank() else torch.float32)


def a_wrong_setting(folders: list[Path]) -> dict[str, Any]:
    """Found by one rank, which comes to no load; the others wait there."""
    if dist.get_rank() != 1:
        return load(folders[0])
    try:
        with hf_zero_stream.streaming():
            os.environ["HF_ZERO_STREAM_READER_THREADS"] = "many"
            transformers.AutoModelForCausalLM.from_pretrained(folders[0])
    except ConfigError as error:
        return {"error": f"ConfigError: {error}", "seconds": 0.0}
    finally:
        del os.environ["HF_ZERO_STREAM_READER_THREADS"]
    raise AssertionError("a wrong setting is taken")


SCENES = {
    one_after_the_other: "",
    on_rank_0: "",
    different_models_of_their_own: "",
    on_two_ranks: "Rank 2 has begun a collective without this rank",
    different_models: "Ranks came to load with different things (",
    different_dtypes: "differs from rank 0 in",
    a_wrong_setting: "HF_ZERO_STREAM_READER_THREADS",
}
"""What ranks do, and what their error says, if there is one."""


def play(folders: list[Path]) -> tuple[list[Any], dict[str, str]]:
    """What came of each scene and of a load of all after it, and what stock gives for each folder."""
    rendezvous.FAILURE_HOLDS_S, rendezvous.STUCK_S = 1.0, 2.0
    with hf_zero_stream.streaming():  # first contact
        dist.barrier()
    results = []
    for scene in SCENES:
        found = scene(folders)
        dist.barrier()
        time.sleep(1.1)  # as long as an error is told to ranks that come later
        results.append((found, together(folders)))
        dist.barrier()
    auto = transformers.AutoModelForCausalLM
    return results, {str(folder): digest(auto.from_pretrained(folder)) for folder in folders}


@pytest.mark.plugin("watch")
def test_loads_outside_zero3(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    """Each rank makes its own, as in stock; with share_reads=True all make them, and one that does not is named."""
    folders = [zoo_checkpoint("llama"), zoo_checkpoint("qwen3_moe")]
    ranks = run_ranks(3, play, folders, timeout=150)
    by_folder = [ranks[0][1][str(folder)] for folder in folders]
    for rank, (results, _) in enumerate(ranks):
        for (scene, says), (result, after) in zip(SCENES.items(), results, strict=True):
            assert after["error"] == "" and after["shared"] and after["digest"] == by_folder[0], (scene, after)
            if result is None:
                continue
            assert result["seconds"] < SOON_S
            if says:
                assert says in result["error"], (scene.__name__, rank, result)
            else:
                number = rank % 2 if scene is different_models_of_their_own else 0
                assert result["error"] == "" and not result["shared"] and result["digest"] == by_folder[number]


# ---------------------------------------------------------------------------------------------- what all ranks must do


def fail_before_entering(folder: Path, own: Path) -> list[tuple[str, str, float]]:
    """Rank 1 fails before it comes to a load under ZeRO-3, and to a save; the others are on their way to it."""
    auto_class = hf_zero_stream.StreamingAutoModelForCausalLM
    bad, caught = dist.get_rank() == 1, []
    model = auto_class.from_pretrained(folder, ds_config=ds_config())

    def trial(work: Callable[[], Any], is_late: bool) -> None:
        dist.barrier()
        if is_late:
            time.sleep(1)
        began = time.monotonic()
        caught.append((*error_of(work), time.monotonic() - began))

    def load_it() -> None:
        auto_class.from_pretrained(folder, ds_config=str(own / "missing.json") if bad else ds_config())

    def load_it_into() -> None:
        hf_zero_stream.load_into(torch.nn.Linear(1, 1) if bad else model, str(folder))

    def save_it() -> None:
        hf_zero_stream.save_pretrained(model, own / "saved", dtype="float33" if bad else None)

    for work in (load_it, load_it_into, save_it):
        for is_late in (bad, dist.get_rank() == 2):
            trial(work, is_late)
    dist.barrier()
    if bad:  # what ranks do together without ZeRO-3 says nothing of loads under it
        for zero in ({"stage": 2, "offload_optimizer": 7}, {"stage": "2"}):
            with pytest.raises((AttributeError, ConfigError)):
                auto_class.from_pretrained(folder, ds_config={"zero_optimization": zero})
    dist.barrier()
    hf_zero_stream.save_pretrained(model, own / "saved")
    assert auto_class.from_pretrained(own / "saved", ds_config=ds_config()).streaming_report.world_size == 3
    return caught


def test_a_rank_that_fails_before_it_enters(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Whoever waits is told, and whoever comes later."""
    kinds = ["FileNotFoundError"] * 2 + ["ConfigError"] * 4
    for rank, caught in enumerate(run_ranks(3, fail_before_entering, zoo_checkpoint("llama"), tmp_path, timeout=60)):
        for kind, (found, message, seconds) in zip(kinds, caught, strict=True):
            assert found == (kind if rank == 1 or kind == "ConfigError" else "PeerError"), caught
            assert rank == 1 or "rank 1" in message, caught
            assert seconds < SOON_S, caught


def never_come(folder: Path) -> str:
    """Rank 1 does not come to a load under ZeRO-3 before the others' time is over, but to the next."""
    model = None
    auto_class = hf_zero_stream.StreamingAutoModelForCausalLM
    with hf_zero_stream.streaming():  # first contact
        presence.Presence.in_default_group().group_timeout_s = 2.0
    message = ""
    if dist.get_rank() != 1:
        message = message_of(lambda: auto_class.from_pretrained(folder, ds_config=ds_config()), otherwise="")
    dist.barrier()
    presence.Presence.in_default_group().group_timeout_s = 60.0
    model = auto_class.from_pretrained(folder, ds_config=ds_config())
    assert model.streaming_report.world_size == 3
    return message


def test_those_who_do_not_come_are_named(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    first, absent, last = run_ranks(3, never_come, zoo_checkpoint("llama"), timeout=60)
    assert absent == ""
    for message in (first, last):
        assert message.startswith("PeerError: Only 2 of 3 ranks came to load within 2 seconds; rank 1 did not.")


# -------------------------------------------------------------------------------------------------------- the decision


def race(rounds: int) -> list[str]:
    """Ranks arrive at about the moment that the others' patience ends."""
    rendezvous.GRACE_S = rendezvous.FAILURE_HOLDS_S = 0.0
    kind = rendezvous.MeetingKind("race", "", 0.01)
    coordinator, found = Coordinator.of_default_group(), []
    chance = random.Random(dist.get_rank())
    for number in range(rounds):
        dist.barrier()
        time.sleep(chance.uniform(0.0, 0.02))
        try:
            with coordinator.watched(kind, str(number)):
                found.append("together")
                coordinator.agree()
        except PeerError:
            found.append("apart")
    return found


def test_all_ranks_believe_the_same(cluster: None) -> None:
    """None is alone where another believes that it is there; and both happen."""
    found = run_ranks(2, race, 150, timeout=60)
    assert set(found[0]) == set(found[1]) == {"together", "apart"}


def fail_before_a_collective(memory: bool) -> tuple[str, float]:
    """Rank 1 fails where the others are in a collective, and not at an agreement."""
    coordinator_module.STUCK_S = 1.0
    began, error = time.monotonic(), ""
    try:
        with meeting(LOAD) as coordinator:
            if dist.get_rank() == 1 and memory:
                with coordinator.indispensable("memory for an exchange"):
                    raise MemoryError("there is none")
            if dist.get_rank() == 1:
                raise ReadError("a.safetensors: cannot be read")
            coordinator.run(dist.all_reduce, torch.ones(1))
    except HfZeroStreamError as caught:
        error = f"{type(caught).__name__}: {caught}"
    return error, time.monotonic() - began


@pytest.mark.parametrize("memory", [False, True])
def test_a_rank_that_does_not_come_to_a_collective(cluster: None, memory: bool) -> None:
    for rank, (error, seconds) in enumerate(run_ranks(3, fail_before_a_collective, memory)):
        assert ("there is none" if memory else "cannot be read") in error and "rank 1" in error or rank == 1, error
        assert error.startswith("ReadError" if rank == 1 and not memory else "PeerError") and seconds < SOON_S
