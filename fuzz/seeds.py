"""Inputs that fuzzing starts from, made by hand; each is a few hundred bytes."""

from __future__ import annotations

import io
import json
import zipfile
from collections import OrderedDict
from typing import Any

import torch


__all__ = ["files", "indexes", "seeds_of_targets", "torch_files", "zero_files"]


def _file(header: Any, data: bytes = bytes(range(16))) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    return len(text).to_bytes(8, "little") + text + data


def _tensor(begin: int = 0, end: int = 16, dtype: Any = "F32", shape: Any = (4,), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end], **more}


def _raw(fields: bytes) -> bytes:
    """One tensor's fields as JSON text."""
    return _file(b'{"a":{' + fields + b"}}")


def files() -> dict[str, bytes]:
    """A name -> a safetensors file, sound or with one fault."""
    sound = json.dumps({"a": _tensor()}).encode()
    two = {"b": _tensor(8, 16, "BF16", [2, 2]), "a": _tensor(0, 8, "I64", [1])}
    empty_inside = {"a": _tensor(0, 8, "F64", [1]), "b": _tensor(8, 8, "F32", [0]), "c": _tensor(8, 16, "C64", [1])}
    odd_names = (
        b'{"":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},'
        b'"\\ud83d\\ude00\\n\xc3\xa9":{"dtype":"U8","shape":[8],"data_offsets":[8,16]}}'
    )
    return {
        "sound": _file({"__metadata__": {"format": "pt"}, **two}),
        "no-tensors": _file({}, b""),
        "scalar": _file({"a": _tensor(0, 1, "BOOL", [])}, b"\1"),
        "empty-tensors": _file({"a": _tensor(0, 0, "F8_E4M3", [0]), "b": _tensor(0, 0, "U16", [3, 0])}, b""),
        "empty-tensor-inside": _file(empty_inside),
        "other-names": _file(odd_names),
        "white-space": _file(b"{ \n\t\r" + sound[1:] + b"   "),
        "null-metadata": _file({"__metadata__": None, "a": _tensor()}),
        "metadata-of-numbers": _file({"__metadata__": {"a": 1}, "b": _tensor()}),
        "metadata-twice": _file(b'{"__metadata__":{},"__metadata__":{},' + sound[1:]),
        "key-twice-in-metadata": _file(b'{"__metadata__":{"x":"1","x":"2"},' + sound[1:]),
        "tensor-twice": _file(sound[:-1] + b"," + sound[1:]),
        "field-twice": _raw(b'"dtype":"F32","dtype":"F32","shape":[4],"data_offsets":[0,16]'),
        "field-more": _file({"a": _tensor(more=1)}),
        "field-less": _raw(b'"dtype":"F32","shape":[4]'),
        "tensor-as-list": _file({"a": ["F32", [4], [0, 16]]}),
        "dtype-as-object": _file({"a": _tensor(dtype={"F32": None})}),
        "dtype-unknown": _file({"a": _tensor(dtype="F12")}),
        "dtype-of-half-a-byte": _file({"a": _tensor(dtype="F4", shape=[32])}),
        "minus-zero": _raw(b'"dtype":"F32","shape":[4],"data_offsets":[-0,16]'),
        "float": _raw(b'"dtype":"F32","shape":[4.0],"data_offsets":[0,1.6e1]'),
        "not-a-number": _raw(b'"dtype":"F32","shape":[NaN],"data_offsets":[0,Infinity]'),
        "bool": _file({"a": _tensor(shape=[True, 4])}),
        "negative": _file({"a": _tensor(shape=[-4])}),
        "leading-zero": _raw(b'"dtype":"F32","shape":[04],"data_offsets":[0,16]'),
        "overflow": _file({"a": _tensor(shape=[2**62, 4])}),
        "overflow-of-an-empty-tensor": _file({"a": _tensor(0, 0, shape=[2**62, 4, 0])}, b""),
        "overflow-after-a-zero": _file({"a": _tensor(0, 0, shape=[0, 2**62, 4])}, b""),
        "more-than-int64": _file({"a": _tensor(0, 0, shape=[0, 2**63])}, b""),
        "many-dimensions": _file({"a": _tensor(shape=[1] * 64 + [4])}),
        "long-name": _file({"a" * 1025: _tensor()}),
        "half-a-pair-in-a-name": _file(b'{"\\ud800":' + sound[5:]),
        "half-a-pair-in-metadata": _file(b'{"__metadata__":{"\\udc00":"x"},' + sound[1:]),
        "not-utf-8": _file(b'{"\xff' + sound[2:]),
        "byte-order-mark": _file(b"\xef\xbb\xbf" + sound),
        "space-before": _file(b" " + sound),
        "nul-after": _file(sound + b"\0"),
        "list": _file([], b""),
        "nested": _file(b'{"a":' + b"[" * 200 + b"]" * 200 + b"}"),
        "hole": _file({"a": _tensor(4, 16, shape=[3])}),
        "overlap": _file({"a": _tensor(0, 8, shape=[2]), "b": _tensor(4, 16, shape=[3])}),
        "truncated": _file({"a": _tensor(0, 32, shape=[8])}),
        "too-long": _file({"a": _tensor(0, 8, shape=[2])}),
        "length-too-large": (2**63).to_bytes(8, "little") + sound,
        "length-beyond-the-file": (1000).to_bytes(8, "little") + sound,
        "seven-bytes": b"\0" * 7,
    }  # fmt: skip


