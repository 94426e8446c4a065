"""Engines of stages 1 and 2 start without a second copy of a model that ranks have loaded together."""

from __future__ import annotations

from ...plugin_api import PatchScope, Plugin, Row, Weight


_OPTIMIZER = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"

FLAT = PatchScope("FLAT", "while models live that stages 1 and 2 may flatten")

PLUGIN = Plugin(
    "flat",
    rows={
        FLAT: [
            Row(
                f"{_OPTIMIZER}.__init__",
                f"{__name__}.flatten:construct",
                "init_optimizer dp_process_group has_moe_layers",
                weight=Weight.ESSENTIAL,
            ),
            # Set on one optimizer, while it is constructed.
            Row(
                f"{_OPTIMIZER}.flatten_dense_tensors_aligned",
                "",
                "tensor_list alignment use_cpu_data",
                weight=Weight.ESSENTIAL,
            ),
            Row("deepspeed.accelerator:get_accelerator().available_memory", "", weight=Weight.ESSENTIAL),
        ]
    },
    tools={"flat": f"{__name__}.flatten:flatten_sharded"},
)
