"""Files of a state have their digests in its record; ``verify="full"`` compares them before a training goes on."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

import hf_zero_stream
from hf_zero_stream import StreamingConfig
from hf_zero_stream.checkpoint.file_digests import WORD, digest_of_bytes, digest_of_range, shares_of
from hf_zero_stream.errors import CheckpointError
from tests.support.cluster import run_ranks
from tests.support.training_state import all_in_one_group, engine_of, state_config, train


Checkpoint = Callable[..., Path]


def test_the_digests_of_parts_add_up(tmp_path: Path) -> None:
    drawn = random.Random(0)
    data = drawn.randbytes(2**20 + 5)
    path = tmp_path / "file"
    path.write_bytes(data)
    whole = digest_of_bytes(0, [data])
    assert digest_of_range(path, 0, len(data)) == whole
    for cuts in (1, 7, 300):
        places = [0, *sorted(drawn.sample(range(1, len(data)), cuts)), len(data)]
        parts = [(start, data[start:stop]) for start, stop in zip(places, places[1:], strict=False)]
        assert sum(digest_of_bytes(start, [part]) for start, part in drawn.sample(parts, len(parts))) % WORD == whole
        assert digest_of_bytes(0, [part for _, part in parts]) == whole
    # A byte that has changed, moved or gone shows.
    at = drawn.randrange(len(data) - 1)
    changed = [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], data[8:] + data[:8], data[4:] + data[:4], data[:-1]]
    assert whole not in [digest_of_bytes(0, [other]) for other in changed]


@pytest.mark.parametrize("readers", [1, 3, 8])
def test_readers_share_all_bytes(readers: int) -> None:
    sizes = [5, 0, 100, 3]
    shares = [share for number in range(readers) for share in shares_of(sizes, number, readers)]
    found = sorted((file, byte) for file, start, stop in shares for byte in range(start, stop))
    assert found == [(file, byte) for file, size in enumerate(sizes) for byte in range(size)]


def save(folder: Path, target: Path, stage: int, asynchronous: bool) -> None:
    engine = engine_of(folder, state_config(stage), all_in_one_group)
    train(engine, range(1))
    saved = hf_zero_stream.save_state(engine, target, tag="first", asynchronous=asynchronous, max_shard_size="40KB")
    if isinstance(saved, hf_zero_stream.PendingSave):
        saved.wait()


def resume(folder: Path, target: Path, stage: int, how: dict[str, str]) -> str:
    """The error of a resume; empty if there is none."""
    engine = engine_of(folder, state_config(stage), all_in_one_group)
    try:
        with hf_zero_stream.streaming(StreamingConfig(**how)):
            hf_zero_stream.load_state(engine, target)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_changed_byte(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, asynchronous: bool) -> None:
    folder, target = zoo_checkpoint("llama"), tmp_path / "state"
    run_ranks(2, save, folder, target, 3, asynchronous)
    place = target / "first"
    digests = json.loads((place / "training_state.json").read_text())["digests"]
    shards = [*target.glob("*.safetensors"), *place.glob("*.safetensors")]
    assert {(place / name).resolve() for name in digests} == {path.resolve() for path in shards if path.stem != "rng"}
    assert all(
        int(digest, 16) == digest_of_range(place / name, 0, (place / name).stat().st_size)
        for name, digest in digests.items()
    )

    assert run_ranks(3, resume, folder, target, 2, {"verify": "full"}) == [""] * 3  # other ranks, another stage
    damaged = max(place.glob("model.exp_avg-*"))
    data = bytearray(damaged.read_bytes())
    data[-9] ^= 4
    damaged.write_bytes(data)
    assert run_ranks(2, resume, folder, target, 3, {}) == [""] * 2  # which reads each byte once
    for how in ({"verify": "full"}, {"verify": "full", "read_from": "rank0"}):
        errors = run_ranks(2, resume, folder, target, 3, how)
        assert all(f"{damaged}: expected the bytes that were saved" in error for error in errors)


def test_weights_of_a_later_state(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """An older state's weights have been replaced, which it does not need."""
    folder, target = zoo_checkpoint("llama"), tmp_path / "state"
    run_ranks(2, save_two, folder, target)
    assert run_ranks(2, resume_older, folder, target) == ["first"] * 2


def save_two(folder: Path, target: Path) -> None:
    engine = engine_of(folder, state_config(3), all_in_one_group)
    for step, tag in enumerate(("first", "second")):
        train(engine, range(step, step + 1))
        hf_zero_stream.save_state(engine, target, tag=tag)


def resume_older(folder: Path, target: Path) -> str:
    engine = engine_of(folder, state_config(3), all_in_one_group)
    with hf_zero_stream.streaming(StreamingConfig(verify="full")):
        return hf_zero_stream.load_state(engine, target, tag="first").tag
