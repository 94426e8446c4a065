"""The memory of one rank while loading and training a model that DTensor shards, by FSDP2 or without it.

The arithmetic follows torch's FSDP2 (`torch/distributed/fsdp/_fully_shard/_fsdp_param.py`, `_fsdp_collectives.py`):
parameters, their gradients and AdamW's two states are shards of one size, in the parameters' own dtype. What a group
of parameters gathers is in the dtype of its mixed precision. A step of AdamW adds temporary tensors: of one shard at a
time, or of all. Not counted: activations, reduce-scatter's buffers, and that FSDP2 gathers the next group while it
still holds the last one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torch import nn

from ...plugin_api import StreamingConfig, fsdp, local_of, own_names
from .footprint import HOST, AdamW, MemoryFootprint, adamw_copies, is_lower


_ADAM_STATES = 2


class HeldShard(NamedTuple):
    """A rank's shard of a parameter: bytes with FSDP2's padding, and the type of the device that they are on."""

    nbytes: int
    place: str
    requires_grad: bool


def sharded_footprint(
    shards: Iterable[HeldShard],
    gathers: Iterable[tuple[str, int]],
    *,
    device: str,
    buffer_bytes: int = 0,
    staging_bytes: int = 0,
    temporary_bytes: int = 0,
    adamw: AdamW | None = None,
) -> MemoryFootprint:
    """Follow one rank's memory from the load through the steps of AdamW.

    Args:
        shards: of all parameters, each once.
        gathers: name and bytes of each group of parameters that FSDP2 gathers together.
        temporary_bytes: memory of the device through which values pass in a load.
        device: the type of the device that trains: "cpu", "cuda", ...
        adamw: how AdamW steps; default: as torch chooses for the place of the shards.
    """
    partitions, trained, largest = Counter[str](), Counter[str](), Counter[str]()
    for nbytes, place, requires_grad in shards:
        partitions[place] += nbytes
        trained[place] += nbytes if requires_grad else 0
        largest[place] = max(largest[place], nbytes if requires_grad else 0)
    buffers = Counter({device: buffer_bytes})
    gradients, states = +trained, Counter({place: _ADAM_STATES * nbytes for place, nbytes in trained.items()})
    loaded = partitions + buffers
    passing = Counter({HOST: staging_bytes}) + Counter({device: min(temporary_bytes, partitions.total())})
    held = loaded + gradients + states

    def step_peak(adamw: AdamW | None) -> dict[str, int]:
        copies = {place: adamw_copies(adamw, place) for place in trained}
        # "foreach" makes its copy of all shards at once, the others go from shard to shard.
        at_once = {place: trained[place] if copies[place] == 1 else largest[place] for place in trained}
        return dict(held + Counter({place: copies[place] * at_once[place] for place in trained}))

    peak, fused = step_peak(adamw), step_peak("fused")
    gather_of, gather = max(gathers, key=lambda group: group[1], default=("", 0))
    return MemoryFootprint(
        engine="torch",
        partitions=dict(+partitions),
        buffers=dict(+buffers),
        staging=staging_bytes,
        largest_gather=gather,
        largest_gather_of=gather_of,
        most_gathered=gather,
        gradients=dict(gradients),
        optimizer_states=dict(+states),
        load_peak=dict(loaded + passing),
        start_peak=dict(loaded),
        passes_peak=dict(held + Counter({device: gather})),
        held=dict(held),
        step_peak=peak,
        step_cures={"a fused optimizer": fused} if is_lower(fused, peak) else {},
    )


def footprint_of_shards(
    model: nn.Module, tied: set[str], config: StreamingConfig, device: str, adamw: AdamW | None
) -> MemoryFootprint:
    """The memory that this rank needs for `model`, whose parameters DTensor has sharded."""
    managed, held = fsdp.managed_params(model), dict[int, HeldShard]()
    own = own_names(model)
    for name, param in model.named_parameters(remove_duplicate=False):
        if own[name] in tied or id(param) in held:
            continue
        if (record := managed.get(name)) is None:
            held[id(param)] = HeldShard(local_of(param).nbytes, device, param.requires_grad)
        else:
            nbytes = record.padded_sharded_param_size.numel() * param.dtype.itemsize
            held[id(param)] = HeldShard(nbytes, HOST if record.offload_to_cpu else device, param.requires_grad)
    return sharded_footprint(
        held.values(),
        _gathers(model),
        device=device,
        buffer_bytes=sum(buffer.nbytes for buffer in model.buffers()),
        staging_bytes=config.staging_on(device),
        temporary_bytes=config.temporary_on(device),
        adamw=adamw,
    )


def _gathers(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Name and bytes of each group of parameters that FSDP2 gathers, with the copies that mixed precision casts."""
    names = {id(module): name or "the root module" for name, module in model.named_modules()}
    for group in fsdp.groups(model):
        nbytes = 0
        for record in group.fsdp_params:
            info, chunk = record._module_info, fsdp.chunk_of(record)
            dtype = getattr(info.module, info.param_name).dtype
            cast = record.mp_policy.param_dtype if dtype.is_floating_point else None
            copies = (1 if chunk is None else chunk.parts) + (cast not in (None, dtype))
            nbytes += record.padded_sharded_param_size.numel() * copies * (cast or dtype).itemsize
        yield ", ".join(names[id(module)] for module in group.modules), nbytes
