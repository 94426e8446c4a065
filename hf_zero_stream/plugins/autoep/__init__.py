"""DeepSpeed's expert parallelism (AutoEP): each rank reads its own experts, and saves have transformers' layers."""

from __future__ import annotations

from ...plugin_api import PatchScope, Plugin, Severity, rows


EXPERTS = PatchScope("EXPERTS", "from the first load of converted experts on")

PLUGIN = Plugin(
    "autoep",
    rows={
        EXPERTS: rows(
            """
            auto_ep:AutoEP.ep_parser  experts:find_layers  >=0.19.1
            auto_ep_presets.base:_install_instance_transformers_output_recorders \
                                      experts:install_by_name  >=0.19.1
            """,
            "deepspeed.module_inject.",
            f"{__name__}.",
            severity=Severity.ESSENTIAL,
        )
    },
    tools={"experts": f"{__name__}.experts"},
)
