"""Engines of stages 1 and 2 start without a second copy of a model that ranks have loaded together."""

from __future__ import annotations

from ...plugin_api import PatchScope, Plugin, Severity, rows


FLAT = PatchScope("FLAT", "while models live that stages 1 and 2 may flatten")

PLUGIN = Plugin(
    "flat",
    rows={
        # The last two are set while one optimizer is constructed.
        FLAT: rows(
            """
            runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.__init__  flatten:construct \
                                                             init_optimizer dp_process_group has_moe_layers
            runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.flatten_dense_tensors_aligned \
                                                             tensor_list alignment use_cpu_data
            accelerator:get_accelerator().available_memory
            """,
            "deepspeed.",
            f"{__name__}.",
            severity=Severity.ESSENTIAL,
        )
    },
    tools={"flat": f"{__name__}.flatten:flatten_sharded"},
)
