"""Locates parameters in the flat tensors of a ZeRO checkpoint; see :mod:`.zero_folder`.

At stage 3 a sub-group's flat holds, of each of its parameters in order, ``ceil(numel / N)`` elements, where N is the
number of ranks; only the last ranks have padding. At stages 1 and 2 a group's parameters lie one after the other, and
the whole is cut into N flats of equal length.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from ...errors import CheckpointError
from ...plugin_api import TensorEntry, excerpt
from .zero_model_files import ModelFile
from .zero_optimizer_files import Flat, OptimizerFile


FP32 = "fp32"
"""The name of the trained values among the states."""


class Trained(NamedTuple):
    """A parameter that is trained.

    Attributes:
        sub_group: the number of its flat on each rank.
        first: stage 3: where its piece begins in each flat; stages 1 and 2: where it begins in all flats, joined.
        length: stages 1 and 2: elements of each flat, with padding; 0 at stage 3.
    """

    shape: tuple[int, ...]
    sub_group: int
    first: int
    length: int

    def pieces(self, world_size: int) -> Iterator[tuple[int, int, int]]:
        """(rank, first element in its flat, number of elements) for each rank that has any."""
        numel = prod(self.shape)
        if self.length:
            for rank in range(self.first // self.length, world_size):
                start, stop = (max(0, at - rank * self.length) for at in (self.first, self.first + numel))
                if stop <= 0:
                    break
                yield rank, start, min(stop, self.length) - start
        else:
            each = -(-numel // world_size)
            for rank in range(-(-numel // max(1, each))):
                yield rank, self.first, min(each, numel - rank * each)


def check_agreement(optimizers: Sequence[OptimizerFile]) -> None:
    """Raise a CheckpointError unless all ranks were of the same training."""
    first = optimizers[0]
    if first.world_size > len(optimizers) and len({it.world_size for it in optimizers}) == 1:
        name = re.sub(r"zero_pp_rank_0", f"zero_pp_rank_{len(optimizers)}", os.path.basename(first.path))
        raise CheckpointError(
            f"{os.path.join(os.path.dirname(first.path), name)}: the file is not there; {first.world_size} ranks "
            "saved the checkpoint. Copy or save it again."
        )
    for it in optimizers:
        if it.world_size != len(optimizers):
            raise CheckpointError(
                f"{it.path}: partition_count: expected {len(optimizers)}, the number of such files; found "
                f"{it.world_size}. A file is missing, or those of several checkpoints are in the folder; copy or save "
                "it again."
            )
        mine, theirs = ([(each.options, list(each.flats)) for each in one.groups] for one in (it, first))
        if it.stage != first.stage or mine != theirs:
            raise CheckpointError(
                f"{it.path}: it is of another training than {first.path}: its stage, or the groups of its optimizer, "
                "are others. Copy or save the checkpoint again."
            )
        for number, (flat, other) in enumerate(zip(it.flats, first.flats, strict=True)):
            here, there = (_entries(each) for each in (flat, other))
            if here != there:
                strange = sorted(key for key in here.keys() | there.keys() if here.get(key) != there.get(key))
                raise CheckpointError(
                    f"{it.path}: tensor {number} of the optimizer: expected the same entries and steps as in "
                    f"{first.path}, found others ({', '.join(strange)}). Either the files are of different saves: "
                    "copy or save the checkpoint again; or the optimizer keeps what belongs to a rank, as Adafactor "
                    f"does: go on with {len(optimizers)} ranks."
                )


def _entries(flat: Flat) -> dict[str, Any]:
    return {**dict.fromkeys(flat.moments, "a tensor"), **flat.numbers, **dict.fromkeys(flat.nothing, "None")}


def _check_names(model: ModelFile, flats: int) -> None:
    if len(model.trained) != flats or not all(model.trained):
        raise CheckpointError(
            f"{model.path}: param_shapes: expected the parameters of {flats} tensors of the optimizer, found "
            f"{len(model.trained)} groups of parameters, {sum(not each for each in model.trained)} of them empty."
        )
    seen: set[str] = set()
    for name in (name for of_flat in model.trained for name in of_flat):
        if name in seen:
            raise CheckpointError(f"{model.path}: param_shapes: {excerpt(name)} is there twice.")
        seen.add(name)


def trained_of_stage_3(model: ModelFile, optimizers: Sequence[OptimizerFile]) -> list[dict[str, Trained]]:
    _check_names(model, len(optimizers[0].flats))
    found = []
    for number, shapes in enumerate(model.trained):
        of_flat, end = {}, 0
        for name, shape in shapes.items():
            of_flat[name] = Trained(shape, number, end, 0)
            end += -(-prod(shape) // len(optimizers))
        for it in optimizers:
            _check_length(it, number, it.flats[number], end)
        found.append(of_flat)
    return found


def _check_length(file: OptimizerFile, number: int, flat: Flat, end: int) -> None:
    for name, place in {} if flat.swap_name else {FP32: flat.values, **flat.moments}.items():
        if place.numel != end:
            raise CheckpointError(
                f"{file.path}: {name} of tensor {number} of the optimizer: expected {end} elements, which the "
                f"parameters in it need on each of {file.world_size} ranks; found {place.numel}. Copy or save the "
                "checkpoint again."
            )


def trained_of_stages_1_2(model: ModelFile, optimizers: Sequence[OptimizerFile]) -> list[dict[str, Trained]]:
    """A group's parameters lie one after the other, and flats of equal length cut the whole.

    ``param_slice_mappings`` says where each lies too, and is wrong with ``round_robin_gradients`` (DeepSpeed 0.19.8).
    """
    _check_names(model, len(optimizers[0].flats))
    found = []
    for number, shapes in enumerate(model.trained):
        gaps = optimizers[0].gaps[number] if optimizers[0].gaps else [0] * len(shapes)
        stored = [it.flats[number].values.numel for it in optimizers]
        length = stored[0] + optimizers[0].paddings[number]
        of_flat, end = {}, 0
        for (name, shape), gap in zip(shapes.items(), gaps, strict=False):
            of_flat[name] = Trained(shape, number, end, length)
            end += prod(shape) + gap
        expected = [max(0, min(length, end - rank * length)) for rank in range(len(optimizers))]
        if len(gaps) != len(shapes) or sum(expected) != end or stored != expected:
            rank = next(
                (rank for rank, pair in enumerate(zip(stored, expected, strict=True)) if len(set(pair)) > 1), 0
            )
            raise CheckpointError(
                f"{optimizers[rank].path}: group {number} of the optimizer: expected {expected[rank]} elements, which "
                f"follow from {end} of its parameters on {len(optimizers)} ranks; found {stored[rank]}. Copy or save "
                "the checkpoint again."
            )
        found.append(of_flat)
    return found


Pieces = tuple[Sequence[TensorEntry], tuple[int, ...]]
"""A tensor of which no optimizer has values: its flat pieces, in order, and its shape."""


def untrained(
    stage: int, models: Sequence[ModelFile], trained: Mapping[str, Any], first_shard: int
) -> dict[str, Pieces]:
    model, world_size = models[0], models[0].world_size
    found: dict[str, Pieces] = {}
    for name, whole in model.tensors.items():
        is_placeholder = stage == 3 and name not in model.buffers
        if name in trained or name in model.shared or is_placeholder:
            continue
        found[name] = [whole.part(0, whole.numel, name=name, shard=first_shard)], whole.shape
    for name, shape in model.frozen.items() if stage == 3 else ():
        if name in trained or name in found:
            raise CheckpointError(f"{model.path}: frozen_param_shapes: {excerpt(name)} is trained, or a buffer.")
        numel = prod(shape)
        each = -(-numel // world_size)
        pieces = []
        for rank, it in enumerate(models):
            place, needed = it.fragments.get(name), max(0, min(each, numel - rank * each))
            if place is None or place.numel < needed or place.dtype != model.fragments[name].dtype:
                held = "none" if place is None else f"{place.numel} of {place.dtype}"
                raise CheckpointError(
                    f"{it.path}: frozen_param_fragments: expected {each} elements of {excerpt(name)}, as in other "
                    f"files; found {held}."
                )
            pieces.append(place.part(0, needed, name=name, shard=first_shard + rank))
        found[name] = pieces, shape
    return found
