"""Ranks that come to a load seconds or minutes after each other, or not at all."""

import dataclasses
import logging
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
import transformers

import hf_zero_stream
from hf_zero_stream.errors import HfZeroStreamError
from hf_zero_stream.loading import choice
from hf_zero_stream.ranks import rendezvous
from hf_zero_stream.ranks.coordinator import Coordinator
from tests.ranks.test_rendezvous import load as load_plain
from tests.support.checkpoint_files import add_one
from tests.support.cluster import SOON_S, run_ranks, run_ranks_expecting_errors
from tests.support.fsdp2 import announce, count_lazy, load, make_accelerator
from tests.support.hosts import move_to_host
from tests.support.messages import warnings_of
from tests.support.zoo import Checkpoint


# ------------------------------------------------------------------------------------------- deferred until prepare()


def defer_in_turn(folder: Path) -> tuple[int, float, int, int]:
    """Rank 1 comes when rank 0 has its lazy model; how many parameters are lazy, and what is read in the end."""
    announce()
    accelerator = make_accelerator()
    if dist.get_rank():
        dist.barrier()
    began = time.monotonic()
    model = load("llama", folder)
    seconds, lazy = time.monotonic() - began, count_lazy(model)
    if not dist.get_rank():
        dist.barrier()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    accelerator.prepare(model, optimizer)
    report = model.streaming_report
    return lazy, seconds, len(report.ranks), sum(rank.bytes_read for rank in report.ranks)


def test_a_deferral_waits_for_nobody(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    folder = zoo_checkpoint("llama")
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    for lazy, seconds, ranks, read in run_ranks(2, defer_in_turn, folder):
        assert lazy > 10 and seconds < 5 and ranks == 2 and read <= 1.1 * size


def defer_where_rank_0_reads(folders: list[Path]) -> tuple[int, str]:
    """Rank 1 does not see the shards; then it does not come, and rank 0 defers its model alone."""
    announce()
    accelerator = make_accelerator()
    make_contact()
    os.chdir(folders[dist.get_rank()].parent)  # of ranks that load together, the paths must be the same
    folder, why = Path(folders[0].name), list[str]()
    with hf_zero_stream.streaming(hf_zero_stream.StreamingConfig(read_from="rank0")):
        model = load("llama", folder)
        lazy = count_lazy(model)
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        if dist.get_rank() == 0:
            with warnings_of("hf_zero_stream.loading.integration") as why:
                lazy += count_lazy(load("llama", folder))
        dist.barrier()
    return lazy, "".join(why)


def test_a_deferral_where_one_rank_reads_for_others(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = zoo_checkpoint("llama")
    small = shutil.copytree(folder, tmp_path / folder.name, ignore=shutil.ignore_patterns("*.safetensors"))
    (first, why), (second, _) = run_ranks(2, defer_where_rank_0_reads, [folder, small], timeout=60)
    assert second > 10 and first == 2 * second
    assert "Each loads it alone: rank 1 has begun a collective without this rank" in why


def defer_with_a_wrong_setting(folder: Path, read_from: str) -> tuple[str, float]:
    """Rank 1 has a setting that is none; the error of each rank, and when it came."""
    announce()
    accelerator = make_accelerator()
    make_contact()
    os.environ["HF_ZERO_STREAM_READ_FROM"] = read_from
    found = ""
    began = time.monotonic()
    try:
        with hf_zero_stream.streaming():
            if dist.get_rank():
                os.environ["HF_ZERO_STREAM_READER_THREADS"] = "many"
            model = load("llama", folder, streams=False)  # in this block
            accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    except HfZeroStreamError as error:
        found = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - began
    dist.barrier()  # the process of rank 1 lives on
    return found, seconds


@pytest.mark.parametrize("read_from", ["all", "rank0"])
def test_a_wrong_setting_on_one_rank_of_a_deferral(cluster: None, zoo_checkpoint: Checkpoint, read_from: str) -> None:
    """The others, which wait in the load or in prepare(), are told of it."""
    first, second = run_ranks(2, defer_with_a_wrong_setting, zoo_checkpoint("llama"), read_from, timeout=60)
    assert second[0].startswith("ConfigError") and "HF_ZERO_STREAM_READER_THREADS" in second[0]
    assert first[0].startswith("ConfigError: rank 1") and "HF_ZERO_STREAM_READER_THREADS" in first[0]
    assert first[1] < SOON_S


def prepare_copies(folders: list[Path]) -> None:
    announce()
    move_to_host("ab"[dist.get_rank()])
    accelerator = make_accelerator()
    model = load("llama", folders[dist.get_rank()])
    assert count_lazy(model)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))


