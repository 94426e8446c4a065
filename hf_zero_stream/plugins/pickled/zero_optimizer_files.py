"""``*_optim_states.pt`` in a ZeRO checkpoint of DeepSpeed, each read by itself; see :mod:`.zero_folder`.

It has what one rank's optimizer keeps: for each tensor that it trains (a *flat*, in which parts of many parameters
lie) its values in fp32 and its moments. The format has no specification; it is what DeepSpeed's ZeRO optimizers save
(``runtime/zero/stage3.py``, ``runtime/zero/stage_1_and_2.py``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...errors import CheckpointError, UnsupportedError
from ...plugin_api import ByteSource, TensorEntry, excerpt
from .torch_objects import NotPlain, TorchObjects


_SWAP_NAME = re.compile(r"\d{1,18}_\d{1,18}")
"""The numbers of the first and the last parameter in a flat."""

_MOST_KEYS = 64
"""Entries that an optimizer keeps for a tensor."""

BY_DEEPSPEED = "Go on with as many ranks as before, by DeepSpeed itself."


class Flat(NamedTuple):
    """A tensor that an optimizer trains, and what it keeps for it.

    Attributes:
        values: the fp32 values.
        moments: what has as many elements, by name.
        numbers: what is one number, as ``step``.
        nothing: the names of what is None.
        swap_name: what the names of its swap files end in; "" if values and moments are in the file itself.
    """

    values: TensorEntry
    moments: Mapping[str, TensorEntry]
    numbers: Mapping[str, bool | int | float]
    nothing: Sequence[str]
    swap_name: str = ""

    def swap_file(self, key: str | None) -> str:
        """The name of the swap file with the values, or with the moment `key`."""
        return f"{self.swap_name if key is None else f'{key}-{self.swap_name}'}.tensor.swp"


class PartitionGroup(NamedTuple):
    """A group of an optimizer: its options, and the numbers of its flats."""

    options: Mapping[str, Any]
    flats: Sequence[int]


@dataclass(frozen=True)
class OptimizerFile:
    """The state of one rank's optimizer.

    Attributes:
        stage: of ZeRO.
        world_size: how many ranks share each flat.
        paddings: for each flat, how many elements at its end its saved values lack, and its moments do not.
        gaps: stages 1 and 2: for each group, how many elements follow each of its parameters and belong to none; may
            be empty, which means none.
        scaler: the numbers of the loss scaler.
        kind: the optimizer's class as DeepSpeed's config calls it; "" if the config does not say.
        batch_size: samples in a step of all ranks, if the config says so.
    """

    path: str
    size_bytes: int
    stage: int
    world_size: int
    groups: Sequence[PartitionGroup]
    flats: Sequence[Flat]
    paddings: Sequence[int]
    gaps: Sequence[Sequence[int]]
    scaler: Mapping[str, bool | int | float | None]
    kind: str
    batch_size: int | None


def read_optimizer_file(source: ByteSource, path: str) -> OptimizerFile:
    """Read ``*_optim_states.pt``, but no moments and no values.

    Raises:
        OSError: it cannot be read.
        CheckpointError: it is not sound.
        UnsupportedError: the optimizer's state cannot be cut for another number of ranks.
    """
    with source.open_file(path) as file:
        objects = TorchObjects(file, path)
        wrapper = objects.mapping(
            objects.get(objects.root, "the file", "optimizer_state_dict"), "optimizer_state_dict"
        )
        if "zero_stage" not in wrapper:
            raise UnsupportedError(f"{path}: expected the optimizer of ZeRO stage 1, 2 or 3, found that of stage 0.")
        stage = _enumerated(objects, wrapper["zero_stage"], "zero_stage")
        if stage not in (1, 2, 3):
            raise CheckpointError(f"{path}: zero_stage: expected 1, 2 or 3, found {stage}.")
        masters, inner = _PARTS[stage == 3]
        state = objects.get(wrapper, "optimizer_state_dict", inner)
        if isinstance(state, list):
            raise UnsupportedError(
                f"{path}: {inner}: it was saved with elastic_checkpoint, which leaves out the options of the groups."
            )
        values = objects.sequence(objects.get(wrapper, "optimizer_state_dict", masters), masters)
        groups = _groups(objects, objects.get(state, inner, "param_groups"), len(values))
        states = objects.mapping(objects.get(state, inner, "state"), f"{inner}.state")
        _refuse_others(path, inner, state.keys() - {"state", "param_groups"})
        _refuse_others(path, f"{inner}.state", states.keys() - set(range(len(values))))
        paddings = _paddings(objects, wrapper, len(values))
        flats = [
            _flat(objects, f"{masters}[{number}]", each, states.get(number, {}), paddings[number])
            for number, each in enumerate(values)
        ]
        return OptimizerFile(
            path,
            file.size_bytes,
            stage,
            _partition_count(objects, wrapper),
            groups,
            flats,
            paddings,
            _gaps(objects, wrapper),
            _scaler(objects, wrapper),
            *_of_config(objects),
        )


_PARTS = {
    False: ("single_partition_of_fp32_groups", "base_optimizer_state"),
    True: ("fp32_flat_groups", "optimizer_state_dict"),
}
"""Whether it is of stage 3 -> the entries with the fp32 values, and with the state of the optimizer inside ZeRO's."""


def _refuse_others(path: str, what: str, keys: Collection[Any]) -> None:
    if keys:
        found = ", ".join(sorted(excerpt(key) for key in keys)[:8])
        raise UnsupportedError(
            f"{path}: {what}: the optimizer keeps {found}, which belongs to none of its tensors. {BY_DEEPSPEED}"
        )


