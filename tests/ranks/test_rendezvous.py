"""Ranks that need not load together meet if they do, and else do not wait in vain; what all must do fails alike."""

import hashlib
import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

import hf_zero_stream
from hf_zero_stream.errors import ConfigError
from hf_zero_stream.holdings.introspection import is_streamed
from hf_zero_stream.ranks import presence, rendezvous
from hf_zero_stream.ranks.coordinator import Coordinator
from tests.support.cluster import SOON_S, run_ranks
from tests.support.messages import error_of, message_of, warnings_of
from tests.support.parity import ds_config
from tests.support.zoo import Checkpoint


def digest(model: Any) -> str:
    state = hashlib.sha256()
    for name, value in model.state_dict().items():
        state.update(name.encode() + value.contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def load(folder: Path, **kwargs: Any) -> dict[str, Any]:
    """How long a load inside ``streaming()`` takes, whether ranks shared it, if not why, and what it gives."""
    began = time.monotonic()
    with hf_zero_stream.streaming(), warnings_of("hf_zero_stream.loading.integration") as why:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, **kwargs)
    seconds, shared = time.monotonic() - began, is_streamed(model)
    return {"seconds": seconds, "shared": shared, "why": why, "digest": digest(model)}


def one_after_the_other(folders: list[Path]) -> dict[str, Any]:
    """As ``with accelerator.main_process_first()``."""
    if dist.get_rank():
        dist.barrier()
    found = load(folders[0])
    if not dist.get_rank():
        dist.barrier()
    return found


def together(folders: list[Path]) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:  # on a busy machine ranks may come half a second apart
        patch.setattr(rendezvous, "SHORT_PATIENCE_S", 10.0)
        return load(folders[0])


def on_rank_0(folders: list[Path]) -> dict[str, Any] | None:
    return load(folders[0]) if dist.get_rank() == 0 else None


def on_two_ranks(folders: list[Path]) -> dict[str, Any] | None:
    return load(folders[0]) if dist.get_rank() < 2 else None


def different_models(folders: list[Path]) -> dict[str, Any]:
    return load(folders[dist.get_rank() % 2])


def different_models_of_one_name(folders: list[Path]) -> dict[str, Any]:
    return load(folders[2 + dist.get_rank() % 2])


def different_orders(folders: list[Path]) -> list[dict[str, Any]]:
    return [load(folder) for folder in (folders[:2] if dist.get_rank() else folders[1::-1])]


def different_dtypes(folders: list[Path]) -> dict[str, Any]:
    return load(folders[0], dtype=torch.bfloat16 if dist.get_rank() else torch.float32)


def a_wrong_setting(folders: list[Path]) -> dict[str, Any] | str:
    if dist.get_rank() != 1:
        return load(folders[0])
    os.environ["HF_ZERO_STREAM_READER_THREADS"] = "many"
    try:
        return load(folders[0])
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        del os.environ["HF_ZERO_STREAM_READER_THREADS"]


def several_threads(folders: list[Path]) -> list[dict[str, Any]]:
    """Two loads at once, begun in another order on each rank."""
    found: dict[int, dict[str, Any]] = {}

    def work(number: int) -> None:
        found[number] = load(folders[number])

    order = [0, 1] if dist.get_rank() else [1, 0]
    threads = [threading.Thread(target=work, args=(number,)) for number in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[0], found[1]]


SCENES = (
    one_after_the_other,
    together,
    on_rank_0,
    together,
    on_two_ranks,
    together,
    different_models,
    together,
    different_models_of_one_name,
    together,
    different_orders,
    together,
    different_dtypes,
    together,
    a_wrong_setting,
    together,
    several_threads,
    together,
)


def play(folders: list[Path]) -> tuple[list[Any], dict[str, str]]:
    """What came of each scene, and what stock gives for each folder."""
    with hf_zero_stream.streaming():  # first contact
        dist.barrier()
    results = []
    for scene in SCENES:
        results.append(scene(folders))
        dist.barrier()
    auto = transformers.AutoModelForCausalLM
    plain = {str(folder): digest(auto.from_pretrained(folder)) for folder in folders}
    return results, {**plain, "bfloat16": digest(auto.from_pretrained(folders[0], dtype=torch.bfloat16))}


def test_no_rank_waits_in_vain_for_long(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Where not all ranks load the same at the same time, stock works; and the next time that they do, they share."""
    llama, moe = zoo_checkpoint("llama"), zoo_checkpoint("qwen3_moe")
    copies = [shutil.copytree(folder, tmp_path / str(number) / "model") for number, folder in enumerate((llama, moe))]
    folders = [llama, moe, *copies]
    ranks = run_ranks(3, play, folders, timeout=150)
    stock = ranks[0][1]
    by_folder = [stock[str(folder)] for folder in folders]
    for rank, (results, _) in enumerate(ranks):
        found = list(zip(SCENES, results, strict=True))
        for scene, result in found:
            if scene is together:
                assert result["shared"] and result["digest"] == by_folder[0], (rank, found)
            elif isinstance(result, dict):
                assert not result["shared"] and result["seconds"] < SOON_S, (scene.__name__, rank, result)
        by_scene = dict(found)
        assert by_scene[one_after_the_other]["digest"] == by_folder[0]
        assert rank or by_scene[on_rank_0]["digest"] == by_folder[0]
        assert rank == 2 or by_scene[on_two_ranks]["digest"] == by_folder[0]
        assert by_scene[different_models]["digest"] == by_folder[rank % 2]
        assert by_scene[different_models_of_one_name]["digest"] == by_folder[rank % 2]
        order = by_folder[:2] if rank else by_folder[1::-1]
        assert [result["digest"] for result in by_scene[different_orders]] == order
        assert by_scene[different_dtypes]["digest"] == (stock["bfloat16"] if rank else by_folder[0])
        assert [result["digest"] for result in by_scene[several_threads]] == by_folder[:2]
        if rank == 1:
            assert by_scene[a_wrong_setting].startswith("ConfigError: environment variable HF_ZERO_STREAM_READER")
        else:
            assert by_scene[a_wrong_setting]["digest"] == by_folder[0]
    for scene, results in zip(SCENES, zip(*(results for results, _ in ranks), strict=True), strict=True):
        said = ["".join(result["why"]) for result in results if isinstance(result, dict)]
        if scene in (one_after_the_other, on_rank_0, on_two_ranks):
            assert "has begun a collective without this rank" in "".join(said[:2]), said
        if scene is one_after_the_other:  # the late ranks hardly wait
            assert "within 0.5 seconds" in said[1] + said[2], said
            said = said[1:]
        if scene is not different_orders and said:  # one rank says it for all that have come
            assert sum(map(bool, said)) == (scene is not together), (scene.__name__, said)


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
    rendezvous.SHARING_PATIENCE_S = rendezvous.SHORT_PATIENCE_S = 0.01
    kind = rendezvous.MeetingKind("race", "", 0.01, is_optional=True)
    coordinator, found = Coordinator.of_default_group(), []
    chance = random.Random(dist.get_rank())
    for number in range(rounds):
        dist.barrier()
        time.sleep(chance.uniform(0.0, 0.02))
        try:
            with coordinator.watched(kind, str(number)):
                found.append("together")
                coordinator.agree()
        except rendezvous.NoJointLoad:
            found.append("apart")
    return found


def test_all_ranks_believe_the_same(cluster: None) -> None:
    """None is alone where another believes that it is there; and both happen."""
    found = run_ranks(2, race, 150, timeout=60)
    assert found[0] == found[1]
    assert set(found[0]) == {"together", "apart"}
