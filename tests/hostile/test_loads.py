"""Hostile checkpoints end in the same clear error on every rank, before transformers stumbles, and run no code."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hf_zero_stream
from fuzz.seeds import indexes
from tests.faults.test_faults import a_tensor, first_shard, rewrite_header
from tests.support.cluster import run_ranks
from tests.support.messages import error_of
from tests.support.parity import ds_config
from tests.support.zoo import Checkpoint, build_model


INDEX = "model.safetensors.index.json"


def change_index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


def seed(name: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / INDEX).write_bytes(indexes()[name])


def point_elsewhere(name: str) -> Callable[[Path], Any]:
    """The index promises one tensor in a file that is there, elsewhere."""

    def change(folder: Path) -> None:
        shutil.copy(first_shard(folder), folder.parent / "elsewhere.safetensors")
        where = name.format(parent=folder.parent)
        change_index(folder, lambda index: index["weight_map"].update({next(iter(index["weight_map"])): where}))

    return change


def link_to_a_folder(folder: Path) -> None:
    shard = first_shard(folder)
    shard.unlink()
    shard.symlink_to(folder)


def link_to_itself(folder: Path) -> None:
    shard = first_shard(folder)
    shard.unlink()
    shard.symlink_to(shard.name)


def tensor_in_two_shards(folder: Path) -> None:
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    stolen = json.loads(first.read_bytes()[8 : 8 + int.from_bytes(first.read_bytes()[:8], "little")])
    name = next(name for name in stolen if name != "__metadata__")

    def rename(header: dict[str, Any]) -> None:
        other = next(key for key in header if key != "__metadata__")
        header[name] = header.pop(other)

    rewrite_header(second, rename)
    change_index(folder, lambda index: index["weight_map"].pop(name))


def pipe(folder: Path) -> None:
    shard = first_shard(folder)
    shard.unlink()
    os.mkfifo(shard)


def overflow(folder: Path) -> None:
    rewrite_header(first_shard(folder), lambda header: a_tensor(header).update(shape=[2**62, 4]))


def no_dtype_but_in_a_faulty_shard(folder: Path) -> None:
    """transformers opens the first shard for the dtype that the config does not say."""
    config = json.loads((folder / "config.json").read_text())
    config.pop("dtype", None)
    config.pop("torch_dtype", None)
    (folder / "config.json").write_text(json.dumps(config))
    overflow(folder)


HOSTILE: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "not a JSON object": (seed("list"), "CheckpointError", "expected a JSON object"),
    "nested without end": (lambda folder: (folder / INDEX).write_bytes(b'{"a":' * 100_000), "CheckpointError", INDEX),
    "a key twice": (seed("key-twice"), "CheckpointError", "the key 'a' occurs twice"),
    "no metadata": (seed("no-metadata"), "CheckpointError", "metadata: expected an object"),
    "no names": (seed("no-names"), "CheckpointError", "weight_map: expected a map"),
    "a list of names": (seed("list-of-names"), "CheckpointError", "weight_map: expected a map"),
    "a number as name": (seed("number-as-name"), "CheckpointError", "tensor 't0': expected a file's name"),
    "a pickle": (seed("pickle"), "CheckpointError", "does not end in .safetensors"),
    "a name with ..": (point_elsewhere("../elsewhere.safetensors"), "CheckpointError", "'..'"),
    "an absolute name": (point_elsewhere("{parent}/elsewhere.safetensors"), "CheckpointError", "absolute path"),
    "a link to a folder": (link_to_a_folder, "CheckpointError", "found a folder"),
    "a link to itself": (link_to_itself, "ReadError", "Too many levels of symbolic links"),
    "a file that is not there": (point_elsewhere("nothing.safetensors"), "ReadError", "nothing.safetensors"),
    "a tensor in two shards": (tensor_in_two_shards, "CheckpointError", "is in two shards"),
    "a pipe": (pipe, "CheckpointError", "regular file"),
    "an overflow": (overflow, "CheckpointError", "need 2**63 or more"),
    "a faulty shard with the dtype": (no_dtype_but_in_a_faulty_shard, "CheckpointError", "need 2**63 or more"),
}  # fmt: skip


def load(folder: Path) -> Any:
    return hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(folder, ds_config=ds_config(), dtype="auto")


def load_each_then_a_good_one(folders: list[Path], good: Path) -> list[tuple[str, str]]:
    found = [error_of(partial(load, folder)) for folder in folders]
    assert load(good).streaming_report.to_dict()
    return found


def test_hostile_checkpoints(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    good = zoo_checkpoint("qwen3_moe")
    folders = []
    for number, (change, _, _) in enumerate(HOSTILE.values()):
        folders.append(shutil.copytree(good, tmp_path / str(number)))
        change(folders[-1])
    for found in run_ranks(2, load_each_then_a_good_one, folders, good):
        for (name, (_, kind, text)), (found_kind, message) in zip(HOSTILE.items(), found, strict=True):
            assert (name, found_kind) == (name, kind), message
            assert text in message, (name, message)
            assert str(tmp_path) in message, (name, message)


def plan_and_load_into(folder: Path, good: Path) -> list[tuple[str, str]]:
    model = load(good)
    return [
        error_of(lambda: hf_zero_stream.plan(folder, world_size=2)),
        error_of(lambda: hf_zero_stream.load_into(model, folder)),
    ]


@pytest.mark.plugin("forecast")
def test_plan_and_load_into_check_the_same(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    good = zoo_checkpoint("qwen3_moe")
    folder = shutil.copytree(good, tmp_path / "bad")
    point_elsewhere("../elsewhere.safetensors")(folder)
    for found in run_ranks(1, plan_and_load_into, folder, good):
        assert [(kind, "'..'" in message) for kind, message in found] == [("CheckpointError", True)] * 2


# ------------------------------------------------------------------------------------------------------- pickles


class Malicious:
    """Unpickling it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def pickled(folder: Path, value: Any) -> Path:
    build_model("bert").config.save_pretrained(folder)
    torch.save(value, folder / "pytorch_model.bin")
    return folder


def load_pickled(folders: list[Path]) -> list[tuple[str, str]]:
    found = []
    for folder in folders:
        dist.barrier()
        load = hf_zero_stream.StreamingAutoModelForMaskedLM.from_pretrained
        found.append(error_of(partial(load, folder, ds_config=ds_config())))
    return found


def test_no_pickle_is_run(cluster: None, tmp_path: Path) -> None:
    """Neither from a `.bin` file, nor from one that calls itself safetensors; and a map of tensors is asked for."""
    made = tmp_path / "made by a pickle"
    weights = dict(build_model("bert").state_dict())
    disguised = pickled(tmp_path / "disguised", {})
    (disguised / "model.safetensors").write_bytes(pickle.dumps(Malicious(made)))
    folders = [
        pickled(tmp_path / "malicious", {**weights, "more": Malicious(made)}),
        disguised,
        pickled(tmp_path / "list", list(weights.values())),
        pickled(tmp_path / "numbers", dict(enumerate(weights.values()))),
    ]
    for malicious, disguise, a_list, numbers in run_ranks(2, load_pickled, folders):
        assert malicious[0] == "UnpicklingError" and "mkdir" in malicious[1], "torch's own error, as in plain loading"
        assert disguise[0] == "CheckpointError" and "header length" in disguise[1]
        assert a_list == (
            "CheckpointError",
            f"{folders[2]}/pytorch_model.bin: expected a map of names to tensors, found list.",
        )
        assert numbers[0] == "CheckpointError"
    assert not made.exists()
    torch.load(folders[0] / "pytorch_model.bin", weights_only=False)
    assert made.exists(), "the trap works"
