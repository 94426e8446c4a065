"""accelerate's FSDP2 on a CPU. accelerate wants several GPUs for FSDP: it is told that the gloo ranks are such."""

from __future__ import annotations

from typing import Any


__all__ = ["announce_devices", "fsdp2_accelerator"]


def announce_devices() -> None:
    """Have accelerate, and the Trainer, find the ranks that the tests' cluster has made, and let them use FSDP."""
    from accelerate import PartialState
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(backend="gloo").distributed_type = DistributedType.MULTI_GPU


def fsdp2_accelerator(mixed_precision: str | None = None, **plugin: Any) -> Any:
    """A new accelerator whose ``prepare`` shards by FSDP2, with these arguments of its plugin."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    announce_devices()
    arguments = {"auto_wrap_policy": "transformer_based_wrap", "cpu_ram_efficient_loading": False, **plugin}
    return Accelerator(
        mixed_precision=mixed_precision,
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, **arguments),
    )
