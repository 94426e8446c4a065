"""Ranks that come to a load seconds or minutes after each other, or not at all."""

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
from hf_zero_stream.ranks import presence, rendezvous
from tests.ranks.test_rendezvous import load as load_plain
from tests.support.checkpoint_files import add_one
from tests.support.cluster import SOON_S, run_ranks, run_ranks_expecting_errors
from tests.support.fsdp2 import announce, count_lazy, load, make_accelerator
from tests.support.hosts import move_to_host
from tests.support.messages import message_of, warnings_of
from tests.support.parity import ds_config
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


def defer_where_rank_0_reads(folders: list[Path]) -> int:
    """Rank 1 does not see the shards."""
    announce()
    accelerator = make_accelerator()
    make_contact()
    os.chdir(folders[dist.get_rank()].parent)  # of ranks that load together, the paths must be the same
    folder = Path(folders[0].name)
    with hf_zero_stream.streaming(hf_zero_stream.StreamingConfig(read_from="rank0")):
        model = load("llama", folder)
        lazy = count_lazy(model)
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        dist.barrier()
    return lazy


@pytest.mark.plugin("relay")
def test_a_deferral_where_one_rank_reads_for_others(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = zoo_checkpoint("llama")
    small = shutil.copytree(folder, tmp_path / folder.name, ignore=shutil.ignore_patterns("*.safetensors"))
    first, second = run_ranks(2, defer_where_rank_0_reads, [folder, small], timeout=60)
    assert first == second > 10


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
    object.__setattr__(rendezvous.LOAD, "reminder_s", 2.0)
    rendezvous.STUCK_S = 4.0
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
    words = "Waiting since 2 s for rank 1 to load. All ranks must make the same load."
    assert words in said + nothing and not (said and nothing), (said, nothing)


def within_main_process_first(folder: Path, _: Path) -> Any:
    state = accelerate.PartialState(cpu=True, backend="gloo")
    assert state.num_processes == 3
    with state.main_process_first(), state.local_main_process_first():
        return load_plain(folder, share_reads=False)


def on_rank_0(folder: Path, _: Path) -> Any:
    """The others wait to be sent something."""
    if dist.get_rank():
        dist.recv(torch.ones(1), 0)
        return None
    found = load_plain(folder, share_reads=False)
    for rank in (1, 2):
        dist.send(torch.ones(1), rank)
    return found


def while_the_others_save(folder: Path, own: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    found = load_plain(folder, share_reads=False) if dist.get_rank() == 0 else None
    hf_zero_stream.save_pretrained(model, own)
    return found


def in_several_threads(folder: Path, _: Path) -> Any:
    """Two loads at once."""
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(load_plain(folder, share_reads=False))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


SCENES = (within_main_process_first, on_rank_0, while_the_others_save, in_several_threads)


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
                    assert not result["error"], (rank, scene.__name__, result)
                    assert not result["shared"] and result["seconds"] < 10, (rank, scene.__name__, result)


# ------------------------------------------------------------------------------------------- slow, and standing still


def read_slowly(folder: Path, seconds: float, moves: bool) -> tuple[str, float]:
    """Rank 1 reads for longer than the process group's time-out; `moves`: a little at a time."""
    make_contact()
    presence.Presence.in_default_group().group_timeout_s = 2.0
    if dist.get_rank() == 1:
        pauses = iter([seconds / 8] * 8 if moves else [seconds])
        real = os.preadv

        def slowly(*args: Any) -> int:
            time.sleep(next(pauses, 0.0))
            return real(*args)

        os.preadv = slowly
        os.environ["HF_ZERO_STREAM_READER_THREADS"] = "1"
    began = time.monotonic()
    config = {**ds_config(), "hf_zero_stream": {"staging_bytes": 2**16}}
    message = message_of(
        lambda: hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(folder, ds_config=config), otherwise=""
    )
    return message, time.monotonic() - began


def test_a_rank_that_reads_for_three_times_the_time_out(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    for message, seconds in run_ranks(2, read_slowly, zoo_checkpoint("llama"), 7.0, True, timeout=60):
        assert message == "" and seconds > 6


def test_a_rank_that_stands_still_is_named(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    """And what it does: it lives, and nothing else tells."""
    (first, seconds), (second, _) = run_ranks(2, read_slowly, zoo_checkpoint("llama"), 12.0, False, timeout=60)
    for message in (first, second):
        assert message.startswith("PeerError: Waited ") and "1 of 2 ranks do not come" in message
        assert "the time-out of the process group: rank 1 has begun to load, and has read or written " in message
    assert seconds < 8
