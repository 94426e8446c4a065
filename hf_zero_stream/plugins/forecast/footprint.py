"""The memory of one rank while loading and training, computed from shapes, dtypes and settings alone.

The arithmetic follows DeepSpeed 0.19.8 (`runtime/zero/stage3.py`, `partition_parameters.py`, `parameter_offload.py`):
with P trainable elements, N ranks and an optimizer of K states, ``deepspeed.initialize`` and the first step add
O(P (K + 1) / N) elements in fp32, and gradients. A step adds temporary tensors as large as the largest sub-group. Not
counted: activations, the allocator's rounding, cuBLAS's workspace, sources read whole (``LoadPlan.materialised``).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, zip_longest
from typing import Any, Literal, NamedTuple

import torch

from ...plugin_api import bytes_text, wrapped


HOST, DISK, FILES = "cpu", "nvme", "files"

AdamW = Literal["single", "foreach", "fused"]
"""The way torch's AdamW (``torch/optim/adam.py``) steps: tensor by tensor, over lists of tensors, or in one kernel."""

ADAMW_COPIES: Mapping[AdamW, int] = {"single": 2, "foreach": 1, "fused": 0}
"""Temporary tensors of each way, of the size of what is stepped at once."""

_SMALL_SUB_GROUP = 10**8
_FP64_BYTES = 8
_PARTS = ("partitions", "buffers", "master", "gradients", "reduce_bucket", "secondary", "optimizer_states")


