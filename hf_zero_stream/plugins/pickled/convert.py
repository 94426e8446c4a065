"""Convert a checkpoint on disk into one with other shards, dtype or layout, by the map of a load, in one pass.

It needs no process group, and no model: for another layout the model's code runs over tensors without values.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import split_torch_state_dict_into_shards

from ...errors import ConfigError, UnsupportedError
from ...plugin_api import (
    INDEX,
    SINGLE,
    AnonymousMemory,
    Batch,
    CheckpointMap,
    Coordinator,
    Copy,
    FileTensor,
    Item,
    LazyTensor,
    NotedShard,
    OpenCheckpoint,
    Publication,
    Reader,
    ShardToWrite,
    ShardWriter,
    StreamingConfig,
    Target,
    View,
    contents_of,
    holds_values,
    in_dtype,
    lay_out_pretrained,
    lay_out_shard,
    note_dtype,
    parse_object,
    reserve,
    reverse_all_conversions,
    state_folder_of,
    zero_folder_of,
)


logger = logging.getLogger(__name__)

CHUNK_BYTES = 64 * 2**20
CONFIG = "config.json"
_OF_TRAINING = ("latest", "zero_to_fp32.py", "zero_to_torch.py")
_NOT_COPIED = (".gguf", ".h5", ".msgpack", ".index.json")


@dataclass(frozen=True)
class Converted:
    """The result of a conversion; bytes are without headers."""

    files: tuple[str, ...]  # the names of the shards
    tensors: int
    bytes_read: int
    bytes_written: int
    anonymous_growth_peak: int  # most anonymous host memory, in bytes over what it was before


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    layout: Literal["same", "hub", "model"] = "same",
    config: str | os.PathLike[str] | None = None,
    trust_remote_code: bool = False,
    progress: bool = True,
) -> Converted:
    """Write the checkpoint in folder `source` into folder `destination`, in bounded memory.

    Args:
        source: a folder with safetensors shards, with files of ``torch.save`` (``pytorch_model.bin``) or of
            torch.distributed.checkpoint, or one file of the first two; it may be `destination`. Or a ZeRO checkpoint
            of DeepSpeed, or the folder of one of its tags, or that of a training state of ours.
        dtype: of the floating-point tensors; default: each keeps its own, and float32 of a ZeRO checkpoint or a
            training state, whose values in fp32 are taken.
        max_shard_size: in bytes, or as in ``"5GB"``.
        layout: names and layouts of tensors: the ``"same"``; those of the ``"hub"``, as ``save_pretrained`` writes
            them (one tensor per expert); or those of the ``"model"``, which need no conversion when loading.
        config: the folder with the config, tokenizer and so on; default: `source`, or what is around a tag's folder.
        trust_remote_code: for another layout, whether Python code in `source` may run.

    Raises:
        CheckpointError, ReadError: `source` is not a sound checkpoint.
        SaveError: `destination` cannot be written to; what was there before is still there.
        UnsupportedError: the checkpoint is quantised, and another dtype would make it something else; or what
            ``torch.save`` wrote is no map of names to plain tensors.
    """
    if layout not in ("same", "hub", "model"):
        raise ConfigError(f'layout: expected "same", "hub" or "model"; got {layout!r}')
    source = Path(source)
    contents = contents_of(source)
    contents.refuse_absent(contents.absent)  # who copies the others would not even say that they are lost
    beside = _folder_of_config(source) if config is None else Path(config)
    if dtype is None and contents.is_of_training:
        dtype = torch.float32
    for note in contents.notes:
        logger.warning("%s: %s", source, note)
    if dtype is not None:
        _refuse_quantised(beside, contents)
    memory = AnonymousMemory()
    checkpoint = OpenCheckpoint(StreamingConfig(progress=progress), Coordinator(0, 1, alone=True))
    publication = Publication.begin(Path(destination))
    try:
        with closing(checkpoint), memory:
            folder = publication.temporary
            _copy_other_files(beside, folder, dtype)
            if layout == "same":
                noted = _split(contents, checkpoint, folder, dtype, max_shard_size)
            else:
                if contents.is_of_training:
                    made = _model_of_config(beside, contents, checkpoint, trust_remote_code)
                else:
                    made = _model_of_checkpoint(source, contents, checkpoint, trust_remote_code)
                is_hub = layout == "hub"
                noted = _lay_out(made, folder, dtype, max_shard_size=max_shard_size, save_original_format=is_hub)
            shards = [lay_out_shard(shard) for shard in noted]
            paths = [folder / shard.name for shard in shards]
            reserve(paths, shards)
            with closing(ShardWriter(paths)) as files:
                batches = [_batch(pieces, files) for pieces in _chunks(shards)]
                if batches:
                    reader = Reader(checkpoint, None, memory, "Converting the checkpoint")
                    plan, leaves = reader.plan(batches)
                    reader.fill(batches, plan, leaves, plan.cost.bytes_read)
                files.sync()
        publication.commit(SINGLE, INDEX)
    except BaseException:
        publication.abandon()
        raise
    return Converted(
        tuple(shard.name for shard in shards),
        sum(len(shard.views) for shard in shards),
        checkpoint.source.bytes_read,
        sum(shard.size_bytes - len(shard.header) for shard in shards),
        memory.growth_peak,
    )


def _folder_of_config(source: Path) -> Path:
    """Return the folder of a checkpoint's config, tokenizer and so on: the one around a tag's folder without any."""
    is_around = (
        (zero_folder_of(source) == source or state_folder_of(source))
        and not (source / CONFIG).exists()
        and (source.absolute().parent / CONFIG).exists()
    )
    return source.absolute().parent if is_around else source


def _refuse_quantised(source: Path, contents: CheckpointMap) -> None:
    config = source / CONFIG
    quantised = config.exists() and "quantization_config" in parse_object(config.read_bytes(), str(config))
    dtypes = {name: view.node.dtype for name, view in contents.views.items()}
    small = [name for name, dtype in dtypes.items() if dtype.itemsize == 1 and dtype.is_floating_point]
    if quantised or small:
        found = f"tensor {small[0]!r}" if small else "its config has a quantization_config"
        raise UnsupportedError(
            f"{source}: dtype: the checkpoint is quantised ({found}), and a cast of its numbers would not dequantise "
            "it. Load it with a quantization_config with dequantize=True, and save that."
        )


def _copy_other_files(source: Path, folder: Path, dtype: torch.dtype | None) -> None:
    """Copy config, tokenizer, code, licence: everything but weights."""
    for path in sorted(source.iterdir()) if source.is_dir() else ():
        is_left = path.name.startswith(".") or path.name.endswith(_NOT_COPIED) or path.name in _OF_TRAINING
        is_left = is_left or holds_values(path.name)
        if path.is_file() and not is_left:
            shutil.copyfile(path, folder / path.name)
    if dtype is not None and (folder / CONFIG).exists():
        note_dtype(folder / CONFIG, dtype)


def _lazy_tensors(contents: CheckpointMap, checkpoint: OpenCheckpoint) -> dict[str, LazyTensor]:
    """The tensors of `contents`, whose files `checkpoint` reads from now on."""
    checkpoint.add(contents.shards)
    return {name: LazyTensor.of(view, checkpoint.materialise) for name, view in contents.views.items()}


def _split(
    contents: CheckpointMap, checkpoint: OpenCheckpoint, folder: Path, dtype: torch.dtype | None, shard_size: int | str
) -> list[NotedShard]:
    """Split the tensors of `contents` over shards, in order of the source's files; writes the index."""
    lazy = _lazy_tensors(contents, checkpoint)
    tensors = {name: in_dtype(tensor, dtype) for name, tensor in lazy.items()}
    split = split_torch_state_dict_into_shards(tensors, max_shard_size=shard_size)
    if split.is_sharded:
        content = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return [
        NotedShard(name, {tensor: tensors[tensor] for tensor in names}, contents.metadata)
        for name, names in split.filename_to_tensors.items()
    ]


