"""``offload_param`` to NVMe: partitions go to DeepSpeed's swap files as they are read."""

from __future__ import annotations

from ...plugin_api import PatchScope, Plugin, Row, Weight


_SWAPPER = "deepspeed.runtime.swap_tensor.partitioned_param_swapper:AsyncPartitionedParameterSwapper"

PLUGIN = Plugin(
    "nvme",
    rows={
        PatchScope.CALLED: [
            Row(f"{_SWAPPER}.{name}", "", weight=Weight.ESSENTIAL, feature="offload_param to NVMe")
            for name in (
                *("get_buffer", "swappable_tensor", "swap_out_and_release", "synchronize_writes"),
                "remove_partition_and_release_buffers",
            )
        ]
    },
    tools={"nvme": f"{__name__}.swapping"},
)
