"""Folders of torch.distributed.checkpoint, written by FSDP2: as maps of bytes, beside what torch makes of them."""

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import hf_zero_stream
from hf_zero_stream.checkpoint.formats import contents_of
from hf_zero_stream.errors import CheckpointError, ReadError, UnsupportedError
from hf_zero_stream.plugins.pickled.convert import convert
from tests.sharded.test_load_into_sharded import build
from tests.support.cluster import run_ranks
from tests.support.hosts import move_to_host
from tests.support.parity import ds_config
from tests.support.saving import different
from tests.support.sharded import sharded_differences
from tests.support.zoo import Checkpoint


CAUSAL = transformers.AutoModelForCausalLM
MESHES = {"two": [0, 1], "three": [0, 1, 2], "hsdp": [[0, 1], [2, 3]]}


def write(checkpoint: Path, folder: Path) -> None:
    """One model by each mesh, as accelerate saves it (SHARDED_STATE_DICT), with its optimizer beside it."""
    for name, ranks in MESHES.items():
        names = ("replicate", "shard") if name == "hsdp" else ("shard",)
        mesh = DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=names)
        group = dist.new_group(torch.tensor(ranks).flatten().tolist())
        if dist.get_rank() not in torch.tensor(ranks).flatten():
            continue
        model = CAUSAL.from_pretrained(checkpoint)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        state: dict[str, Any] = {"model": get_model_state_dict(model), "step": 3}
        if name == "two":
            moments = {key: {"exp_avg": value} for key, value in state["model"].items()}
            state["optimizer"] = {"state": moments, "param_groups": [{"lr": 0.1}]}
        dcp.save(state, checkpoint_id=folder / name, process_group=group)


@pytest.fixture(scope="module")
def saved(cluster: None, zoo_checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders by name, each with the model's config."""
    folder, checkpoint = tmp_path_factory.mktemp("distcp"), zoo_checkpoint("qwen3_moe")
    run_ranks(4, write, checkpoint, folder)
    model = CAUSAL.from_pretrained(checkpoint)
    dcp.save(model.state_dict(), checkpoint_id=folder / "plain", no_dist=True)
    for name in (*MESHES, "plain"):
        shutil.copy(checkpoint / "config.json", folder / name)
    return folder


def of_torch(folder: Path, target: Path) -> dict[str, torch.Tensor]:
    dcp_to_torch_save(folder, target)
    found = torch.load(target, weights_only=False)
    return dict(found.get("model", found))


@pytest.mark.parametrize("name", [*MESHES, "plain"])
def test_converted_as_torch_converts(saved: Path, tmp_path: Path, name: str) -> None:
    """Shards of 3 ranks are of unequal sizes; some ranks have nothing of a tensor."""
    expected = of_torch(saved / name, tmp_path / "torch.pt")
    done = convert(saved / name, tmp_path / "ours", max_shard_size="40KB")
    found = {
        key: value for path in (tmp_path / "ours").glob("*.safetensors") for key, value in load_file(path).items()
    }
    assert found.keys() == expected.keys() and len(done.files) > 1
    assert all(found[key].dtype == expected[key].dtype for key in expected)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert (
        sorted(path.suffix for path in (tmp_path / "ours").iterdir() if path.suffix != ".safetensors") == [".json"] * 2
    )


@pytest.mark.parametrize("strides", [None, (4, 1)])
def test_what_torch_2_15_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strides: Any) -> None:
    """A tensor's properties have one more field there."""
    stock = TensorProperties.__getstate__
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda self: (*stock(self)[:5], strides))
    values = {"w": torch.arange(12.0).view(3, 4)}
    dcp.save(values, checkpoint_id=tmp_path / "saved", no_dist=True)
    convert(tmp_path / "saved", tmp_path / "ours")
    assert torch.equal(load_file(tmp_path / "ours" / "model.safetensors")["w"], values["w"])


@pytest.mark.parametrize("later", ["strides", (1, -1), (print,), (1, 2, 3)])
def test_fields_that_torch_does_not_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: Any) -> None:
    stock = TensorProperties.__getstate__
    fields = later if later == (1, 2, 3) else (later,)
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda self: (*stock(self)[:5], *fields))
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "saved", no_dist=True)
    with pytest.raises(CheckpointError):
        contents_of(tmp_path / "saved")


