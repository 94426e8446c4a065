"""A ZeRO checkpoint of DeepSpeed, stage 1, 2 or 3, as a map of bytes: where each parameter's values and moments lie.

A rank saves the flat tensors that its optimizer trains, in a file of its own (:mod:`.zero_optimizer_files`). Parts of
parameters lie in them (:mod:`.zero_layout`). A parameter is its pieces on all ranks, joined in order of rank.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, TypeVar

from ...errors import CheckpointError, UnsupportedError
from ...plugin_api import (
    OPTIMIZER,
    SWAPPED,
    ZERO_2_MODEL,
    ByteSource,
    CheckpointMap,
    LocalFiles,
    Shard,
    TensorEntry,
    View,
    as_read_error,
    excerpt,
    names_in,
    row_major_strides,
    view_of,
)
from .zero_layout import FP32, Pieces, Trained, check_agreement, trained_of_stage_3, trained_of_stages_1_2, untrained
from .zero_model_files import ModelFile, read_model_file
from .zero_optimizer_files import Flat, OptimizerFile, PartitionGroup, read_optimizer_file


T = TypeVar("T")

_EXPERT = re.compile(r"(layer_\d+_)?expert_\d+_.*_model_states\.pt|expp_rank_\d+_.*_optim_states\.pt")
_PIPELINE = re.compile(r"layer_\d+-.*model_.*states\.pt")

_THREADS = 8
"""Threads that wait for a file system, and hardly compute."""


@dataclass(frozen=True)
class ZeroGroup:
    """A group of the optimizer: options, names of its parameters, and by name, numbers that it keeps of each.

    `nothing`: what it keeps of some of them that is None: their names, by its name.
    """

    options: Mapping[str, Any]
    parameters: Sequence[str]
    numbers: Mapping[str, Sequence[bool | int | float | None]]
    nothing: Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class ZeroFolder:
    """The contents of a ZeRO checkpoint; no value of a tensor has been read.

    Attributes:
        shards: its files; an entry's ``shard`` counts in them.
        kind: the optimizer's class as DeepSpeed's config calls it; "" if nobody says.
        keys: the moments, by name.
        shared: other names of parameters.
        beside: entries of modules that are neither parameters nor buffers.
        lacking: parameters of which the folder has no values: neither trained nor frozen.
        scheduler: its state, or why it cannot be had.
        client_state: what the user gave, but for `left_out`.
    """

    path: str
    stage: int
    world_size: int
    shards: tuple[Shard, ...]
    kind: str
    keys: Sequence[str]
    groups: Sequence[ZeroGroup]
    shared: Mapping[str, str]
    beside: Sequence[str]
    lacking: Sequence[str]
    scheduler: Mapping[str, Any] | str | None
    scaler: Mapping[str, Any]
    counters: Mapping[str, int]
    batch_size: int | None
    client_state: Mapping[str, Any]
    left_out: Sequence[str]
    _trained: Mapping[str, Trained]
    _flats: Mapping[str, Sequence[Sequence[TensorEntry]]]  # state -> sub-group -> rank
    _others: Mapping[str, Pieces]
    _buffers: frozenset[str]

    def views(self, key: str = FP32, first_shard: int = 0) -> dict[str, View]:
        """The state `key` of each parameter that is trained; shards are numbered from `first_shard` on."""
        return {name: self._view(name, key, it, first_shard) for name, it in self._trained.items()}

    def frozen(self, first_shard: int = 0) -> dict[str, View]:
        """The parameters that are not trained, in their own dtypes."""
        return {name: self._other(name, first_shard) for name in self._others if name not in self._buffers}

    def buffers(self, first_shard: int = 0) -> dict[str, View]:
        return {name: self._other(name, first_shard) for name in self._others if name in self._buffers}

    def renamed(self, rename: Callable[[str], str]) -> ZeroFolder:
        """Return a copy with other names of parameters and buffers."""

        def keys(of_names: Mapping[str, Any]) -> dict[str, Any]:
            return {rename(name): value for name, value in of_names.items()}

        return replace(
            self,
            groups=[
                replace(
                    group,
                    parameters=[*map(rename, group.parameters)],
                    nothing={key: [*map(rename, names)] for key, names in group.nothing.items()},
                )
                for group in self.groups
            ],
            shared={rename(alias): rename(name) for alias, name in self.shared.items()},
            beside=[*map(rename, self.beside)],
            lacking=[*map(rename, self.lacking)],
            _trained=keys(self._trained),
            _others=keys(self._others),
            _buffers=frozenset(map(rename, self._buffers)),
        )

    def _view(self, name: str, key: str, it: Trained, first_shard: int) -> View:
        flats = self._flats[key][it.sub_group]
        entries = [
            flats[rank].part(first, count, name=name, shard=flats[rank].shard + first_shard)
            for rank, first, count in it.pieces(self.world_size)
        ]
        return _joined(entries or [TensorEntry(name, first_shard, flats[0].dtype, (0,), 0, 0)], it.shape)

    def _other(self, name: str, first_shard: int) -> View:
        entries, shape = self._others[name]
        return _joined([entry._replace(shard=entry.shard + first_shard) for entry in entries], shape)


def _joined(entries: Sequence[TensorEntry], shape: tuple[int, ...]) -> View:
    """A tensor of flat pieces, those without elements left out."""
    pieces = [view_of(it) for it in entries if it.shape[0]] or [view_of(entries[0])]
    whole = pieces[0] if len(pieces) == 1 else View.joined(tuple(pieces), 0)
    return View(whole.node, shape, row_major_strides(shape))


def map_of_zero(folder: Path) -> CheckpointMap:
    """The fp32 values of what is trained in the folder of a tag, and the rest; raises as :func:`read_zero_folder`."""
    zero = read_zero_folder(LocalFiles(), folder)
    if zero.lacking:
        raise UnsupportedError(
            f"{folder}: it has no values of {len(zero.lacking)} parameters, among them {excerpt(zero.lacking[0])}, "
            "which were neither trained nor frozen. Load the checkpoint into the training, and save the model."
        )
    if zero.beside:
        raise UnsupportedError(
            f"{folder}: {len(zero.beside)} entries of modules are neither parameters nor buffers, and no tensors: "
            f"{', '.join(map(excerpt, zero.beside[:8]))}. Load the checkpoint into the training, and save the model. "
            "DeepSpeed's zero_to_fp32.py leaves them out."
        )
    views = {**zero.buffers(), **zero.frozen(), **zero.views()}
    views |= {alias: views[name] for alias, name in zero.shared.items()}
    return CheckpointMap(zero.shards, views, format="ZeRO", is_of_training=True)


def read_zero_folder(source: ByteSource, folder: str | os.PathLike[str]) -> ZeroFolder:
    """Read what says where the tensors lie in the folder of a tag, such as ``global_step500``; runs no pickle.

    Raises:
        ReadError: a file cannot be read.
        CheckpointError: a rank's file is missing, or files do not fit together.
        UnsupportedError: the checkpoint is of a kind that cannot be cut for another number of ranks.
    """
    folder = Path(folder)
    names = _optimizer_names(folder)
    optimizers = _in_threads(partial(read_optimizer_file, source), [str(folder / name) for name in names])
    first = optimizers[0]
    check_agreement(optimizers)
    model_names = [f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(len(names))]
    if first.stage < 3:
        model_names = [ZERO_2_MODEL]
    for name in model_names:
        if name not in names_in(folder):
            raise CheckpointError(f"{folder / name}: the file is not there. Copy or save the checkpoint again.")
    model = read_model_file(source, str(folder / model_names[0]))
    # Of the others only what is frozen counts.
    paths = [str(folder / name) for name in model_names[1:]] if model.frozen else []
    models = [model, *_in_threads(partial(read_model_file, source), paths)]
    if model.world_size != len(names):
        raise CheckpointError(
            f"{model.path}: dp_world_size: expected {len(names)}, the number of files of optimizers' states; found "
            f"{model.world_size}. Files of several checkpoints are in the folder; copy or save it again."
        )
    sub_groups = (
        trained_of_stage_3(model, optimizers) if first.stage == 3 else trained_of_stages_1_2(model, optimizers)
    )
    trained = {name: it for of_flat in sub_groups for name, it in of_flat.items()}
    keys = sorted({key for flat in first.flats for key in flat.moments})
    files: list[OptimizerFile | ModelFile] = [*optimizers, *models]
    swapped = _swapped(source, folder, optimizers, [FP32, *keys], sub_groups)
    shards = {place: len(files) + number for number, place in enumerate(swapped)}
    flats = {key: _flats(optimizers, key, sub_groups, shards) for key in (FP32, *keys)}
    others = untrained(first.stage, models, trained, first_shard=len(optimizers))
    buffers = frozenset(name for name in others if name in model.buffers)
    known = trained.keys() | others.keys() | model.shared.keys()
    lacking = [name for name in model.tensors if name not in known]
    return ZeroFolder(
        path=str(folder),
        stage=first.stage,
        world_size=len(names),
        shards=(*(Shard(it.path, it.size_bytes, {}) for it in files), *swapped.values()),
        kind=first.kind,
        keys=keys,
        groups=[_group(each, first.flats, sub_groups) for each in first.groups],
        shared={alias: name for alias, name in model.shared.items() if name in trained or name in others},
        beside=[*model.others, *(name for name in lacking if prod(model.tensors[name].shape))],
        lacking=lacking,
        scheduler=model.scheduler,
        scaler=first.scaler,
        counters=model.counters,
        batch_size=first.batch_size,
        client_state=model.client_state,
        left_out=model.left_out,
        _trained=trained,
        _flats=flats,
        _others=others,
        _buffers=buffers,
    )


def _stored(key: str, first: OptimizerFile, flat: Flat) -> TensorEntry:
    if key != FP32 and key not in flat.moments:
        raise UnsupportedError(
            f"{first.path}: the optimizer keeps {excerpt(key)} of some of its tensors and not of others, so that it "
            "is not known what the others need. Go on with as many ranks as before, by DeepSpeed itself."
        )
    return flat.values if key == FP32 else flat.moments[key]


_PartitionPlace = tuple[str, int, int]
"""A state, a sub-group and a rank."""


def _swapped(
    source: ByteSource,
    folder: Path,
    optimizers: Sequence[OptimizerFile],
    keys: Sequence[str],
    sub_groups: Sequence[Mapping[str, Trained]],
) -> dict[_PartitionPlace, Shard]:
    """The swap files of states that are not in the optimizers' own files; DeepSpeed copies them into the folder."""
    paths: dict[_PartitionPlace, str] = {}
    for rank, it in enumerate(optimizers):
        for number, flat in enumerate(it.flats):
            for key in keys if flat.swap_name else ():
                if not key.isidentifier():  # it is a part of a path
                    raise CheckpointError(
                        f"{it.path}: expected names of states of the optimizer; found {excerpt(key)}"
                    )
                name = flat.swap_file(None if key == FP32 else key)
                paths[key, number, rank] = str(folder / SWAPPED / f"rank{rank:02d}" / name)

    def shard(path: str) -> Shard:
        try:
            with source.open_file(path) as file:
                return Shard(path, file.size_bytes, {}, tag=file.tag)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{path}: the swap file is not there. The optimizer's states were on NVMe, and save_checkpoint has "
                f"copied them to {folder / SWAPPED}. Copy that folder too, with the files of all ranks."
            ) from error

    shards = dict(zip(paths, _in_threads(shard, list(paths.values())), strict=True))
    for (key, number, rank), found in shards.items():
        dtype = _stored(key, optimizers[0], optimizers[rank].flats[number]).dtype
        needed = _length(sub_groups[number], len(optimizers)) * dtype.itemsize
        if found.size_bytes < needed:
            raise CheckpointError(
                f"{found.path}: expected at least {needed} bytes, found {found.size_bytes}. Copy or save the "
                "checkpoint again."
            )
    return shards


