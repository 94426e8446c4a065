"""DeepSpeed's expert parallelism (AutoEP): each rank reads its own experts, and saves have transformers' layers."""

from __future__ import annotations

from ...plugin_api import PatchScope, Plugin, Row, Weight


_AUTO_EP = "deepspeed.module_inject.auto_ep"

EXPERTS = PatchScope("EXPERTS", "from the first load of converted experts on")
RECORDERS = PatchScope("RECORDERS", "while DeepSpeed converts experts")

PLUGIN = Plugin(
    "autoep",
    rows={
        EXPERTS: [
            Row(
                f"{_AUTO_EP}:AutoEP.ep_parser",
                f"{__name__}.experts:find_layers",
                weight=Weight.ESSENTIAL,
                since="0.19.1",
            )
        ],
        RECORDERS: [
            Row(
                f"{_AUTO_EP}_presets.base:_install_instance_transformers_output_recorders",
                f"{__name__}.experts:install_by_name",
                weight=Weight.ESSENTIAL,
                since="0.19.1",
            )
        ],
    },
    tools={"experts": f"{__name__}.experts"},
)