def test_other_files_on_another_host_are_found_in_prepare(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Each rank has opened its own files alone, so this is the first time that they can compare them."""
    folder = zoo_checkpoint("llama")
    older = shutil.copytree(folder, tmp_path / "older" / folder.name)
    add_one(older)
    for outcome in run_ranks_expecting_errors(2, prepare_copies, [folder, older], timeout=60):
        assert outcome.error_type == "CheckpointError", outcome
        assert "has the same header as rank 0's and other values" in str(outcome.error_message)


# ----------------------------------------------------------------------------------------------- reads that are shared


def make_contact() -> None:
    with hf_zero_stream.streaming():
        dist.barrier()


def share_with_a_slow_rank(folder: Path) -> tuple[bool, str]:
    """Rank 1 comes late. Meanwhile threads of it and of rank 0 communicate, not quite at the same time."""
    rendezvous.CERTAIN_S = 4.0
    choice.SHARED_LOAD = dataclasses.replace(choice.SHARED_LOAD, reminder_s=2.0)
    logging.getLogger("hf_zero_stream").setLevel(logging.WARNING)
    group = dist.new_group()
    make_contact()

    def communicate() -> None:
        if dist.get_rank() == 0:
            time.sleep(2)
        dist.barrier(group)

    thread = threading.Thread(target=communicate)
    with warnings_of("hf_zero_stream.ranks.rendezvous") as said:
        thread.start()
        if dist.get_rank() == 1:
            time.sleep(7)
        found = load_plain(folder)
    thread.join()
    return found["shared"], "".join(said)


def test_a_slow_rank_is_waited_for(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    (first, said), (second, _), (third, nothing) = run_ranks(3, share_with_a_slow_rank, zoo_checkpoint("llama"))
    assert first and second and third
    words = "Waiting since 2 s for rank 1 to share the load. If they are not going to make the same load, share_reads"
    assert words in said + nothing and not (said and nothing), (said, nothing)


def within_main_process_first(folder: Path, _: Path) -> Any:
    state = accelerate.PartialState(cpu=True, backend="gloo")
    assert state.num_processes == 3
    with state.main_process_first(), state.local_main_process_first():
        return load_plain(folder)


def on_rank_0(folder: Path, _: Path) -> Any:
    """The others wait to be sent something."""
    if dist.get_rank():
        dist.recv(torch.ones(1), 0)
        return None
    found = load_plain(folder)
    for rank in (1, 2):
        dist.send(torch.ones(1), rank)
    return found


def while_the_others_save(folder: Path, own: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    found = load_plain(folder) if dist.get_rank() == 0 else None
    hf_zero_stream.save_pretrained(model, own)
    return found


def other_numbers_of_models(folder: Path, _: Path) -> Any:
    """Of which all make the first load."""
    return [load_plain(folder) for _ in range(3 - dist.get_rank())][1:]


SCENES = (within_main_process_first, on_rank_0, while_the_others_save, other_numbers_of_models)


def play(folder: Path, own: Path) -> list[Any]:
    make_contact()
    found = []
    for scene in SCENES:
        found.append(scene(folder, own))
        dist.barrier()
    return found


def test_no_rank_waits_for_those_that_wait_for_it(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(3, play, zoo_checkpoint("llama"), tmp_path, timeout=90)):
        for scene, results in zip(SCENES, found, strict=True):
            for result in results if isinstance(results, list) else [results]:
                if result is not None:
                    assert not result["shared"] and result["seconds"] < 10, (rank, scene.__name__, result)


def wait_for_a_file(folder: Path, file: Path) -> list[Any]:
    """Rank 1 waits for a file that rank 0 writes after two loads. Then it comes late to a meeting that needs all."""
    rendezvous.SHARING_PATIENCE_S = 3.0
    make_contact()
    found = []
    if dist.get_rank() == 1:
        while not file.exists():
            time.sleep(0.1)
    else:
        found = [load_plain(folder), load_plain(folder)]
        file.touch()
    rendezvous.SHARING_PATIENCE_S = 30.0
    if dist.get_rank() == 1:
        time.sleep(2)
    with Coordinator.of_default_group().watched():
        pass
    if dist.get_rank() == 1:
        time.sleep(3)
    return [*found, load_plain(folder)]


def test_waiting_has_a_limit(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """For a rank that was waited for in vain it is low, until all are together again."""
    first, second, third = run_ranks(3, wait_for_a_file, zoo_checkpoint("llama"), tmp_path / "file", timeout=90)
    for *alone, together in (first, second, third):
        assert not any(result["shared"] for result in alone) and together["shared"]
    said = ["".join(one["why"] + other["why"]) for one, other in zip(first, third, strict=True)]
    for text, limit in zip(said, ("3", "0.5"), strict=False):
        assert f"Only 2 of 3 ranks came to share the load within {limit} seconds; rank 1 did not. If they" in text, (
            said
        )