def indexes() -> dict[str, bytes]:
    """A name -> an index file, sound or with one fault."""

    def index(*names: Any, **metadata: Any) -> bytes:
        weight_map = {f"t{number}": name for number, name in enumerate(names)}
        return json.dumps({"metadata": {"total_size": 32, **metadata}, "weight_map": weight_map}).encode()

    shard = "model-00001-of-00002.safetensors"
    return {
        "sound": index(shard, "model-00002-of-00002.safetensors", shard),
        "subfolder": index(f"part/{shard}", dtype="bfloat16"),
        "not-utf-8": b'{"weight_map":{"\xff":"a.safetensors"},"metadata":{}}',
        "key-twice": b'{"metadata":{},"weight_map":{"a":"x.safetensors","a":"y.safetensors"}}',
        "list": b"[]",
        "nested": b'{"metadata":' + b'{"a":' * 300 + b"1" + b"}" * 300 + b',"weight_map":{"a":"x.safetensors"}}',
        "no-metadata": json.dumps({"weight_map": {"a": shard}}).encode(),
        "null-metadata": json.dumps({"weight_map": {"a": shard}, "metadata": None}).encode(),
        "no-dtype": index(shard, dtype="nn"),
        "no-names": index(),
        "list-of-names": json.dumps({"metadata": {}, "weight_map": [shard]}).encode(),
        "number-as-name": index(1),
        "list-as-name": index([shard]),
        "parent": index(f"../{shard}"),
        "parent-inside": index(f"a/../../{shard}"),
        "absolute": index(f"/tmp/{shard}"),
        "dot": index(f"./{shard}"),
        "backslash": index(f"..\\{shard}"),
        "nul": index(f"\0{shard}"),
        "escape-of-a-terminal": index(f"\x1b[2J{shard}"),
        "half-a-pair": index("\ud800.safetensors"),
        "pickle": index("pytorch_model.bin"),
        "float": index(shard, total_size=1.5e9),
    }


def _unframe(content: bytes) -> bytes:
    """What :func:`fuzz.targets.frame` makes the sound ones of :func:`files` of, and something like the others."""
    stop = min(8 + int.from_bytes(content[:8], "little"), len(content))
    return (len(content) - stop).to_bytes(2, "little") + content[8:stop]


NAMES = {
    "sound": b"model-00001-of-00002.safetensors\npart/model-00002-of-00002.safetensors",
    "parent": b"../model.safetensors\na/../../model.safetensors",
    "absolute": b"/model.safetensors",
    "parts": b"./model.safetensors\na//model.safetensors",
    "not-utf-8": b"\xff.safetensors",
    "marks": "\u202e.safetensors\n\u00a0.safetensors\n\x7f.safetensors".encode(),
    "long": b"a" * 1025 + b".safetensors",
    "ending": b"model.safetensors/\nmodel.bin\n.safetensors",
}
"""A name -> the names of an index's shards, one a line."""