def _enumerated(objects: TorchObjects, value: Any, what: str) -> int:
    """The number of a member of an enum, or a number."""
    arguments = getattr(value, "arguments", None)
    if isinstance(arguments, tuple) and len(arguments) == 1:
        value = arguments[0]
    return objects.count(value, what)


def _partition_count(objects: TorchObjects, wrapper: Mapping[Any, Any]) -> int:
    if "ds_zero_partition_groups" in wrapper:
        raise UnsupportedError(
            f"{objects.path}: experts are shared by other ranks than the rest (AutoEP). {BY_DEEPSPEED}"
        )
    found = objects.get(wrapper, "optimizer_state_dict", "partition_count")
    counts = {objects.count(each, "partition_count") for each in (found if isinstance(found, list) else [found])}
    if len(counts) != 1:
        raise UnsupportedError(
            f"{objects.path}: partition_count: groups of parameters are shared by different numbers of ranks, as "
            f"experts are. {BY_DEEPSPEED}"
        )
    return counts.pop()


def _groups(objects: TorchObjects, value: Any, flats: int) -> list[PartitionGroup]:
    groups, seen = [], set()
    for number, each in enumerate(objects.sequence(value, "param_groups")):
        what = f"param_groups[{number}]"
        options = dict(objects.mapping(each, what))
        members = objects.sequence(objects.get(options, what, "params"), f"{what}.params")
        for member in members:
            if objects.count(member, f"{what}.params") >= flats or member in seen:
                raise CheckpointError(
                    f"{objects.path}: {what}.params: expected each of {flats} tensors once in all groups, found "
                    f"{member}."
                )
            seen.add(member)
        del options["params"]
        options.pop("param_names", None)
        try:
            groups.append(PartitionGroup(objects.plain(options, what), members))
        except NotPlain as reason:
            raise UnsupportedError(f"{objects.path}: {what}: {reason}, and not a number.") from reason
        if options.get("use_muon"):
            raise UnsupportedError(
                f"{objects.path}: {what}: it is trained by Muon, which looks at whole matrices. {BY_DEEPSPEED}"
            )
    if len(seen) != flats:
        raise CheckpointError(f"{objects.path}: param_groups: expected {flats} tensors in them, found {len(seen)}.")
    return groups


def _paddings(objects: TorchObjects, wrapper: Mapping[Any, Any], count: int) -> list[int]:
    found = wrapper.get("group_paddings")
    if found is None:
        return [0] * count
    paddings = [objects.count(each, "group_paddings") for each in objects.sequence(found, "group_paddings")]
    if len(paddings) != count:
        raise CheckpointError(f"{objects.path}: group_paddings: expected {count} numbers, found {len(paddings)}.")
    return paddings


def _flat(objects: TorchObjects, what: str, values: Any, state: Any, padding: int) -> Flat:
    stored = objects.tensor(values, what)
    swap_name = objects.python_attribute(values, "ds_id")
    # DeepSpeed empties a tensor whose values it has written to a swap file.
    is_swapped = not stored.numel and isinstance(swap_name, str) and _SWAP_NAME.fullmatch(swap_name) is not None
    entries = objects.mapping(state, f"the state of {what}")
    if len(entries) > _MOST_KEYS:
        raise CheckpointError(
            f"{objects.path}: the state of {what}: expected at most {_MOST_KEYS} entries, found {len(entries)}."
        )
    moments: dict[str, TensorEntry] = {}
    numbers: dict[str, bool | int | float] = {}
    nothing: list[str] = []
    for key, value in entries.items():
        name = objects.name(key, f"a name in the state of {what}")
        if value is None:
            nothing.append(name)
            continue
        if isinstance(value, (bool, int, float)):
            numbers[name] = value
            continue
        place = objects.tensor(value, f"{name} of {what}") if objects.is_tensor(value) else None
        if place is not None and not place.shape:
            numbers[name] = objects.number(value, f"{name} of {what}")
        elif place is None or place.numel not in (stored.numel, stored.numel + padding):
            held = "something else than numbers" if place is None else f"{place.numel} numbers"
            raise UnsupportedError(
                f"{objects.path}: the optimizer keeps {name!r}, {held}, for {what}, which has {stored.numel} "
                "elements. Only state that has one number for an element can be cut for another number of ranks."
            )
        elif not place.dtype.is_floating_point:
            raise UnsupportedError(f"{objects.path}: {name} of {what}: expected floating-point numbers.")
        else:
            moments[name] = place
    return Flat(stored, moments, numbers, nothing, swap_name if is_swapped else "")


def _gaps(objects: TorchObjects, wrapper: Mapping[Any, Any]) -> list[Sequence[int]]:
    found = objects.sequence(wrapper.get("param_alignment_paddings") or [], "param_alignment_paddings")
    return [
        [objects.count(each, "param_alignment_paddings") for each in objects.sequence(it, "param_alignment_paddings")]
        for it in found
    ]


def _scaler(objects: TorchObjects, wrapper: Mapping[Any, Any]) -> dict[str, bool | int | float | None]:
    if getattr(wrapper.get("loss_scaler"), "state", None) is None:
        return {}
    fields = objects.attributes(wrapper["loss_scaler"], "loss_scaler")
    return {name: value for name, value in fields.items() if isinstance(value, (bool, int, float, type(None)))}


def _of_config(objects: TorchObjects) -> tuple[str, int | None]:
    """(the optimizer's class, samples in a step), where the config says so."""
    config = objects.mapping(objects.root, "the file").get("ds_config")
    if not isinstance(config, dict):
        return "", None
    optimizer, batch = config.get("optimizer"), config.get("train_batch_size")
    kind = optimizer.get("type") if isinstance(optimizer, dict) else None
    return kind if isinstance(kind, str) else "", batch if type(batch) is int else None