_ModelTensors = tuple[Any, dict[str, torch.Tensor], Mapping[str, torch.Tensor]]
"""A model without memory, the lazy entries of its state dict, and lazy tensors of its parameters' shapes."""


def _model_of_checkpoint(
    source: Path, contents: CheckpointMap, checkpoint: OpenCheckpoint, trust_code: bool
) -> _ModelTensors:
    """The model that ``from_pretrained`` would make."""
    from ...plugin_api import lazily_loaded, load_of_layouts

    with closing(load_of_layouts(StreamingConfig())) as load:
        model, missing, tied = lazily_loaded(str(source), load, trust_remote_code=trust_code, local_files_only=True)
    checkpoint.add(load.checkpoint.shards)
    if lost := sorted(missing - tied):
        raise UnsupportedError(
            f"{source}: layout: the checkpoint has no values for {', '.join(lost[:8])} ({len(lost)} in all), so it is "
            "not all of the model. Keep its layout, or load and save the model."
        )
    if contents.has_names_of_model:
        reverse_all_conversions(model)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tied = tied | _stored_once(parameters, model.all_tied_weights_keys)
    return model, {name: value for name, value in model.state_dict().items() if name not in tied}, parameters


def _model_of_config(
    beside: Path, contents: CheckpointMap, checkpoint: OpenCheckpoint, trust_code: bool
) -> _ModelTensors:
    """The model that the config describes, with the values of `contents`."""
    from .described import described_model, fitting

    if not (beside / CONFIG).exists():
        raise ConfigError(f"{beside / CONFIG}: layout: a config is needed for another layout. Pass config=FOLDER.")
    lazy = _lazy_tensors(contents, checkpoint)
    model = described_model(beside, trust_remote_code=trust_code)
    parameters = {name: lazy[name] for name, _ in model.named_parameters(remove_duplicate=False) if name in lazy}
    return model, fitting(model, lazy, str(beside)), parameters


