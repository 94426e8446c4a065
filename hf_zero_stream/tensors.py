"""Load and save the tensors of any torch module, by name: plain functions with explicit arguments.

Nothing is replaced in any other library, inside ``streaming()`` or not. transformers' renames and conversions are not
applied: the names in the files are the module's, or become them by `names`. As in
``torch.distributed.checkpoint.load``, who reads, in which format, and into what memory can be given.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import torch
from torch import nn

from .checkpoint import formats
from .checkpoint.formats import Format
from .checkpoint.index import shards_of
from .checkpoint.lazy import AbsentSlice
from .destinations.base import Destination, fill_whole
from .destinations.live import LiveModel
from .engine.load import Load
from .engine.opened import OpenCheckpoint
from .errors import LoadError
from .holdings.own_names import own_names, own_or_clean
from .holdings.skeleton import filled_skeleton, lazy_module, matching_tensors, own_tensors
from .ranks.coordinator import meeting
from .ranks.rendezvous import LOAD, SAVE
from .reports.load import LoadReport
from .reports.measures import collector_paused
from .reports.save import SaveReport
from .settings.config import StreamingConfig
from .settings.scope import current_config
from .sources.base import ByteSource


logger = logging.getLogger(__name__)


@collector_paused()
def load_tensors(
    model: nn.Module,
    path: str | os.PathLike[str] | Sequence[str],
    *,
    names: Callable[[str], str] = lambda name: name,
    strict: bool = True,
    source: Callable[[], ByteSource] | None = None,
    format: Format = formats,
    destination: Destination | None = None,
) -> LoadReport:
    """Load a checkpoint into the parameters and persistent buffers of `model` that have its names (all ranks).

    Every rank reads only the bytes that it holds: of whole tensors, DTensors (FSDP2, tensor parallelism), or
    partitions of ZeRO-3. Values are cast to the dtypes of the model. Settings are those of :class:`streaming` around
    the call, or of the environment.

    Args:
        model: any module, with memory; or, with a `destination` of your own, what that makes memory for.
        path: a folder, a file, or the files; of a `source` of your own, the files.
        names: maps a name in the files to a name in `model`.
        strict: raise if a tensor is missing, unexpected or of another shape. If false, such tensors are left out.
        source: makes what reads the files on this rank; default: files of this host, and URLs.
        format: how headers are read; default: safetensors, ``torch.save`` and torch.distributed.checkpoint.
        destination: the memory to fill; default: that of `model`.

    Returns:
        The report of what every rank read.

    Raises:
        LoadError: on all ranks, before anything is read: the names or shapes do not fit, or there is no memory.
        CheckpointError: on all ranks: no shard holds a tensor that the index promises and `model` needs.
        HfZeroStreamError: on all ranks: the files are not sound, or in the middle of reading, one cannot be read.

    Examples:
        >>> fully_shard(model)
        >>> hf_zero_stream.load_tensors(model, "weights", names=lambda name: name.removeprefix("model."))
    """
    config = StreamingConfig.resolve(current_config(), {})
    with meeting(LOAD) as coordinator:
        fill_whole(model)
        filled = destination or LiveModel(model, coordinator, config)
        checkpoint = OpenCheckpoint(config, coordinator, source, format, filled.device)
        load = Load(config, {}, coordinator, filled, checkpoint)
        with closing(load), load.memory, load.clock("total"), torch.no_grad():
            files, weight_map = coordinator.broadcast(partial(_files_of, path))
            checkpoint.read_ahead(files)
            pieces = _by_own_name(model, load.open(files, weight_map), names)  # from the headers, which rank 0 reads
            wanted = own_tensors(model)
            lazy = {name: it[...] for name, it in pieces.items() if name in wanted or not isinstance(it, AbsentSlice)}
            load.refuse_absent()
            if strict:
                _refuse_misfits(model, lazy)
            lazy = matching_tensors(model, lazy)
            lazy_model, missing, tied = (
                lazy_module(model, lazy) if destination is None else filled_skeleton(model, lazy)
            )
            load.fill(lazy_model, missing, tied)  # plan, read, exchange
        return load.finish(model, logger)


def save_tensors(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "5GB",
) -> SaveReport:
    """Save the parameters and persistent buffers of `model` as safetensors, under the model's own names (all ranks).

    Every rank writes the bytes that it holds; nothing is gathered. Files get their final names when all are complete.

    Args:
        model: any module; whole, of DTensors, or under ZeRO.
        folder: where to save; only rank 0 must see it.
        dtype: of the floating-point tensors; default: the model's own. ``torch.float32`` saves the fp32 values that a
            DeepSpeed optimizer trains, if it has them.
        max_shard_size: of a file, in bytes, or as in ``"5GB"``.

    Raises:
        SaveError: on all ranks, if a file cannot be written on any.
        UnsupportedError: values cannot be reached; the message says what to do.
    """
    from .saving.arguments import dtype_of_argument
    from .saving.pending import operation
    from .saving.save import Save  # imports transformers, whose conversions a load of tensors does not need
    from .state.tensors import weights_item

    with operation(SAVE, folder=folder):
        return Save(model, folder, takes_any=True).run(weights_item(max_shard_size, dtype_of_argument(dtype)))


def _files_of(path: str | os.PathLike[str] | Sequence[str]) -> tuple[list[str], Mapping[str, str] | None]:
    return shards_of(path) if isinstance(path, (str, os.PathLike)) else (list(path), None)


def _by_own_name(model: nn.Module, pieces: Mapping[str, Any], names: Callable[[str], str]) -> dict[str, Any]:
    own = own_names(model)
    pieces_by_name: dict[str, Any] = {}
    for name, piece in pieces.items():
        own_name = own_or_clean(own, names(name))
        if own_name in pieces_by_name:
            raise LoadError(f"load_tensors: names= makes {own_name} of {name} and of another name. Give each its own.")
        pieces_by_name[own_name] = piece
    return pieces_by_name


def _refuse_misfits(model: nn.Module, lazy: Mapping[str, Any]) -> None:
    """Raise a LoadError if a tensor of `lazy` is not for `model`, or if it has none for one of the model's own."""
    own, tensors, fitting = own_names(model), own_tensors(model), matching_tensors(model, lazy)
    held = {id(tensors[name]) for name in fitting}
    wanted = [own_or_clean(own, name) for name in model.state_dict(keep_vars=True)]
    faults = {
        "missing": [name for name in wanted if name not in lazy and id(tensors.get(name)) not in held],
        "unexpected": [name for name in lazy if name not in tensors],
        "of another shape": [name for name in lazy if name in tensors and name not in fitting],
    }
    if any(faults.values()):
        listed = [f"{len(of)} {what}: {', '.join(of[:8])}" for what, of in faults.items() if of]
        raise LoadError(
            f"load_tensors: the checkpoint does not fit the {type(model).__name__}: {'; '.join(listed)}. Give names= "
            "to translate names, or strict=False to leave such tensors out."
        )
