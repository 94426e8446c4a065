"""What one rank's memory will hold while loading and training, computed from shapes, dtypes and settings alone.

The arithmetic follows DeepSpeed 0.19.8 (`runtime/zero/stage3.py`, `partition_parameters.py`, `parameter_offload.py`):
with P trainable elements, N ranks and an optimizer of K states, ``deepspeed.initialize`` and the first step add
O(P (K + 1) / N) elements in fp32, and gradients. Activations, the allocator's own rounding and sources that a
conversion reads whole (``LoadPlan.materialised``) are not in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch


__all__ = ["DISK", "HOST", "EngineSettings", "MemoryFootprint", "ParameterShape", "memory_footprint"]

HOST, DISK = "cpu", "nvme"


@dataclass(frozen=True, slots=True)
class ParameterShape:
    """What matters of a parameter.

    Attributes:
        name: its name in the model.
        numel: its elements, whole and without padding.
        dtype: dtype of its partition.
        requires_grad: whether it is trained.
        ranks: number of ranks that share it.
        tied: another name for a parameter that is listed already: part of a gather, but with no partition of its own.
    """

    name: str
    numel: int
    dtype: torch.dtype
    requires_grad: bool = True
    ranks: int = 1
    tied: bool = False

    @property
    def partition_numel(self) -> int:
        """Elements on each rank, padding included."""
        return -(-self.numel // self.ranks)

    @property
    def partition_bytes(self) -> int:
        return self.partition_numel * self.dtype.itemsize

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the buffer that gathers it, padding included."""
        return self.partition_bytes * self.ranks


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What matters of a DeepSpeed config; the defaults are those of ZeRO-3 in bf16 with AdamW."""

    device: str = HOST
    """The type of the device that trains: "cpu", "cuda", ..."""

    offload_param: str = "none"
    """Where partitions live: "none" (on the device), "cpu" or "nvme"."""

    offload_optimizer: str = "none"
    """Where master copies, optimizer states and gradients live, likewise."""

    offload_ratio: float = 1.0
    """Share of the sub-groups of an offloaded optimizer that really leave the device."""

    pinned_optimizer: bool = False
    """Whether an offloaded optimizer's gradients are copied into page-locked memory."""

    swap_from_bytes: int = 2**20
    """What is smaller than this does not go to NVMe, but stays on the host."""

    parameter_swap_bytes: int = 0
    """Host memory of the buffers through which partitions go to NVMe and back."""

    optimizer_swap_buffers: int = 4
    """Number of buffers, each of the largest sub-group, through which optimizer states go to NVMe and back."""

    sub_group_size: int = 10**9
    """Elements of this rank after which a new sub-group begins; they are cast and stepped one by one."""

    reduce_bucket_numel: int = 5 * 10**8
    """Elements of the buffer in which gradients are reduced."""

    bucket_itemsize: int = 2
    """Bytes of an element of that buffer."""

    gradient_itemsize: int = 2
    """Bytes of an element of the gradients that are accumulated."""

    master_itemsize: int = 4
    """Bytes of an element of the copies that the optimizer trains."""

    states: int = 2
    """K: states that the optimizer keeps for each element; 2 for Adam and AdamW."""

    state_itemsize: int = 4
    """Bytes of an element of a state."""

    secondary_ranks: int = 1
    """Ranks that share hpZ's second copy of the parameters (``zero_hpz_partition_size``); 1: there is none."""


@dataclass(frozen=True, kw_only=True)
class MemoryFootprint:
    """Memory of one rank in bytes, computed and not measured.

    Where bytes depend on the place, a field maps "cpu", the device's type ("cuda") and "nvme" to them; a place without
    any is left out. On the host the kernel counts memory only once it is written, which `reduce_bucket` is at the
    first backward pass. The peaks know this.
    """

    partitions: Mapping[str, int]
    """This rank's partitions of all parameters, padding included, also of those that no checkpoint fills."""

    buffers: Mapping[str, int]
    """The model's buffers (not parameters), which every rank holds whole."""

    staging: int
    """Bound of the host memory through which the load reads."""

    swap_buffers: int
    """DeepSpeed's host memory for the traffic with NVMe."""

    largest_gather: int
    """The largest piece that the forward pass gathers at once: a module's own parameters, or all of a leaf module's.

    A floor for the device's peak in training. DeepSpeed gathers into one buffer and, if the piece has more than one
    parameter, copies each out of it, so that for a moment there is twice as much. It may keep more than this: up to
    ``stage3_max_live_parameters`` elements. A tied parameter counts here even where its other end is gathered already.
    """

    largest_gather_of: str
    """The parameter's or the module's name."""

    master: Mapping[str, int]
    """Copies in fp32 that ``deepspeed.initialize`` makes of all trainable partitions, also where these are fp32."""

    gradients: Mapping[str, int]
    """Partitions of the gradients that ``deepspeed.initialize`` allocates."""

    reduce_bucket: Mapping[str, int]
    """The buffer for gradients on their way that ``deepspeed.initialize`` allocates."""

    secondary: Mapping[str, int]
    """The second partitions of hpZ, which the first gathers make, those of ``deepspeed.initialize`` among them."""

    optimizer_states: Mapping[str, int]
    """The K states that the first step makes."""

    load_peak: Mapping[str, int]
    """Most memory during the load; partitions, buffers, staging and swap buffers. "nvme" is no memory and not here."""

    start_peak: Mapping[str, int]
    """Most memory during ``deepspeed.initialize``, with everything that was there before."""

    @property
    def held(self) -> dict[str, int]:
        """What is there from the first step on, between steps: everything but staging and gathered parameters."""
        total = Counter({HOST: self.swap_buffers})
        for part in (self.partitions, self.buffers, self.secondary):
            total.update(part)
        for part in (self.master, self.gradients, self.reduce_bucket, self.optimizer_states):
            total.update(part)
        return _without_zeros(total)

    def to_dict(self) -> dict[str, Any]:
        """Returns every field by its name, and `held`, as dicts, numbers and strings; sizes are in bytes."""
        return {**asdict(self), "held": self.held}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MemoryFootprint:
        """The inverse of `to_dict`.

        Raises:
            TypeError: a key is missing, or is not known.
        """
        return cls(**{name: value for name, value in data.items() if name != "held"})