def _lay_out(made: _ModelTensors, folder: Path, dtype: torch.dtype | None, **how: Any) -> list[NotedShard]:
    """Lay out the shards that ``save_pretrained`` would write of the model; `how` are its own arguments."""
    model, values, parameters = made
    state_dict = {name: in_dtype(value, dtype) for name, value in values.items()}
    count = sum(values[name].numel() for name in parameters if name in values)
    return lay_out_pretrained(model, folder, state_dict, parameters, count, dtype, **how)


def _stored_once(parameters: Mapping[str, torch.Tensor], ties: Mapping[str, str]) -> set[str]:
    """Tied parameters that lie in the same bytes as what they are tied to, as ``torch.save`` writes them."""
    views = {name: value.view_of_node for name, value in parameters.items() if isinstance(value, LazyTensor)}
    return {
        name
        for name, source in ties.items()
        if name in views and source in views and _are_same_bytes(views[name], views[source])
    }


def _are_same_bytes(first: View, second: View) -> bool:
    if (first.sizes, first.strides, first.offset) != (second.sizes, second.strides, second.offset):
        return False
    match first.node, second.node:
        case FileTensor(entry=entry), FileTensor(entry=other):
            return entry._replace(name="") == other._replace(name="")
        case Copy(), Copy():
            return first.node.dtype == second.node.dtype and _are_same_bytes(first.node.source, second.node.source)
    return False


ConvertedValues = tuple[int, int, Target, View]
"""(shard, byte position in it, what goes there, and what gives the values)."""


def _chunks(shards: Sequence[ShardToWrite]) -> Iterator[list[ConvertedValues]]:
    """All tensors in order of the new files, cut where one is larger than a chunk."""
    chunk: list[ConvertedValues] = []
    nbytes = 0
    for number, shard in enumerate(shards):
        for name, position in shard.starts.items():
            view, dtype = shard.views[name], shard.views[name].node.dtype
            limit = CHUNK_BYTES // dtype.itemsize
            for start in range(0, view.numel, limit):
                stop = min(view.numel, start + limit)
                target = Target(name, dtype, stop - start, start, stop)
                if chunk and nbytes + target.nbytes > CHUNK_BYTES:
                    yield chunk
                    chunk, nbytes = [], 0
                chunk.append((number, position + start * dtype.itemsize, target, view))
                nbytes += target.nbytes
    if chunk:
        yield chunk


def _batch(pieces: Sequence[ConvertedValues], files: ShardWriter) -> Batch:
    buffers: list[torch.Tensor] = []

    def begin() -> None:
        buffers.extend(torch.empty(target.numel, dtype=target.dtype) for _, _, target, _ in pieces)

    def finish() -> None:
        for (shard, position, _, _), buffer in zip(pieces, buffers, strict=True):
            files.put(shard, position, [memoryview(buffer.view(torch.uint8).numpy())])
        buffers.clear()

    items = [
        Item(target, view, partial(buffers.__getitem__, number)) for number, (_, _, target, view) in enumerate(pieces)
    ]
    return Batch(items, begin, finish, is_temporary=True)
