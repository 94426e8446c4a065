"""The calls: which groups of processes they have. `a` and `b` are one day on a GPU, `c` is another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from . import reader, speed, steps
from .setting import Group


TWO_ON_ONE = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_MAX_NCHANNELS": "2",
}
"""For two ranks that share one GPU: NCCL refuses that where it sees it, so each says that it is a host of its own."""

TWO_BACKENDS = Group(
    "two ranks: two backends",
    {**steps.EXCHANGE, **steps.FEW, **steps.DIES},
    world_size=2,
    bound=False,
    backend="cpu:gloo,cuda:nccl",
)

CALLS: Mapping[str, Sequence[Group]] = {
    "a": (
        Group("reader", reader.STEPS, world_size=0, alone=True, deterministic=False),
        Group("ZeRO", steps.ZERO),
        Group("own transformers", {**steps.FEW, **steps.FSDP2}, own_transformers=True),
        Group("FSDP2 and resumes", {**steps.FSDP2, **steps.RESUMED, **steps.MEMORY}),
        Group("two ranks: bound", {**steps.EXCHANGE, **steps.DIES}, world_size=2),
        Group("two ranks: lazy", {**steps.EXCHANGE, **steps.DIES}, world_size=2, bound=False),
        Group("two ranks: ZeRO", {**steps.TWO_ZERO, **steps.KILLED}, world_size=2),
        Group("two ranks: sharded", steps.TWO_SHARDED, world_size=2),
    ),
    "b": (
        Group("reader", reader.STEPS, world_size=0, alone=True, deterministic=False),
        Group("speed", speed.STEPS, alone=True, deterministic=False),
        Group("stock", speed.STOCK, deterministic=False),
        Group("memory and offload", {**steps.MEMORY, **steps.OFFLOAD, **steps.LANES}),
        Group("two ranks: ZeRO", {**steps.TWO_ZERO, **steps.TWO_RESUMED, **steps.KILLED}, world_size=2),
        Group("two ranks: sharded", {**steps.TWO_SHARDED, **steps.TWO_SHARDED_RESUMED}, world_size=2),
        Group("two ranks: dies", {**steps.EXCHANGE, **steps.DIES}, world_size=2),
        Group("two ranks: first send", {**steps.EXCHANGE, **steps.FIRST_SEND}, world_size=2),
        TWO_BACKENDS,
    ),
    # With --gigabytes 12.
    "c": (
        *(Group(f"first load {number}", speed.FIRST, alone=True, deterministic=False) for number in (1, 2, 3)),
        Group("threads", speed.THREADS, alone=True, deterministic=False),
        Group("beside stock", speed.BESIDE, alone=True, deterministic=False),
        Group("two ranks: sharded", {**steps.TWO_SHARDED, **steps.TWO_SHARDED_RESUMED}, world_size=2),
        Group("two ranks: ZeRO", {**steps.TWO_ZERO, **steps.TWO_RESUMED, **steps.KILLED}, world_size=2),
        TWO_BACKENDS,
    ),
}