def test_layout_of_the_hub(saved: Path, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    CAUSAL.from_pretrained(zoo_checkpoint("qwen3_moe")).save_pretrained(tmp_path / "stock")
    convert(saved / "three", tmp_path / "ours", layout="hub")
    assert different(tmp_path / "ours", tmp_path / "stock") == []


def test_what_is_left_out_is_named(saved: Path) -> None:
    (note,) = contents_of(saved / "two").notes
    assert note.startswith("Left out") and "'optimizer.param_groups" in note and "in all" in note
    assert contents_of(saved / "plain").notes == ()
    names = contents_of(saved / "two").views.keys()
    assert "lm_head.weight" in names and names == contents_of(saved / "plain").views.keys()


def load(folder: Path) -> dict[str, Any]:
    """By `load_into` an FSDP2 model, without a config beside the checkpoint, and by `from_pretrained` under ZeRO-3."""
    plain = CAUSAL.from_pretrained(folder / "stock")
    (folder / "alone").mkdir(exist_ok=True)
    model = build("fsdp", folder / "three").eval()
    report = hf_zero_stream.load_into(model, str(folder / "bare"))
    mine = report.ranks[dist.get_rank()]
    local = sum(param.to_local().nbytes for param in model.parameters())
    with hf_zero_stream.streaming():
        streamed = CAUSAL.from_pretrained(folder / "three", ds_config=ds_config())
    unequal = []
    for (name, param), expected in zip(streamed.named_parameters(), plain.parameters(), strict=True):
        with deepspeed.zero.GatheredParameters([param]):
            if not torch.equal(param, expected):
                unequal.append(name)
    read = streamed.streaming_report.ranks[dist.get_rank()].bytes_needed
    return {
        "differences": sharded_differences(model, plain),
        "needed": mine.bytes_needed <= 1.02 * local,
        "unequal": unequal,
        "read": read < 0.6 * sum(param.nbytes for param in plain.parameters()),
    }


def test_each_rank_reads_its_own_bytes(saved: Path, zoo_checkpoint: Checkpoint) -> None:
    shutil.copytree(saved / "three", saved / "bare", ignore=shutil.ignore_patterns("*.json"))
    shutil.copytree(zoo_checkpoint("qwen3_moe"), saved / "stock")
    expected = {"differences": [], "needed": True, "unequal": [], "read": True}
    assert run_ranks(2, load, saved) == [expected] * 2


def load_from_copies(folder: Path, scratch: Path) -> list[str]:
    """The errors where the copy on rank 1's host is the same, and where one of its files has another size."""
    seen, errors = folder, []
    if dist.get_rank():
        seen = shutil.copytree(folder, scratch / "copy")
        move_to_host("another")
    for change in (False, True):
        if change and seen != folder:
            with open(next(seen.glob("*.distcp")), "ab") as file:
                file.write(b"more")
        try:
            hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(seen, ds_config=ds_config())
        except CheckpointError as error:
            errors.append(str(error))
    return errors


def test_copies_on_other_hosts_are_compared(saved: Path, tmp_path: Path) -> None:
    for errors in run_ranks(2, load_from_copies, saved / "three", tmp_path):
        (error,) = errors
        assert ".metadata: the file on this host has another header than rank 0's" in error


# ------------------------------------------------------------------------------------------------------------- faults


def first_tensor(metadata: Metadata) -> Any:
    """One that two ranks or more have parts of."""
    return next(
        (key, value)
        for key, value in metadata.state_dict_metadata.items()
        if key.startswith("model.") and len(getattr(value, "chunks", ())) == 3 and value.size[0] >= 3
    )


def hole(metadata: Metadata) -> None:
    del first_tensor(metadata)[1].chunks[1]


def no_chunks(metadata: Metadata) -> None:
    first_tensor(metadata)[1].chunks.clear()


def overlap(metadata: Metadata) -> None:
    key, tensor = first_tensor(metadata)
    chunk = tensor.chunks[1]
    before = MetadataIndex(key, chunk.offsets)
    chunk.offsets = torch.Size([chunk.offsets[0] - 1, *chunk.offsets[1:]])
    metadata.storage_data[MetadataIndex(key, chunk.offsets)] = metadata.storage_data.pop(before)


def out_of_bounds(metadata: Metadata) -> None:
    chunk = first_tensor(metadata)[1].chunks[2]
    chunk.offsets = torch.Size([chunk.offsets[0] + 1, *chunk.offsets[1:]])


def no_item(metadata: Metadata) -> None:
    key = first_tensor(metadata)[0]
    metadata.storage_data = {index: info for index, info in metadata.storage_data.items() if index.fqn != key}


def of_first(metadata: Metadata) -> list[Any]:
    key = first_tensor(metadata)[0]
    return [info for index, info in metadata.storage_data.items() if index.fqn == key]


def other_file(metadata: Metadata) -> None:
    of_first(metadata)[0].relative_path = "../three/__0_0.distcp"


def missing_file(metadata: Metadata) -> None:
    of_first(metadata)[0].relative_path = "__9_0.distcp"


def compressed(metadata: Metadata) -> None:
    of_first(metadata)[0].transform_descriptors = ["zstd"]


def beyond_the_end(metadata: Metadata) -> None:
    of_first(metadata)[0].offset += 2**40


def same_bytes_twice(metadata: Metadata) -> None:
    first, second, *_ = (info for info in metadata.storage_data.values() if info.relative_path == "__0_0.distcp")
    second.offset, second.length = first.offset, first.length


def other_dtype(metadata: Metadata) -> None:
    first_tensor(metadata)[1].properties.dtype = torch.int32


def no_model(metadata: Metadata) -> None:
    metadata.planner_data = {
        key: ("optimizer", *way) for key, way in metadata.planner_data.items() if way[0] != "model"
    }
    metadata.state_dict_metadata = {
        key: value for key, value in metadata.state_dict_metadata.items() if not key.startswith("model.")
    }


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (hole, CheckpointError, "the chunks of tensor .* overlap, or leave holes"),
        (no_chunks, CheckpointError, "the chunks of tensor .* overlap, or leave holes"),
        (overlap, CheckpointError, "the chunks of tensor .* overlap, or leave holes"),
        (out_of_bounds, CheckpointError, "expected a chunk inside its shape"),
        (no_item, CheckpointError, "its chunk at .* is in no file"),
        (other_file, CheckpointError, "'../three/__0_0.distcp' has '.', '..' or nothing between two slashes"),
        (missing_file, ReadError, "__9_0.distcp: cannot read the distributed checkpoint"),
        (compressed, UnsupportedError, "was changed when it was written .*zstd"),
        (beyond_the_end, CheckpointError, "lies beyond the end of the file"),
        (same_bytes_twice, CheckpointError, "overlaps another one"),
        (other_dtype, CheckpointError, "expected I32 .* found F32"),
        (no_model, CheckpointError, "expected tensors of a model"),
    ],
)
def test_unsound_folders(
    saved: Path, tmp_path: Path, change: Callable[[Metadata], None], error: type[Exception], message: str
) -> None:
    folder = tmp_path / "three"
    shutil.copytree(saved / "three", folder)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(error, match=message):
        convert(folder, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_no_pickle_is_run(saved: Path, tmp_path: Path) -> None:
    from tests.pickled.test_torch_files import Executes

    folder, trace = tmp_path / "three", tmp_path / "trace"
    shutil.copytree(saved / "three", folder)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data["x"] = Executes(trace)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="it makes something else than torch.distributed.checkpoint does"):
        contents_of(folder)
    assert not trace.exists()


@pytest.mark.parametrize("keep", [0, 1, 100, 2000])
def test_cut_metadata(saved: Path, tmp_path: Path, keep: int) -> None:
    shutil.copytree(saved / "plain", tmp_path / "plain")
    (tmp_path / "plain" / ".metadata").write_bytes((saved / "plain" / ".metadata").read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        contents_of(tmp_path / "plain")


def test_an_opcode_across_the_end_of_a_frame(saved: Path, tmp_path: Path) -> None:
    """There Python's unpickler in C drops what is left of the frame, so that two readers see two pickles."""
    shutil.copytree(saved / "plain", tmp_path / "plain")
    path = tmp_path / "plain" / ".metadata"
    data = path.read_bytes()
    protocol, length = data[:3], int.from_bytes(data[3:11], "little")
    assert protocol == b"\x80\x04\x95" and 11 + length == len(data)  # one frame around everything
    inside_a_name = data.index(b"torch.distributed") + 5 - 11
    path.write_bytes(protocol + inside_a_name.to_bytes(8, "little") + data[11:])
    with pytest.raises(CheckpointError, match="before end of frame"):
        contents_of(tmp_path / "plain")