def torch_files() -> dict[str, bytes]:
    """A name -> a file of ``torch.save``."""
    values = torch.arange(12, dtype=torch.float32)
    saved = {
        "zip": {"a": values, "b": values[4:].view(2, 4)},
        "ordered": OrderedDict(a=torch.nn.Parameter(values[:2].bfloat16()), b=torch.tensor(1)),
        "transposed": {"a": values.view(3, 4).t()},
        "nested": {"a": {"b": [values, 1.5, None, (True, "x")]}},
    }
    files = {}
    for name, value in saved.items():
        for kind, zipped in (("", True), ("-legacy", False)):
            data = io.BytesIO()
            torch.save(value, data, _use_new_zipfile_serialization=zipped)
            files[name + kind] = data.getvalue()
    return files


def _descriptions() -> dict[str, bytes]:
    """The description in each archive of :func:`torch_files`."""
    found = {}
    for name, content in torch_files().items():
        if content.startswith(b"PK"):
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                found[name] = archive.read("archive/data.pkl")
    return found


def zero_files() -> dict[str, dict[str, bytes]]:
    """ "stage 3", "stage 2" -> the files of a ZeRO checkpoint of two ranks, with a parameter in each of two groups."""

    def saved(content: Any) -> bytes:
        data = io.BytesIO()
        torch.save(content, data)
        return data.getvalue()

    shapes = [OrderedDict(a=torch.Size([3, 2])), OrderedDict(b=torch.Size([5]))]
    model = {
        **{"buffer_names": ["c"], "param_shapes": shapes, "shared_params": {"d": "a"}, "lr_scheduler": {"step": 2}},
        **{"dp_world_size": 2, "mp_world_size": 1, "global_steps": 3, "epoch": 1},
    }
    frozen = {"frozen_param_shapes": {"f": torch.Size([3])}, "frozen_param_fragments": {"f": torch.ones(2)}}
    places = {"module": {"c": torch.zeros(2)}}
    files: dict[str, dict[str, bytes]] = {"stage 3": {}, "stage 2": {}}
    for rank in range(2):
        name = f"zero_pp_rank_{rank}_mp_rank_00"
        values = [torch.arange(3.0), torch.arange(3.0)]
        state = {
            number: {"step": torch.tensor(3.0), "exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)}
            for number in range(2)
        }
        groups = [{"lr": 0.1, "betas": (0.9, 0.99), "params": [number]} for number in range(2)]
        inner = {"state": state, "param_groups": groups}
        common = {"zero_stage": 3, "partition_count": 2, "loss_scaler": None}
        optimizer = {**common, "fp32_flat_groups": values, "optimizer_state_dict": inner}
        files["stage 3"][f"{name}_optim_states.pt"] = saved({"optimizer_state_dict": optimizer})
        files["stage 3"][f"{name}_model_states.pt"] = saved({**model, **places, **frozen})
        values = [torch.arange(3.0), torch.arange(3.0 - rank)]
        paddings = {"group_paddings": [0, rank], "param_alignment_paddings": [[0], [0]], "partition_count": [2, 2]}
        optimizer = {**common, **paddings, "zero_stage": 2, "base_optimizer_state": inner}
        optimizer["single_partition_of_fp32_groups"] = values
        files["stage 2"][f"{name}_optim_states.pt"] = saved({"optimizer_state_dict": optimizer})
    whole = {"module": {"a": torch.zeros(3, 2), "b": torch.zeros(5), "c": torch.zeros(2), "f": torch.ones(3)}}
    files["stage 2"]["mp_rank_00_model_states.pt"] = saved({**model, **whole})
    return files


def _zero_descriptions() -> dict[str, bytes]:
    """For each of :func:`zero_files`, what leaves it as it is; and what has once been a fault."""
    everything = [(stage, name, data) for stage, files in zero_files().items() for name, data in files.items()]
    found = {}
    for number, (stage, name, data) in enumerate(everything):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            found[f"{stage} {name}".replace(" ", "-")] = bytes([number]) + archive.read("archive/data.pkl")
    return found | {"calls-a-dict": b"\x01\x80\x02})R."}


def seeds_of_targets() -> dict[str, dict[str, bytes]]:
    """A target -> its seeds, by their names."""
    from . import distributed, server  # their plug-ins may not be there for who wants seeds of the core

    return {
        "file": files(),
        "header": {name: _unframe(content) for name, content in files().items()},
        "index": indexes(),
        "names": NAMES,
        "torch": torch_files(),
        "pickle": _descriptions(),
        "zero": _zero_descriptions(),
        "distcp": distributed.seeds(),
        "server": server.seeds(),
        "store": server.seeds_of_store(),
    }
