"""Files of ``torch.save`` as maps of bytes, and what is not believed of them."""

import io
import json
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from hf_zero_stream.checkpoint.format import NotAMap
from hf_zero_stream.checkpoint.formats import map_from_headers
from hf_zero_stream.errors import CheckpointError, UnsupportedError
from hf_zero_stream.plugins.pickled import pickles
from hf_zero_stream.plugins.pickled.pickles import read_pickle
from hf_zero_stream.plugins.pickled.torch_files import not_a_map_reason, read_header
from hf_zero_stream.plugins.pickled.torch_metadata import metadata_of
from hf_zero_stream.plugins.pickled.zero_model_files import read_model_file
from hf_zero_stream.sources.local import LocalFiles
from tests.support.cluster import run_ranks
from tests.support.parity import compare
from tests.support.zoo import Checkpoint


BASE = torch.arange(60, dtype=torch.float32)
TENSORS: dict[str, torch.Tensor] = {
    "float32": torch.randn(3, 5),
    "bfloat16": torch.randn(4).bfloat16(),
    "float16": torch.randn(2, 2, 2).half(),
    "int64": torch.arange(7),
    "bool": torch.tensor([True, False, True]),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "parameter": torch.nn.Parameter(torch.ones(3)),
    "part": BASE[10:40].view(5, 6),
    "same part": BASE[10:40].view(6, 5),
    "one row": BASE.view(6, 10)[2:3],
    "transposed": BASE.view(6, 10).t(),
    "every second": BASE.view(6, 10)[1:5, 1::2],
}


def tensors_in(path: Path) -> dict[str, torch.Tensor]:
    """What our map of a file says, read from its bytes."""
    index = map_from_headers([path], [read_header(LocalFiles(), str(path))])
    data, found = path.read_bytes(), {}
    for name, entry in index.entries.items():
        part = bytearray(data[entry.start : entry.stop])
        flat = torch.frombuffer(part, dtype=entry.dtype) if part else torch.empty(0, dtype=entry.dtype)
        view = index.views[name]
        found[name] = flat.as_strided(view.sizes, view.strides)
    return found


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_values(tmp_path: Path, zipped: bool, kind: Callable[[Any], Any]) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save(kind(TENSORS), path, _use_new_zipfile_serialization=zipped)
    found = tensors_in(path)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor.detach()), name


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"a": torch.randn(3).expand(4, 3)}, "a has more elements than it stores"),
        ({"a": 3}, "a is no plain tensor"),
        ([torch.ones(2)], "something else than a dict"),
        ({"a": torch.ones(2).to_sparse()}, "it names torch._utils._rebuild_sparse_tensor"),
    ],
    ids=["expanded", "number", "list", "sparse"],
)
def test_what_is_no_map(tmp_path: Path, value: Any, reason: str) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save(value, path)
    assert reason in not_a_map_reason(LocalFiles(), [str(path)])