def memory_footprint(
    parameters: Sequence[ParameterShape],
    settings: EngineSettings,
    *,
    buffer_bytes: int = 0,
    staging_bytes: int = 0,
    leaf_modules: Collection[str] = (),
) -> MemoryFootprint:
    """Add up what one rank needs.

    Args:
        parameters: all of the model's, in the order of the optimizer; one group of optimizer parameters is assumed
            (several only make sub-groups smaller).
        settings: what the DeepSpeed config asks for.
        buffer_bytes: bytes of the model's buffers.
        staging_bytes: bound of the load's staging buffers.
        leaf_modules: names of the modules that ZeRO-3 gathers whole, with all modules in them.
    """
    own = [param for param in parameters if not param.tied]
    groups = _sub_groups([param for param in own if param.requires_grad], settings.sub_group_size)
    homes = [_home_of_group(number, groups, settings) for number in range(len(groups))]
    sizes = [sum(param.partition_numel for param in group) for group in groups]
    trained = sum(sizes)

    master, gradients, states = Counter[str](), Counter[str](), Counter[str]()
    offloaded = settings.offload_optimizer != "none"
    gradients[HOST if offloaded else settings.device] = trained * settings.gradient_itemsize
    for home, size in zip(homes, sizes, strict=True):
        master[home] += size * settings.master_itemsize
        states[home] += size * settings.states * settings.state_itemsize
        if offloaded and home != DISK:
            gradients[home] += size * settings.master_itemsize

    partitions, secondary = Counter[str](), Counter[str]()
    for param in own:
        partitions[_home_of_partition(param, settings)] += param.partition_bytes
        if settings.secondary_ranks > 1:
            second = -(-param.partition_numel * param.ranks // settings.secondary_ranks)
            secondary[_local(settings)] += second * param.dtype.itemsize

    gather, gather_of = _largest_gather(parameters, leaf_modules)
    swap = settings.parameter_swap_bytes
    if settings.offload_optimizer == DISK:
        swap += settings.optimizer_swap_buffers * max(sizes, default=0) * settings.master_itemsize
    before = Counter(partitions)
    del before[DISK]
    before[settings.device] += buffer_bytes
    before[HOST] += settings.parameter_swap_bytes
    return MemoryFootprint(
        partitions=_without_zeros(partitions),
        buffers=_without_zeros({settings.device: buffer_bytes}),
        staging=staging_bytes,
        swap_buffers=swap,
        largest_gather=gather,
        largest_gather_of=gather_of,
        master=_without_zeros(master),
        gradients=_without_zeros(gradients),
        reduce_bucket=_without_zeros({settings.device: settings.reduce_bucket_numel * settings.bucket_itemsize}),
        secondary=_without_zeros(secondary),
        optimizer_states=_without_zeros(states),
        load_peak=_without_zeros(before + Counter({HOST: staging_bytes})),
        start_peak=_start_peak(before, groups, homes, secondary, swap - settings.parameter_swap_bytes, settings),
    )


class _Ledger:
    """Memory that is held at the end of each stage, and the most that there was on the way."""

    def __init__(self, held: Mapping[str, int]) -> None:
        self._held = Counter(held)
        self.most = Counter(held)

    def hold(self, place: str, nbytes: int) -> None:
        if place != DISK:
            self._held[place] += nbytes
            self.pass_through(place, 0)

    def pass_through(self, place: str, nbytes: int) -> None:
        """`nbytes` more than what is held, for a moment."""
        if place != DISK:
            self.most[place] = max(self.most[place], self._held[place] + nbytes)


def _start_peak(
    before: Mapping[str, int],
    groups: Sequence[Sequence[ParameterShape]],
    homes: Sequence[str],
    secondary: Mapping[str, int],
    swap_bytes: int,
    settings: EngineSettings,
) -> dict[str, int]:
    """Follows DeepSpeedZeroOptimizer_Stage3.__init__ from one allocation to the next."""
    ledger, device = _Ledger(before), settings.device
    trained = [param for group in groups for param in group]
    sizes = [sum(param.partition_numel for param in group) for group in groups]
    largest = max(sizes, default=0)
    master = settings.master_itemsize
    offloaded = settings.offload_optimizer != "none"
    copied = 1 + (settings.pinned_optimizer and device != HOST)  # only an accelerator's driver locks pages

    # Partitions move into one buffer on the host (_create_fp16_partitions_with_defragmentation), each old one being
    # freed at once; a buffer that is page-locked or goes on to a device is there in full meanwhile.
    moved = [param.partition_bytes for param in trained if _home_of_partition(param, settings) != DISK]
    ledger.pass_through(HOST, max(moved, default=0) if device == HOST else sum(moved))
    ledger.hold(HOST, swap_bytes)

    # _create_fp32_partitions casts a sub-group and clones the result.
    for home, size, group in zip(homes, sizes, groups, strict=True):
        is_cast = group[0].dtype.itemsize != master or home != _local(settings)
        ledger.pass_through(home, (1 + is_cast) * size * master)
        if home == HOST and _local(settings) != HOST:
            ledger.pass_through(device, size * master)  # the cast runs where the values are, before they are copied
        ledger.hold(home, size * master)

    # initialize_optimizer_states makes gradients of zeros, for an optimizer on the host to keep, and one more.
    spare = largest * master
    ledger.pass_through(HOST if offloaded else device, spare)
    if offloaded:
        for home, size in zip(homes, sizes, strict=True):
            if home != DISK:
                ledger.pass_through(HOST, spare + copied * size * master)
                ledger.hold(home, size * master)

    # Then the buffers for gradients; the one on a host is not written yet.
    if device != HOST:
        ledger.hold(device, settings.reduce_bucket_numel * settings.bucket_itemsize)
    flat = sum(sizes) * settings.gradient_itemsize
    ledger.pass_through(HOST if offloaded else device, (copied if offloaded else 1) * flat)
    ledger.hold(HOST if offloaded else device, flat)

    # create_reduce_and_remove_grad_hooks gathers every trainable parameter, one after the other.
    for place, nbytes in secondary.items():
        ledger.hold(place, nbytes)
    ledger.pass_through(device, max((param.gathered_bytes for param in trained), default=0))
    return _without_zeros(ledger.most)


def _sub_groups(trained: Sequence[ParameterShape], size: int) -> list[list[ParameterShape]]:
    """DeepSpeed's _create_fp16_sub_groups: a sub-group is full as soon as it has `size` elements of this rank."""
    groups: list[list[ParameterShape]] = []
    count = size
    for param in trained:
        if count >= size:
            groups.append([])
            count = 0
        groups[-1].append(param)
        count += param.partition_numel
    return groups


def _local(settings: EngineSettings) -> str:
    """Where partitions are that do not go to NVMe."""
    return settings.device if settings.offload_param == "none" else HOST


def _home_of_partition(param: ParameterShape, settings: EngineSettings) -> str:
    # Only floating-point parameters have the dtype of DeepSpeed's swapper.
    swapped = settings.offload_param == DISK and param.dtype.is_floating_point
    return DISK if swapped and param.partition_bytes >= settings.swap_from_bytes else _local(settings)


def _home_of_group(number: int, groups: Sequence[Sequence[ParameterShape]], settings: EngineSettings) -> str:
    """Where the master copy and the states of a sub-group live."""
    if settings.offload_optimizer == "none":
        return settings.device
    size = sum(param.partition_numel for param in groups[number])
    if settings.offload_optimizer == DISK and size * settings.master_itemsize >= settings.swap_from_bytes:
        return DISK
    return settings.device if number < int((1 - settings.offload_ratio) * len(groups)) else HOST


def _largest_gather(parameters: Iterable[ParameterShape], leaf_modules: Collection[str]) -> tuple[int, str]:
    """(bytes, name) of the largest piece that ZeRO-3's hooks gather at once."""
    leaves = set(leaf_modules)
    pieces: dict[str, list[ParameterShape]] = {}
    for param in parameters:
        pieces.setdefault(_gathering_module(param.name, leaves), []).append(param)
    largest, largest_of = 0, ""
    for module, members in pieces.items():
        nbytes = sum(param.gathered_bytes for param in members)
        if nbytes > largest:
            largest, largest_of = nbytes, members[0].name if len(members) == 1 else module
    return largest, largest_of


def _gathering_module(name: str, leaves: set[str]) -> str:
    """The module whose hook gathers a parameter: the outermost leaf module around it, else the one that owns it."""
    parts = name.split(".")[:-1]
    for length in range(len(parts) + 1):
        if ".".join(parts[:length]) in leaves:
            return ".".join(parts[:length])
    return ".".join(parts)


def _without_zeros(bytes_at: Mapping[str, int]) -> dict[str, int]:
    return {place: nbytes for place, nbytes in bytes_at.items() if nbytes}
