"""DeepSpeed's tensor parallelism (AutoTP): ranks read the parts that they keep, and save the whole model."""

from __future__ import annotations

from ...plugin_api import PatchScope, Plugin, Severity, rows


CUT_LATER = PatchScope("CUT_LATER", "while models live that AutoTP will cut")

PLUGIN = Plugin(
    "autotp",
    rows={
        CUT_LATER: rows(
            "deepspeed.runtime.engine:DeepSpeedEngine._apply_autotp_partitioning load:apply_partitioning model",
            ours=f"{__name__}.",
            severity=Severity.ESSENTIAL,
            feature="AutoTP",
        )
    },
    tools={"load_for_autotp": f"{__name__}.load:load_for_autotp", "autotp_shards": f"{__name__}.shards"},
)