class Executes:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_no_code_runs(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    found = read_pickle(pickle.dumps({"a": Executes(trace), Executes: 1}), "x").root
    assert str(found["a"].function) == f"{os.system.__module__}.system"
    torch.save({"a": Executes(trace)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(NotAMap):
        read_header(LocalFiles(), str(tmp_path / "pytorch_model.bin"))
    assert not trace.exists()


def rewritten(path: Path, change: Callable[[dict[str, bytes]], None], compression: int = zipfile.ZIP_STORED) -> Path:
    """A file of ``torch.save`` whose members were changed."""
    torch.save({"a": torch.arange(6.0)}, path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def test_a_folder_for_a_storage(tmp_path: Path) -> None:
    """By its attributes; torch says nothing, and gives whatever was in the memory."""
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.arange(6.0)}, path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            member = zipfile.ZipInfo(name)
            member.external_attr = 0x10 if name.endswith("data/0") else 0
            archive.writestr(member, data)
    with pytest.raises(CheckpointError, match="found a folder"):
        read_header(LocalFiles(), str(path))


def test_a_member_without_a_name(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w") as archive:
        archive.open(zipfile.ZipInfo(""), "w").close()
    with pytest.raises(CheckpointError, match="in one folder"):
        read_header(LocalFiles(), str(tmp_path / "pytorch_model.bin"))


def shorter_storage(members: dict[str, bytes]) -> None:
    name = next(name for name in members if name.endswith("data/0"))
    members[name] = members[name][:-4]


def no_storage(members: dict[str, bytes]) -> None:
    del members[next(name for name in members if name.endswith("data/0"))]


def two_pickles(members: dict[str, bytes]) -> None:
    members["other/data.pkl"] = pickle.dumps({})


def other_version(members: dict[str, bytes]) -> None:
    members[next(name for name in members if name.endswith("/version"))] = b"99"


def names_in_capitals(members: dict[str, bytes]) -> None:
    name = next(name for name in members if name.endswith("data/0"))
    members[name.replace("data/0", "DATA/0")] = members[name]


def other_byteorder(members: dict[str, bytes]) -> None:
    members[next(name for name in members if name.endswith("byteorder"))] = b"big"


def longer_tensor(members: dict[str, bytes]) -> None:
    name = next(name for name in members if name.endswith("data.pkl"))
    members[name] = members[name].replace(b"K\x06\x85", b"K\x07\x85")  # its shape: (6,)


@pytest.mark.parametrize(
    "change",
    [shorter_storage, no_storage, two_pickles, other_version, names_in_capitals, other_byteorder, longer_tensor],
)
def test_unsound_archives(tmp_path: Path, change: Callable[[dict[str, bytes]], None]) -> None:
    path = rewritten(tmp_path / "pytorch_model.bin", change)
    with pytest.raises(CheckpointError, match="pytorch_model.bin"):
        read_header(LocalFiles(), str(path))


def test_compressed_archives(tmp_path: Path) -> None:
    path = rewritten(tmp_path / "pytorch_model.bin", lambda members: None, zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="compressed"):
        read_header(LocalFiles(), str(path))


@pytest.mark.parametrize("keep", [0, 3, 40, 300, 550])
@pytest.mark.parametrize("zipped", [True, False])
def test_cut_files(tmp_path: Path, zipped: bool, keep: int) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.arange(60.0)}, path, _use_new_zipfile_serialization=zipped)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError):
        read_header(LocalFiles(), str(path))


def deep_key() -> bytes:
    """A tuple in a tuple, a hundred thousand times, as a key."""
    return b"\x80\x02})" + b"\x85" * 100_000 + b"K\x01s."


HOSTILE = {
    "memo index": b"\x80\x02]r" + struct.pack("<I", 2**31) + b".",
    "deep key": deep_key(),
    "a key whose hash takes for ever": b"\x80\x02})" + b"q\x01h\x01\x86" * 60 + b"K\x01s.",
    "a set of such": b"\x80\x05\x8f(" + b")" + b"q\x01h\x01\x86" * 60 + b"\x91.",
    "a frame beyond the end": b"\x80\x04\x95" + struct.pack("<Q", 2**40) + b"N.",
    "an array without bytes": b"\x80\x05\x96" + struct.pack("<Q", 2**33) + b".",
    "a mark as a value": b"\x80\x02((t.",
    "no end": b"\x80\x02}",
    "empty stack": b"\x80\x02.",
    "two values": b"\x80\x02NN.",
    "state for a dict": b"\x80\x02}Nb.",
    "unknown name": b"\x80\x02h\x05.",
    "extension registry": b"\x80\x02\x82\x01.",
    "long text": b"\x80\x02X\xff\xff\xff\x7fabc.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles(name: str) -> None:
    if name == "memo index":
        assert read_pickle(HOSTILE[name], "x").root == []  # and allocates nothing
        return
    with pytest.raises(CheckpointError, match="^x: "):
        read_pickle(HOSTILE[name], "x")


def test_small_files_that_are_large_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They refer to one object very often: nobody copies, prints or walks through it each time."""
    monkeypatch.setattr(pickles._Opcodes, "left", 100_000)
    state = pickle.dumps(dict.fromkeys(range(500)), protocol=2)[2:-1]
    copies = b"\x80\x02" + state + b"q\xff0(" + b"ca\nb\n)Rh\xffb" * 1000 + b"t."
    with pytest.raises(CheckpointError, match="at most .* opcodes"):
        read_pickle(copies, "x")
    with pytest.raises(CheckpointError, match="something else than torch.distributed"):
        metadata_of("x", read_pickle(pickle.dumps(torch.Size([1] * 65)), "x"))
    doubled: list[Any] = []
    for _ in range(60):
        doubled = [doubled, doubled]
    shapes = {f"layer {number}": torch.Size([]) for number in range(2000)}
    for changes, error in (
        ({"mp_world_size": doubled}, "expected 1, found a list of 2"),
        ({"param_shapes": [shapes] * 2000}, "more objects than any"),
    ):
        path = tmp_path / "mp_rank_00_model_states.pt"
        torch.save({"module": {}, "dp_world_size": 1, "param_shapes": [], **changes}, path)
        with pytest.raises((CheckpointError, UnsupportedError), match=error):
            read_model_file(LocalFiles(), str(path))


def to_bin(folder: Path, target: Path, shards: int) -> None:
    """The same checkpoint as pickled files."""
    target.mkdir()
    for name in ("config.json", "generation_config.json"):
        (target / name).write_bytes((folder / name).read_bytes())
    values = {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}
    names = sorted(values)
    weight_map = {}
    for number in range(shards):
        file = f"pytorch_model-{number + 1:05}-of-{shards:05}.bin"
        part = {name: values[name] for name in names[number::shards]}
        torch.save(part, target / file)
        weight_map |= dict.fromkeys(part, file)
    index = io.StringIO()
    json.dump({"metadata": {}, "weight_map": weight_map}, index)
    (target / "pytorch_model.bin.index.json").write_text(index.getvalue())


def test_each_rank_reads_its_own_bytes(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    to_bin(zoo_checkpoint("qwen3_moe"), folder, 3)
    total = sum(param.nbytes for param in transformers.AutoModelForCausalLM.from_pretrained(folder).parameters())
    for found in run_ranks(2, compare, "AutoModelForCausalLM", folder, {"dtype": torch.float32}):
        assert not found["differences"] and found["info"] == found["plain_info"]
        assert sum(rank["bytes_needed"] for rank in found["report"]["ranks"]) <= 1.02 * total
