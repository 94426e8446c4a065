"""``hf-zero-stream inspect``: what is in a checkpoint, and in the model that it becomes."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer

from ...plugin_api import bytes_text, count_text, dtype_name, fold, folded_names, frame, is_url


EXAMPLE = "hf-zero-stream inspect Qwen/Qwen3-30B-A3B"

MOST_SHARDS = 8
"""Most shards that the table lists; of more, it shows the first, the last, and one row for those in between."""


def run(
    path: frame.CheckpointArgument,
    model: Annotated[bool, typer.Option(help="Show the model's parameters too, which takes seconds more.")] = True,
    every: Annotated[
        bool, typer.Option("--all", help=f"List every shard, also of more than {MOST_SHARDS}; JSON always does.")
    ] = False,
    revision: frame.RevisionOption = None,
    trust_remote_code: frame.TrustOption = False,
    dequantize: frame.DequantizeOption = False,
    form: frame.FormatOption = "table",
) -> None:
    """Show what is in a checkpoint: shards, tensors, sizes.

    Also shows the parameters of the model that transformers makes of it. Names that differ only in their numbers are
    written as one. Reads headers only, also from a repository on the Hub.
    """
    from ...plugin_api import place_of

    with place_of(path, revision) as place:
        with frame.quiet():
            data = {"path": path, **_checkpoint(place)}

        def made() -> dict[str, Any]:
            with frame.quiet():
                made = _model(place, trust_remote_code, dequantize) if model else "it was not asked for"
            return {"model": None, "no_model_because": made} if isinstance(made, str) else {"model": made}

        # As a table, the files stand there before transformers, which takes seconds, is imported for the model.
        frame.emit(data | made() if form == "json" else data, _blocks(data, made, every), form)


def _checkpoint(place: str) -> dict[str, Any]:
    from ...plugin_api import entries_of, file_dtype_name, read_checkpoint_map

    checkpoint = read_checkpoint_map(place)
    tensors = [
        (name, file_dtype_name(view.node.dtype), view.sizes, view.numel * view.node.dtype.itemsize)
        for name, view in checkpoint.views.items()
    ]
    dtypes = defaultdict[str, Counter[str]](Counter)
    for _, dtype, _, nbytes in tensors:
        dtypes[dtype].update(tensors=1, bytes=nbytes)
    # A tensor may lie in several files: each has a part of it.
    counts = Counter(shard for view in checkpoint.views.values() for shard in {it.shard for it in entries_of([view])})
    return {
        "format": checkpoint.format,
        "bytes": sum(shard.size_bytes for shard in checkpoint.shards),
        "shards": [
            {"file": os.path.basename(shard.path), "tensors": counts[number], "bytes": shard.size_bytes}
            for number, shard in enumerate(checkpoint.shards)
        ],
        "count": len(tensors),
        "dtypes": dtypes,
        "tensors": _folded(tensors),
        "promised_in_vain": folded_names(checkpoint.absent),
        "notes": list(checkpoint.notes),
    }


def _model(place: str, trust_remote_code: bool, dequantize: bool) -> dict[str, Any] | str:
    """The model's parameters, or why there are none: checkpoints that fit no known class can be inspected too."""
    from ...plugin_api import checkpoints_at

    name = "config.json"
    if not (
        checkpoints_at(place).has_file(place, name) if is_url(place) else os.path.isfile(os.path.join(place, name))
    ):
        return "there is no config.json"
    from ...errors import CheckpointError, UnsupportedError
    from ...plugin_api import lazy_model, load_arguments, refuse_unloadable, transformers_errors

    try:
        refuse_unloadable(place)
        with transformers_errors(place):
            model, missing, tied = lazy_model(place, load_arguments(place, trust_remote_code, dequantize))
    except (CheckpointError, UnsupportedError) as error:
        return str(error)
    parameters = {name: param for name, param in model.named_parameters() if name not in tied}
    rows = [(name, dtype_name(param.dtype), tuple(param.shape), param.nbytes) for name, param in parameters.items()]
    return {
        "class": type(model).__name__,
        "bytes": sum(param.nbytes for param in parameters.values()),
        "parameters": _folded(rows),
        "missing": folded_names(sorted(missing & parameters.keys())),
        "tied": folded_names(sorted(tied)),
    }


def _folded(rows: Iterable[tuple[str, str, tuple[int, ...], int]]) -> list[dict[str, Any]]:
    """One line for all (name, dtype, shape, bytes) that differ only in numbers, with the bytes of all of them."""
    return [
        {"name": name, "count": size, "dtype": dtype, "shape": list(shape), "bytes": size * nbytes}
        for name, (dtype, shape, nbytes), size in fold((name, tuple(kind)) for name, *kind in rows)
    ]


def _shard_rows(shards: Sequence[Mapping[str, Any]], every: bool) -> Iterator[tuple[str, str, str]]:
    between = () if every or len(shards) <= MOST_SHARDS else shards[1:-1]
    for shard in (shards[0], shards[-1]) if between else shards:
        if between and shard is shards[-1]:
            sizes = [other["bytes"] for other in between]
            text = f"... {len(between):,} more, {bytes_text(min(sizes))} to {bytes_text(max(sizes))} each (--all)"
            yield text, f"{sum(other['tensors'] for other in between):,}", bytes_text(sum(sizes))
        yield shard["file"], f"{shard['tensors']:,}", bytes_text(shard["bytes"])


def _blocks(data: Mapping[str, Any], made: Callable[[], Mapping[str, Any]], every: bool) -> Iterator[str]:
    shards = data["shards"]
    dtypes = ", ".join(f"{name} {bytes_text(found['bytes'])}" for name, found in data["dtypes"].items())
    kind = "" if data["format"] == "safetensors" else f"{data['format']}, "
    held = f"{count_text(len(shards), 'shard')}, {count_text(data['count'], 'tensor')}, {bytes_text(data['bytes'])}"
    yield f"{data['path']}: {kind}{held}; {dtypes}"
    yield frame.table(("Shard", "Tensors", "Size"), _shard_rows(shards, every))
    yield _families("Tensor", data["tensors"])
    if data["promised_in_vain"]:
        yield f"Promised by the index, but in no shard: {', '.join(data['promised_in_vain'])}"
    yield from data["notes"]
    model = (found := made())["model"]
    if model is None:
        yield f"No model: {found['no_model_because'].removesuffix('.')}."
        return
    yield f"As a {model['class']}, it has {bytes_text(model['bytes'])} of parameters:"
    yield _families("Parameter", model["parameters"])
    if model["missing"]:
        yield f"Not in the checkpoint, so they are initialised: {', '.join(model['missing'])}"
    if model["tied"]:
        yield f"Tied to others: {', '.join(model['tied'])}"


def _families(title: str, lines: Iterable[Mapping[str, Any]]) -> str:
    rows = []
    for line in lines:
        shape = " x ".join(map(str, line["shape"])) or "scalar"
        rows.append((line["name"], line["dtype"], shape, f"{line['count']:,}", bytes_text(line["bytes"])))
    return frame.table((title, "Dtype", "Shape", "Count", "Size"), rows, left=3)
