"""Files of states and checkpoints: each is read once, and has its digest.

- An operation finds out once what it must know of a model and of files: one walk, and one read of each header.
- Files of a state have their digests in its record; ``verify="full"`` compares them before a training goes on.
"""

import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig

import hf_zero_stream
from hf_zero_stream import StreamingConfig
from hf_zero_stream.checkpoint.digests import WORD, digest_of_bytes, digest_of_range, shares_of
from hf_zero_stream.errors import CheckpointError
from hf_zero_stream.holdings import own_names
from hf_zero_stream.ranks.presence import Presence
from hf_zero_stream.sources.local import LocalFiles
from tests.support.cluster import run_ranks
from tests.support.parity import ds_config
from tests.support.training_state import all_in_one_group, engine_of, state_config, train
from tests.support.zoo import Checkpoint


@contextmanager
def counted(walks: Counter[str], headers: Counter[str]) -> Iterator[None]:
    """Count, by the models' classes, walks over whole trees for names, and files opened for their headers, by name."""
    walk, open_file = own_names._walk, LocalFiles.open_file

    def counted_walk(module: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        walks[type(module).__name__] += not name
        return walk(module, name, *args, **kwargs)

    def counted_open(self: LocalFiles, path: str) -> Any:
        headers[path] += 1
        return open_file(self, path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_names, "_walk", counted_walk)
        patch.setattr(LocalFiles, "open_file", counted_open)
        yield


def operations(folder: Path, target: Path, config: dict[str, Any] | None) -> dict[str, tuple[int, int]]:
    """For each operation, the most walks over one model and the most reads of one header."""
    if config is not None:
        trained = engine_of(folder, config, all_in_one_group)
        train(trained, range(1))
        own: dict[str, Any] = {}
    else:
        trained = AutoModelForCausalLM.from_pretrained(folder)
        own = {"optimizer": torch.optim.AdamW(trained.parameters())}
        ids = torch.arange(8)[None]
        trained(input_ids=ids, labels=ids).loss.backward()
        own["optimizer"].step()
    calls = {
        "save_state": lambda: hf_zero_stream.save_state(trained, target / "state", **own),
        "save_state again": lambda: hf_zero_stream.save_state(trained, target / "state", **own),
        "load_state": lambda: hf_zero_stream.load_state(trained, target / "state", **own),
        "load_into": lambda: hf_zero_stream.load_into(trained, str(target / "state")),
        "save_pretrained": lambda: hf_zero_stream.save_pretrained(trained, target / "saved"),
    }
    found = {}
    for name, call in calls.items():
        walks, headers = Counter[str](), Counter[str]()
        with counted(walks, headers):
            call()
        found[name] = max(walks.values()), max(headers.values(), default=0)
    return found


EXPECTED = {name: (1, 0) for name in ("save_state", "save_state again", "save_pretrained")} | {
    name: (1, 1) for name in ("load_state", "load_into")
}


def test_one_rank(zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    assert operations(zoo_checkpoint("qwen3_moe"), tmp_path, None) == EXPECTED


@pytest.mark.parametrize("stage", [1, 3])
def test_engine(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, stage: int) -> None:
    first, second = run_ranks(2, operations, zoo_checkpoint("qwen3_moe"), tmp_path, state_config(stage))
    assert first == EXPECTED
    assert all(walks == 1 and headers <= 1 for walks, headers in second.values())


def meetings(folder: Path, target: Path) -> dict[str, int]:
    """How often ranks meet in each way to go on from a state."""
    engine = engine_of(folder, state_config(3), all_in_one_group)
    train(engine, range(1))
    rounds, found = Presence.in_default_group().next_numbers, {}
    with hf_zero_stream.streaming():
        engine.save_checkpoint(str(target))
        for name, call in {
            "load_state": lambda: hf_zero_stream.load_state(engine, target),
            "load_checkpoint": lambda: engine.load_checkpoint(str(target)),
            "load_module_only": lambda: engine.load_checkpoint(str(target), load_module_only=True),
        }.items():
            before = sum(rounds.values())
            call()
            found[name] = sum(rounds.values()) - before
    return found


def test_a_resume_meets_once(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    for found in run_ranks(2, meetings, zoo_checkpoint("llama"), tmp_path):
        assert found == {"load_state": 1, "load_checkpoint": 1, "load_module_only": 1}


def test_load(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    for headers in run_ranks(2, headers_of_load, zoo_checkpoint("qwen3_moe")):
        assert max(headers.values(), default=1) == 1


def headers_of_load(folder: Path) -> Counter[str]:
    hf_config = HfDeepSpeedConfig(ds_config())
    headers = Counter[str]()
    with counted(Counter(), headers), hf_zero_stream.streaming():
        AutoModelForCausalLM.from_pretrained(folder)
    del hf_config  # it has been in force while it was there
    return headers


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


def save_one(folder: Path, target: Path, stage: int, asynchronous: bool) -> None:
    engine = engine_of(folder, state_config(stage), all_in_one_group)
    train(engine, range(1))
    saved = hf_zero_stream.save_state(engine, target, tag="first", asynchronous=asynchronous, max_shard_size="40KB")
    if isinstance(saved, hf_zero_stream.PendingSave):
        saved.wait()


def resume_error(folder: Path, target: Path, stage: int, how: dict[str, str]) -> str:
    """The error of a resume; empty if there is none."""
    engine = engine_of(folder, state_config(stage), all_in_one_group)
    try:
        with hf_zero_stream.streaming(StreamingConfig(**how)):
            hf_zero_stream.load_state(engine, target)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.plugin("relay", "verify")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_changed_byte(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, asynchronous: bool) -> None:
    folder, target = zoo_checkpoint("llama"), tmp_path / "state"
    run_ranks(2, save_one, folder, target, 3, asynchronous)
    place = target / "first"
    digests = json.loads((place / "training_state.json").read_text())["digests"]
    assert {*digests} == {path.name for path in place.glob("*.safetensors") if path.stem != "rng"}
    assert all(
        int(digest, 16) == digest_of_range(place / name, 0, (place / name).stat().st_size)
        for name, digest in digests.items()
    )

    assert run_ranks(3, resume_error, folder, target, 2, {"verify": "full"}) == [""] * 3  # other ranks, another stage
    damaged = max(place.glob("state-*.safetensors"))
    data = bytearray(damaged.read_bytes())
    data[-9] ^= 4
    damaged.write_bytes(data)
    assert run_ranks(2, resume_error, folder, target, 3, {}) == [""] * 2  # which reads each byte once
    for how in ({"verify": "full"}, {"verify": "full", "read_from": "rank0"}):
        errors = run_ranks(2, resume_error, folder, target, 3, how)
        assert all(f"{damaged}: expected the bytes that were saved" in error for error in errors)


@pytest.mark.plugin("verify")
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
