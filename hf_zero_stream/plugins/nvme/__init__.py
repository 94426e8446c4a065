"""``offload_param`` to NVMe: partitions go to DeepSpeed's swap files as they are read."""

from __future__ import annotations

from ...plugin_api import Plugin


PLUGIN = Plugin("nvme", tools={"nvme": f"{__name__}.swapping"})