@dataclass(frozen=True, slots=True)
class ParameterShape:
    """A parameter's size and dtype, as far as they matter for memory.

    Attributes:
        numel: its elements on all `ranks` that share it, without padding.
        dtype: dtype of its partition.
        tied: another name for a parameter that is listed already: part of a gather, but with no partition of its own.
        in_files: it is frozen, and its values stay in the checkpoint.
    """

    name: str
    numel: int
    dtype: torch.dtype
    requires_grad: bool = True
    ranks: int = 1
    tied: bool = False
    in_files: bool = False

    @property
    def partition_numel(self) -> int:
        """Elements on each rank, padding included."""
        return -(-self.numel // self.ranks)

    @property
    def partition_bytes(self) -> int:
        return self.partition_numel * int(self.dtype.itemsize)

    @property
    def gathered_bytes(self) -> int:
        """Padding included."""
        return self.partition_bytes * self.ranks


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The settings of a DeepSpeed config that matter for memory; the defaults are ZeRO-3's in bf16 with AdamW.

    Attributes:
        device: the type of the device that trains: "cpu", "cuda", ...
        offload_param: where partitions live: "none" (on the device), "cpu" or "nvme".
        offload_optimizer: where master copies, optimizer states and gradients live, likewise.
        offload_ratio: share of the sub-groups of an offloaded optimizer that really leave the device.
        pinned_optimizer: whether an offloaded optimizer's gradients are copied into page-locked memory.
        swap_from_bytes: partitions and states below this size stay on the host, and do not go to NVMe.
        parameter_swap_bytes: host memory of the buffers through which partitions go to NVMe and back, or come from
            files.
        optimizer_swap_buffers: buffers, each of the largest sub-group, for optimizer states on their way to NVMe.
        sub_group_size: elements of this rank after which a new sub-group begins; they are cast and stepped one by one.
        reduce_bucket_bytes: size of the buffer in which gradients are reduced.
        state_bytes: size of the states that the optimizer keeps for an element; Adam keeps two.
        step_copies: temporary tensors of the size of a sub-group that the optimizer makes in a step.
        secondary_ranks: ranks that share hpZ's second copy of the parameters; 1: there is none.
        live_numel: elements that may stay gathered beside those of the module that runs.
        prefetch_numel: elements that are gathered ahead into one buffer.
        bucket_count: buffers of `reduce_bucket_bytes` that stages 1 and 2 use in turn.
    """

    device: str = HOST
    offload_param: str = "none"
    offload_optimizer: str = "none"
    offload_ratio: float = 1.0
    pinned_optimizer: bool = False
    swap_from_bytes: int = 2**20
    parameter_swap_bytes: int = 0
    optimizer_swap_buffers: int = 4
    sub_group_size: int = 10**9
    reduce_bucket_bytes: int = 10**9
    gradient_itemsize: int = 2
    master_itemsize: int = 4
    state_bytes: int = 8
    step_copies: int = ADAMW_COPIES["single"]
    secondary_ranks: int = 1
    live_numel: int = 10**9
    prefetch_numel: int = 5 * 10**7
    bucket_count: int = 1

    @property
    def partition_place(self) -> str:
        """The place of partitions that do not go to NVMe."""
        return self.device if self.offload_param == "none" else HOST

    def place_of_partition(self, param: ParameterShape) -> str:
        if param.in_files:
            return FILES
        # Only floating-point parameters have the dtype of DeepSpeed's swapper.
        swapped = self.offload_param == DISK and param.dtype.is_floating_point
        return DISK if swapped and param.partition_bytes >= self.swap_from_bytes else self.partition_place


@dataclass(frozen=True, kw_only=True)
class MemoryFootprint:
    """Memory of one rank in bytes, computed and not measured.

    A mapping has "cpu", the device's type ("cuda") and "nvme", as far as bytes are there. On the host, memory counts
    once it is written, which `reduce_bucket` is at the first backward pass. The peaks know this.

    Of a model that DTensor shards (see :mod:`.sharded`), `partitions` are the local shards, `gradients` come
    with the first backward pass, `largest_gather` is that of an FSDP2 group, and nothing is added before the training.

    `largest_gather` is what ZeRO-3 cannot do without, `most_gathered` what it may have gathered, and `passes_peak`
    counts that. A tied parameter counts also where its other end is gathered already.

    At stages 1 and 2 (see :mod:`.whole`) `partitions` are whole parameters, nothing is gathered, and gradients and the
    bucket come with the backward pass and go with the step.

    Attributes:
        engine: "deepspeed", or "torch" for a model that DTensor shards.
        stage: DeepSpeed's, of an engine of its.
        partitions: this rank's partitions of all parameters, padding included, also of those that no checkpoint fills.
        buffers: the model's buffers (not parameters), which every rank holds whole.
        staging: bound of the host memory through which the load reads.
        swap_buffers: DeepSpeed's host memory for the traffic with NVMe.
        largest_gather: the most that the forward pass gathers at once: a module's own parameters, or a leaf module's.
        most_gathered: the most that may be gathered, with what stays so for its next use.
        master: fp32 copies that ``deepspeed.initialize`` makes of all trainable partitions, also of fp32 ones.
        gradients: partitions of the gradients, which ``deepspeed.initialize`` allocates.
        reduce_bucket: the buffer for gradients on their way that ``deepspeed.initialize`` allocates.
        secondary: the second partitions of hpZ; ``deepspeed.initialize`` and later gathers make them.
        optimizer_states: the states that the first step makes.
        load_peak: most memory during the load: partitions, buffers, staging and swap buffers; "nvme" is not memory.
        start_peak: most memory during ``deepspeed.initialize``, with everything that was there before.
        passes_peak: most memory in the passes through the model, without activations.
        held: memory in use between steps, from the first on: everything but staging and gathered parameters.
        step_peak: most memory during a step of the optimizer, with everything that is held. Nothing is gathered then.
        step_cures: changes that would lower `step_peak`, and the lower peak; empty if none would by a tenth.
    """

    partitions: Mapping[str, int]
    buffers: Mapping[str, int]
    staging: int
    swap_buffers: int = 0
    largest_gather: int
    largest_gather_of: str
    most_gathered: int = 0
    master: Mapping[str, int] = field(default_factory=dict)
    gradients: Mapping[str, int]
    reduce_bucket: Mapping[str, int] = field(default_factory=dict)
    secondary: Mapping[str, int] = field(default_factory=dict)
    optimizer_states: Mapping[str, int]
    load_peak: Mapping[str, int]
    start_peak: Mapping[str, int]
    passes_peak: Mapping[str, int] = field(default_factory=dict)
    held: Mapping[str, int]
    step_peak: Mapping[str, int] = field(default_factory=dict)
    step_cures: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    engine: Literal["deepspeed", "torch"] = "deepspeed"
    stage: int = 3

    @property
    def holds(self) -> str:
        """The name of `partitions` that people read."""
        if self.engine != "deepspeed":
            return "local shards"
        return "partitions" if self.stage == 3 else "whole parameters"

    @property
    def started(self) -> dict[str, Mapping[str, int]]:
        """Memory that ``deepspeed.initialize`` adds and keeps, by the name that people read; without empty parts."""
        if self.engine != "deepspeed":
            return {}
        parts = {"fp32 copies": self.master}
        if self.stage == 3:
            bucket = {} if HOST in self.reduce_bucket else self.reduce_bucket
            parts |= {"gradients": self.gradients, "reduce bucket": bucket, "hpZ copies": self.secondary}
        return {name: places for name, places in parts.items() if places}

    @property
    def first_backward(self) -> dict[str, Mapping[str, int]]:
        """Memory that the first backward pass adds, likewise: on the host ZeRO-3's bucket is not written before."""
        if self.engine != "deepspeed" or self.stage < 3:
            parts = {"gradients": self.gradients, "reduce bucket": self.reduce_bucket}
            return {name: places for name, places in parts.items() if places}
        return {"reduce bucket": self.reduce_bucket} if HOST in self.reduce_bucket else {}

    def table(self) -> str:
        """The memory that training will need on a rank, for people to read: lines of at most 80 columns."""
        starting: list[tuple[str, str]] = []
        if self.engine == "deepspeed":
            starting += [*_rows("deepspeed.initialize adds", self.started)]
            starting.append(("and peaks at", _places_text(self.start_peak)))
        if self.first_backward or self.engine != "deepspeed":
            starting += _rows("the first backward adds", self.first_backward)
        rows = [
            (self.holds, _places_text(self.partitions)),
            ("peak of the load", f"{_places_text(self.load_peak)} (staging up to {bytes_text(self.staging)})"),
            ("largest gather", f"{bytes_text(self.largest_gather)} ({self.largest_gather_of or 'nothing'})"),
            *starting,
            ("the first step adds", f"optimizer states {_places_text(self.optimizer_states) or 'none'}"),
            ("held in training", _places_text(self.held)),
            ("passes peak at", f"{_places_text(self.passes_peak)} (without activations)"),
            ("a step peaks at", _places_text(self.step_peak)),
            *((f"with {cure}", _places_text(places)) for cure, places in self.step_cures.items()),
        ]
        width = max(len(title) for title, _ in rows)
        heading = "Memory that training will need on a rank, computed:"
        return "\n".join([heading, *(wrapped(f"  {title:{width}}  {text}", width + 4) for title, text in rows)])


def memory_footprint(
    parameters: Sequence[ParameterShape],
    settings: EngineSettings,
    *,
    buffer_bytes: int = 0,
    staging_bytes: int = 0,
    temporary_bytes: int = 0,
    leaf_modules: Collection[str] = (),
    with_cures: bool = True,
) -> MemoryFootprint:
    """Follow one rank's memory from the load through the first steps.

    Args:
        parameters: all of the model's, in the optimizer's order; one group of them is assumed (several need no more).
        temporary_bytes: memory of the device through which values pass in a load.
        leaf_modules: names of the modules that ZeRO-3 gathers whole, with all modules in them.
        with_cures: whether to look for what would lower the peak of a step.
    """
    ledger, device = Ledger(), settings.device
    own = [param for param in parameters if not param.tied]
    groups = _sub_groups([param for param in own if param.requires_grad], settings)

    for param in own:
        ledger.hold("partitions", settings.place_of_partition(param), param.partition_bytes)
    ledger.hold("buffers", device, buffer_bytes)
    ledger.hold("swap_buffers", HOST, settings.parameter_swap_bytes)
    ledger.pass_through(HOST, staging_bytes)
    ledger.pass_through(device, min(temporary_bytes, sum(param.partition_bytes for param in own)))
    load_peak = ledger.end_stage()
    _initialize_engine(ledger, own, groups, settings)
    start_peak = ledger.end_stage()

    if device == HOST:
        ledger.hold("reduce_bucket", HOST, settings.reduce_bucket_bytes)
    for group in groups:
        ledger.hold("optimizer_states", group.place, group.numel * settings.state_bytes)
    ledger.end_stage()
    gather, gather_of, most_gathered = _gathers(parameters, settings, leaf_modules)
    ledger.pass_through(device, most_gathered)
    passes_peak = ledger.end_stage()
    _follow_step(ledger, groups, settings)
    step_peak = ledger.end_stage()
    parts: dict[str, Any] = {part: ledger.taken[part] for part in _PARTS}
    return MemoryFootprint(
        **parts,
        swap_buffers=ledger.taken["swap_buffers"].get(HOST, 0),
        staging=staging_bytes,
        largest_gather=gather,
        largest_gather_of=gather_of,
        most_gathered=most_gathered,
        load_peak=load_peak,
        start_peak=start_peak,
        passes_peak=passes_peak,
        held=ledger.by_place(),
        step_peak=step_peak,
        step_cures=dict(_step_cures(parameters, groups, settings, buffer_bytes, step_peak)) if with_cures else {},
    )


def _step_cures(
    parameters: Sequence[ParameterShape],
    groups: Sequence[_SubGroup],
    settings: EngineSettings,
    buffer_bytes: int,
    peak: Mapping[str, int],
) -> Iterable[tuple[str, Mapping[str, int]]]:
    changes: dict[str, dict[str, Any]] = {}
    if max((group.numel for group in groups), default=0) > _SMALL_SUB_GROUP:
        changes[f'"sub_group_size": {_SMALL_SUB_GROUP}'] = {"sub_group_size": _SMALL_SUB_GROUP}
    if settings.step_copies:
        changes["a fused optimizer"] = {"step_copies": 0}
    for name, change in changes.items():
        as_changed = replace(settings, **change)
        changed = memory_footprint(parameters, as_changed, buffer_bytes=buffer_bytes, with_cures=False).step_peak
        if is_lower(changed, peak):
            yield name, changed


class Ledger:
    """Bytes held so far, by part of the footprint and by place, and the most that was in memory in this stage."""

    def __init__(self) -> None:
        self.taken: defaultdict[str, dict[str, int]] = defaultdict(dict)
        self.held = Counter[str]()
        self._most = Counter[str]()

    def hold(self, part: str, place: str, nbytes: int) -> None:
        if nbytes:
            self.taken[part][place] = self.taken[part].get(place, 0) + nbytes
            self.held[place] += nbytes
            self.pass_through(place, 0)

    def pass_through(self, place: str, nbytes: int) -> None:
        """Count `nbytes` that are in memory for a moment, beside what is held."""
        self._most[place] = max(self._most[place], self.held[place] + nbytes)

    def release(self, place: str, nbytes: int) -> None:
        """Free what was held."""
        self.held[place] -= nbytes

    def by_place(self) -> dict[str, int]:
        """Bytes held."""
        return {place: self.held[place] for place in sorted(self.held, key=HOST.__ne__) if self.held[place]}

    def end_stage(self) -> dict[str, int]:
        """Begin a new stage; returns the peak of the last one by place, without disks."""
        most, self._most = self._most, Counter(self.held)
        return {place: nbytes for place, nbytes in most.items() if nbytes and place not in (DISK, FILES)}


def _initialize_engine(
    ledger: Ledger, own: Sequence[ParameterShape], groups: Sequence[_SubGroup], settings: EngineSettings
) -> None:
    """Follow DeepSpeedZeroOptimizer_Stage3.__init__ from one allocation to the next."""
    device, master, offloaded = settings.device, settings.master_itemsize, settings.offload_optimizer != "none"
    gradient_place = HOST if offloaded else device
    copied = 1 + (settings.pinned_optimizer and device != HOST)  # only an accelerator's driver locks pages
    largest = max((group.numel for group in groups), default=0) * master
    trained = [param for param in own if param.requires_grad]

    # Partitions move into one buffer on the host (_create_fp16_partitions_with_defragmentation), each old one being
    # freed at once; a buffer that is page-locked or goes on to a device is there in full meanwhile.
    moved = [param.partition_bytes for param in trained if settings.place_of_partition(param) != DISK]
    ledger.pass_through(HOST, max(moved, default=0) if device == HOST else sum(moved))
    if settings.offload_optimizer == DISK:
        ledger.hold("swap_buffers", HOST, settings.optimizer_swap_buffers * largest)

    # _create_fp32_partitions casts a sub-group and clones the result; torch casts on the host what goes there.
    for group in groups:
        nbytes = group.numel * master
        is_cast = group.itemsize != master or group.place != settings.partition_place
        ledger.pass_through(group.place, (1 + is_cast) * nbytes)
        ledger.hold("master", group.place, nbytes)

    # initialize_optimizer_states makes gradients of zeros, for an optimizer on the host to keep, and one more.
    ledger.pass_through(gradient_place, largest)
    for group in groups:
        if offloaded and group.place != DISK:
            ledger.pass_through(HOST, largest + copied * group.numel * master)
            ledger.hold("gradients", group.place, group.numel * master)

    # Then the buffers for gradients; the one on a host is not written yet.
    if device != HOST:
        ledger.hold("reduce_bucket", device, settings.reduce_bucket_bytes)
    flat = sum(group.numel for group in groups) * settings.gradient_itemsize
    ledger.pass_through(gradient_place, (copied if offloaded else 1) * flat)
    ledger.hold("gradients", gradient_place, flat)

    # create_reduce_and_remove_grad_hooks gathers every trainable parameter, one after the other.
    for param in own if settings.secondary_ranks > 1 else ():
        second = -(-param.partition_numel * param.ranks // settings.secondary_ranks)
        ledger.hold("secondary", settings.partition_place, second * param.dtype.itemsize)
    ledger.pass_through(device, max((param.gathered_bytes for param in trained), default=0))


def _follow_step(ledger: Ledger, groups: Sequence[_SubGroup], settings: EngineSettings) -> None:
    """Follow DeepSpeedZeroOptimizer_Stage3.step, which takes one sub-group after the other."""
    device, master, offloaded = settings.device, settings.master_itemsize, settings.offload_optimizer != "none"
    for group in groups:
        gradients = 0
        if not offloaded:
            # The norm of each partition's gradient is taken of a copy in fp64 (get_grad_norm_direct).
            ledger.pass_through(device, max(group.numels) * _FP64_BYTES)
            # _prepare_fp32_grad_for_sub_group puts the gradients in a row and casts that.
            flat = group.numel * settings.gradient_itemsize if len(group.numels) > 1 else 0
            cast = group.numel * master if settings.gradient_itemsize != master else 0
            ledger.pass_through(device, flat + cast)
            gradients = cast or flat
        place = HOST if group.place == DISK else group.place
        ledger.pass_through(place, gradients + settings.step_copies * group.numel * master)
        if place == HOST and settings.partition_place != HOST:
            # A copy from the host to a device casts on the host first.
            ledger.pass_through(HOST, group.numel * group.itemsize)


class _SubGroup(NamedTuple):
    """Partitions that are cast and stepped together: elements of each, bytes of one, and where their states live."""

    numels: tuple[int, ...]
    itemsize: int
    place: str

    @property
    def numel(self) -> int:
        return sum(self.numels)


def _sub_groups(trained: Sequence[ParameterShape], settings: EngineSettings) -> list[_SubGroup]:
    """DeepSpeed's _create_fp16_sub_groups: a sub-group is full as soon as it has `sub_group_size` elements."""
    members: list[list[ParameterShape]] = []
    count = settings.sub_group_size
    for param in trained:
        if count >= settings.sub_group_size:
            members.append([])
            count = 0
        members[-1].append(param)
        count += param.partition_numel
    share_on_device = 1 if settings.offload_optimizer == "none" else 1 - settings.offload_ratio
    on_device = int(share_on_device * len(members))
    groups = []
    for number, params in enumerate(members):
        numels = tuple(param.partition_numel for param in params)
        place = settings.device if number < on_device else HOST
        if settings.offload_optimizer == DISK and sum(numels) * settings.master_itemsize >= settings.swap_from_bytes:
            place = DISK
        groups.append(_SubGroup(numels, params[0].dtype.itemsize, place))
    return groups


def _gathers(
    parameters: Iterable[ParameterShape], settings: EngineSettings, leaf_modules: Collection[str]
) -> tuple[int, str, int]:
    """(bytes, name) of the largest piece that ZeRO-3's hooks gather at once, and the most that may be gathered.

    Several parameters are copied out of the buffer into which they were gathered. Beside the piece of the module that
    runs, what comes next is fetched, ``stage3_prefetch_bucket_size`` at once and up to ``stage3_max_live_parameters``,
    and what comes again within ``stage3_max_reuse_distance`` is kept (DeepSpeed 0.19.8,
    `runtime/zero/partitioned_param_coordinator.py`).
    """
    leaves = set(leaf_modules)
    pieces: dict[str, list[ParameterShape]] = {}
    for param in parameters:
        owner = param.name.rpartition(".")[0]
        around = ("", *accumulate(owner.split("."), "{}.{}".format))
        # The outermost leaf module around a parameter gathers it, else the module that owns it.
        module = next((module for module in around if module in leaves), owner)
        pieces.setdefault(module, []).append(param)
    largest, largest_of, most, kept = 0, "", 0, 0
    for module, members in pieces.items():
        nbytes = sum(param.gathered_bytes for param in members)
        kept += sum(param.gathered_bytes for param in members if not param.tied)
        most = max(most, nbytes * (1 + (len(members) > 1)))
        if nbytes > largest:
            largest, largest_of = nbytes, members[0].name if len(members) == 1 else module
    itemsize = max((param.dtype.itemsize for members in pieces.values() for param in members), default=0)
    others = max(kept - largest, 0)
    fetched = min(settings.prefetch_numel * itemsize, others)
    return largest, largest_of, most + min(settings.live_numel * itemsize, others) + fetched


def adamw_copies(adamw: AdamW | None, place: str) -> int:
    """Temporary tensors of torch's AdamW; without a choice it takes lists of tensors where their device allows it."""
    return ADAMW_COPIES[adamw or ("single" if place == "cpu" else "foreach")]


def is_lower(changed: Mapping[str, int], peak: Mapping[str, int]) -> bool:
    """Whether a peak is lower by a tenth in some place."""
    return any(changed.get(place, 0) < 0.9 * nbytes for place, nbytes in peak.items())


def _rows(title: str, parts: Mapping[str, Mapping[str, int]]) -> Iterator[tuple[str, str]]:
    """One row for each of `parts`, of which the first has the title."""
    texts = [f"{name} {_places_text(places)}" for name, places in parts.items()] or ["nothing"]
    return zip_longest([title], texts, fillvalue="")


def _places_text(places: Mapping[str, int]) -> str:
    return " + ".join(f"{bytes_text(nbytes)} {place}" for place, nbytes in places.items())