def _length(sub_group: Mapping[str, Trained], world_size: int) -> int:
    """Count the elements of a sub-group's flat at stage 3."""
    return max(it.first - (-prod(it.shape) // world_size) for it in sub_group.values())


def _flats(
    optimizers: Sequence[OptimizerFile],
    key: str,
    sub_groups: Sequence[Mapping[str, Trained]],
    swapped: Mapping[_PartitionPlace, int],
) -> list[list[TensorEntry]]:
    """A state of each sub-group's flat on each rank; `swapped` has the shards of those in swap files."""

    def place(number: int, rank: int) -> TensorEntry:
        stored = _stored(key, optimizers[0], optimizers[rank].flats[number])
        if (shard := swapped.get((key, number, rank))) is not None:
            return stored._replace(start=0).part(0, _length(sub_groups[number], len(optimizers)), shard=shard)
        return stored._replace(shard=rank)

    return [[place(number, rank) for rank in range(len(optimizers))] for number in range(len(sub_groups))]


def _group(group: PartitionGroup, flats: Sequence[Flat], sub_groups: Sequence[Mapping[str, Trained]]) -> ZeroGroup:
    parameters = [name for number in group.flats for name in sub_groups[number]]
    keys = {key: None for number in group.flats for key in flats[number].numbers}
    numbers = {
        key: [flats[number].numbers.get(key) for number in group.flats for _ in sub_groups[number]] for key in keys
    }
    nothing = {
        key: [name for number in group.flats if key in flats[number].nothing for name in sub_groups[number]]
        for key in dict.fromkeys(key for number in group.flats for key in flats[number].nothing)
    }
    return ZeroGroup(group.options, parameters, numbers, nothing)


def _optimizer_names(folder: Path) -> list[str]:
    """The files of all ranks' optimizers, in order of rank."""
    found: dict[int, str] = {}
    for name in names_in(folder):
        if _PIPELINE.fullmatch(name) or _EXPERT.fullmatch(name):
            raise UnsupportedError(
                f"{folder / name}: the model is cut into stages of a pipeline, or experts have files of their own. "
                "Use DeepSpeed's own tools."
            )
        if match := OPTIMIZER.fullmatch(name):
            rank, part = map(int, match.groups())
            if part:
                raise UnsupportedError(
                    f"{folder / name}: the model is cut over ranks itself (tensor parallelism), not only its "
                    "parameters. Use DeepSpeed's own tools."
                )
            if rank in found:
                raise CheckpointError(f"{folder / name}: rank {rank} has another file too, {found[rank]}. Remove one.")
            found[rank] = name
    if not found:
        raise CheckpointError(f"{folder}: expected files *_optim_states.pt of a ZeRO checkpoint, found none.")
    for rank in range(max(found) + 1 if max(found) <= len(found) else len(found) + 1):
        if rank not in found:
            name = re.sub(r"rank_\d+", f"rank_{rank}", next(iter(found.values())), count=1)
            raise CheckpointError(f"{folder / name}: the file is not there. Copy or save the checkpoint again.")
    return [found[rank] for rank in range(len(found))]


def _in_threads(read: Callable[[str], T], paths: Sequence[str]) -> list[T]:
    def with_path(path: str) -> T:
        with as_read_error(path, "a part of the ZeRO checkpoint"):
            return read(path)

    if len(paths) <= 2:
        return [with_path(path) for path in paths]
    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(with_path, paths))
