"""The memory of one rank while loading and training at ZeRO's stages 1 and 2, where every rank has all parameters.

The arithmetic follows DeepSpeed 0.19.8 (`runtime/zero/stage_1_and_2.py`): with P elements and N ranks, a rank has all
P in the dtype of training, and fp32 copies and states of P / N. Gradients are whole in the backward pass at stage 1;
at stage 2 a rank keeps those of the parameters of which it has a part, whole. Not counted: activations, what an
allocator rounds up, and the second copy in host memory that DeepSpeed makes where a device has no room for one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from .footprint import HOST, EngineSettings, Ledger, MemoryFootprint, ParameterShape


_ALIGNMENT = 2
"""Elements to which DeepSpeed aligns each rank's part (``nccl_start_alignment_factor``)."""

_FP64_BYTES = 8


def footprint_of_whole(
    parameters: Sequence[ParameterShape],
    settings: EngineSettings,
    *,
    stage: int,
    shares_reads: bool,
    loaded_bytes: int,
    buffer_bytes: int = 0,
    staging_bytes: int = 0,
    exchanged_bytes: int = 0,
) -> MemoryFootprint:
    """Follow one rank's memory from the load through the first steps.

    Args:
        parameters: all of the model's, in the optimizer's order; ``ranks`` of each is the number of all ranks.
        shares_reads: whether ranks load the model together, onto the device, and flatten it together
            (:mod:`hf_zero_stream.plugins.flat`).
        exchanged_bytes: buffers on the device through which ranks exchange what they read in such a load.
        loaded_bytes: of the parameters in the dtype in which they are loaded; the engine casts them.
    """
    device, offloaded = settings.device, settings.offload_optimizer != "none"
    own = [param for param in parameters if not param.tied]
    trained = [param for param in own if param.requires_grad]
    model = sum(param.numel * param.dtype.itemsize for param in own)
    ranks = max((param.ranks for param in own), default=1)
    itemsize = trained[0].dtype.itemsize if trained else 0
    numel = sum(param.numel for param in trained)
    part = -(-numel // (_ALIGNMENT * ranks)) * _ALIGNMENT
    master, place = part * settings.master_itemsize, HOST if offloaded else device
    largest = max((param.numel for param in trained), default=0)
    ledger = Ledger()

    loaded_on = device if shares_reads else HOST
    passing = min(exchanged_bytes, loaded_bytes) if loaded_on != HOST else 0
    ledger.pass_through(loaded_on, loaded_bytes + buffer_bytes + passing)
    ledger.pass_through(HOST, staging_bytes if shares_reads and device != HOST else 0)
    load_peak = ledger.end_stage()
    ledger.pass_through(loaded_on, loaded_bytes + buffer_bytes)  # the engine moves one parameter after the other
    ledger.hold("partitions", device, model)
    ledger.hold("buffers", device, buffer_bytes)
    # Parameters are laid in a row, beside the old ones: all of them, or this rank's part.
    flat = part * ranks * itemsize
    ledger.pass_through(device, part * itemsize if shares_reads and ranks > 1 else flat)
    ledger.hold("partitions", device, flat - numel * itemsize)
    # Then this rank's part is cloned, and cast: on the host, if it goes there.
    pinned = offloaded and settings.pinned_optimizer and device != HOST  # only an accelerator's driver locks pages
    ledger.pass_through(device, part * itemsize)
    ledger.pass_through(place, part * itemsize + master * (1 + pinned))
    ledger.hold("master", place, master)
    if offloaded:
        # Buffers in which new values, and the gradient of a parameter, go from one memory to the other.
        for nbytes in (part * itemsize, largest * itemsize):
            ledger.pass_through(HOST, nbytes * (1 + pinned))
            ledger.hold("swap_buffers", HOST, nbytes)
        ledger.hold("buffers", device, largest * itemsize)
        ledger.pass_through(HOST, master * (1 + pinned))
        ledger.hold("gradients", HOST, master)
    else:
        ledger.pass_through(device, master)  # zeros for the gradient of its part
    start_peak = ledger.end_stage()

    ledger.hold("optimizer_states", place, part * settings.state_bytes)
    ledger.end_stage()
    held = ledger.by_place()
    kept = 0 if offloaded else most_of_a_rank(trained, part)
    gradients = (numel if stage == 1 else kept) * settings.gradient_itemsize
    bucket = settings.reduce_bucket_bytes * settings.bucket_count
    reduced = min(max(settings.reduce_bucket_bytes, largest * itemsize), numel * itemsize) if ranks > 1 else 0
    normed = min(largest, part) * _FP64_BYTES if offloaded else 0  # on the device, before it goes to the host
    if stage == 1:
        # All gradients are there when the first are moved into the bucket; then a copy is reduced, and copied again.
        on_top = max(normed, kept * settings.gradient_itemsize - reduced, 0)
    else:
        # One gradient is made while others are in the bucket, of which a copy is reduced.
        on_top = max(normed, reduced) + largest * itemsize
    ledger.pass_through(device, gradients + bucket + on_top)
    passes_peak = ledger.end_stage()
    _follow_step(ledger, settings, part, kept, min(largest, part))
    return MemoryFootprint(
        stage=stage,
        partitions=ledger.taken["partitions"],
        buffers=ledger.taken["buffers"],
        staging=staging_bytes if shares_reads else 0,
        swap_buffers=ledger.taken["swap_buffers"].get(HOST, 0),
        largest_gather=0,
        largest_gather_of="",
        master=ledger.taken["master"],
        gradients={device: gradients} if gradients else ledger.taken["gradients"],
        reduce_bucket={device: bucket} if bucket else {},
        optimizer_states=ledger.taken["optimizer_states"],
        load_peak=load_peak,
        start_peak=start_peak,
        passes_peak=passes_peak,
        held=held,
        step_peak=ledger.end_stage(),
    )


def _follow_step(ledger: Ledger, settings: EngineSettings, part: int, kept: int, largest: int) -> None:
    """Follow DeepSpeedZeroOptimizer.step: `kept` elements of gradients become one row, which is cast.

    Args:
        largest: elements of the largest gradient, of which a copy in fp64 gives the norm.
    """
    device, master = settings.device, part * settings.master_itemsize
    if settings.offload_optimizer != "none":
        ledger.pass_through(HOST, settings.step_copies * master)
        return
    held, row = kept * settings.gradient_itemsize, part * settings.gradient_itemsize
    cast = master if settings.gradient_itemsize != settings.master_itemsize else 0
    ledger.pass_through(device, held + largest * _FP64_BYTES)
    ledger.pass_through(device, held + row + cast)
    ledger.pass_through(device, (cast or row) + settings.step_copies * master)


def most_of_a_rank(trained: Sequence[ParameterShape], part: int) -> int:
    """Elements of the parameters of which a rank has some in its `part`; of the rank that has most."""
    ends = [0, *accumulate(param.numel for param in trained)]
    most = 0
    for start in range(0, ends[-1], part or 1):
        first, last = bisect_right(ends, start) - 1, bisect_left(ends, start + part)
        most = max(most, ends[min(last, len(ends) - 1)] - ends[first])
    return most
