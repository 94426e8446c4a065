"""``hf-zero-stream inspect``: what is in a checkpoint, and what its model class makes of it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ..reports.folding import fold
from .output import (
    CheckpointArgument,
    DequantizeOption,
    Format,
    FormatOption,
    RevisionOption,
    TrustOption,
    bytes_text,
    count_text,
    emit,
    quiet,
    table,
)


if TYPE_CHECKING:
    from ..checkpoint.index import CheckpointIndex
    from .shapes import ModelShapes

EXAMPLE = "hf-zero-stream inspect Qwen/Qwen3-30B-A3B"


def run(
    path: CheckpointArgument,
    model: Annotated[
        bool, typer.Option(help="Show the model's parameters too, for which transformers is imported.")
    ] = True,
    revision: RevisionOption = None,
    trust_remote_code: TrustOption = False,
    dequantize: DequantizeOption = False,
    form: FormatOption = Format.table,
) -> None:
    """Show shards, tensors, dtypes and sizes, and the model's parameters after conversion.

    Names that differ only in their numbers are written as one. Reads headers only, also from a repository on the Hub.
    """
    from .checkpoints import headers

    with quiet(), headers(path, revision) as folder:
        index = _index(folder)
        shapes, reason = _shapes(folder, trust_remote_code, dequantize) if model else (None, "it was not asked for")

    data = {"path": path, **_checkpoint(index), "model": None if shapes is None else _model(shapes)}
    if shapes is None:
        data["no_model_because"] = reason
    emit(data, _blocks(data), form)


def _index(folder: Path) -> CheckpointIndex:
    from ..checkpoint.index import CheckpointIndex
    from ..checkpoint.soundness import shards_of

    files, weight_map = shards_of(folder)
    return CheckpointIndex.from_files(files, weight_map)


def _shapes(folder: Path, trust_remote_code: bool, dequantize: bool) -> tuple[ModelShapes | None, str]:
    """The model's parameters, or why there are none: a checkpoint can be looked at that fits no known class."""
    if not (folder / "config.json").is_file():
        return None, "there is no config.json"
    from ..errors import CheckpointError, UnsupportedError
    from .shapes import load_arguments, model_shapes

    try:
        return model_shapes(folder, load_arguments(folder, trust_remote_code, dequantize)), ""
    except (CheckpointError, UnsupportedError) as error:
        return None, str(error)


def _checkpoint(index: CheckpointIndex) -> dict[str, Any]:
    from ..checkpoint.safetensors import dtype_name

    entries = list(index.tensors.values())
    counts, sizes = Counter[str](), Counter[str]()
    in_shard = Counter(entry.shard for entry in entries)
    for entry in entries:
        counts[dtype_name(entry.dtype)] += 1
        sizes[dtype_name(entry.dtype)] += entry.stop - entry.start
    return {
        "bytes": sum(shard.size_bytes for shard in index.shards),
        "shards": [
            {"file": os.path.basename(shard.path), "tensors": in_shard[number], "bytes": shard.size_bytes}
            for number, shard in enumerate(index.shards)
        ],
        "dtypes": {name: {"tensors": counts[name], "bytes": sizes[name]} for name in sizes},
        "tensors": _folded(
            (entry.name, dtype_name(entry.dtype), entry.shape, entry.stop - entry.start) for entry in entries
        ),
        "promised_in_vain": [family.name for family in fold((name, ()) for name in index.absent)],
        "notes": list(index.notes),
    }


def _model(shapes: ModelShapes) -> dict[str, Any]:
    parameters = shapes.parameters
    missing, tied = shapes.missing, shapes.tied
    return {
        "class": shapes.class_name,
        "bytes": sum(shape.nbytes for shape in parameters),
        "parameters": _folded(
            (shape.name, str(shape.dtype).removeprefix("torch."), shape.shape, shape.nbytes) for shape in parameters
        ),
        "missing": [family.name for family in fold((name, ()) for name in missing)],
        "tied": [family.name for family in fold((name, ()) for name in tied)],
    }


def _folded(tensors: Iterable[tuple[str, str, tuple[int, ...], int]]) -> list[dict[str, Any]]:
    """(name, dtype, shape, bytes) of each, folded; bytes are those of all that a line stands for."""
    folded = []
    for family in fold((name, (dtype, shape, nbytes)) for name, dtype, shape, nbytes in tensors):
        dtype, shape, nbytes = family.kind
        line = {"name": family.name, "count": family.count, "dtype": dtype, "shape": list(shape)}
        folded.append({**line, "bytes": family.count * nbytes})
    return folded


def _blocks(data: Mapping[str, Any]) -> Iterator[Table | str]:
    shards, dtypes, model = data["shards"], data["dtypes"], data["model"]
    count = sum(shard["tensors"] for shard in shards)
    yield (
        f"{data['path']}: {count_text(len(shards), 'shard')}, {count_text(count, 'tensor')}, "
        f"{bytes_text(data['bytes'])}; "
        + ", ".join(f"{name} {bytes_text(found['bytes'])}" for name, found in dtypes.items())
    )
    yield table(
        ("Shard", "Tensors", "Size"),
        [(shard["file"], f"{shard['tensors']:,}", bytes_text(shard["bytes"])) for shard in shards],
    )
    yield _families("Tensor", data["tensors"])
    if data["promised_in_vain"]:
        yield f"Promised by the index, but in no shard: {', '.join(data['promised_in_vain'])}"
    yield from data["notes"]
    if model is None:
        yield f"No model: {data['no_model_because'].removesuffix('.')}."
        return
    yield f"{model['class']} makes of it {bytes_text(model['bytes'])} of parameters:"
    yield _families("Parameter", model["parameters"])
    if model["missing"]:
        yield f"Not in the checkpoint, hence initialised: {', '.join(model['missing'])}"
    if model["tied"]:
        yield f"Tied to others: {', '.join(model['tied'])}"


def _families(title: str, lines: Iterable[Mapping[str, Any]]) -> Table:
    rows = [
        (
            line["name"],
            line["dtype"],
            " x ".join(map(str, line["shape"])) or "scalar",
            f"{line['count']:,}",
            bytes_text(line["bytes"]),
        )
        for line in lines
    ]
    return table((title, "Dtype", "Shape", "Count", "Size"), rows, left=3)
