"""Frozen weights that stay in the checkpoint's files: a rank reads its part whenever ZeRO-3 is about to gather it.

:mod:`.swapper` is what DeepSpeed asks for a partition. :mod:`.weights` reads one by the load's own plan, into a part
of an :mod:`.arena`; :mod:`.supply` says which. :mod:`.engine` has what is done when an engine is made, fetches, steps
and saves.
"""

from __future__ import annotations

from ...plugin_api import PatchScope, Plugin, Severity, rows


FROM_FILES = PatchScope("FROM_FILES", "while models live whose frozen weights stay in files")

PLUGIN = Plugin(
    "from_files",
    rows={
        FROM_FILES: rows(
            """
            stage3:DeepSpeedZeroOptimizer_Stage3.__init__            engine:make_optimizer  module init_optimizer
            stage3:DeepSpeedZeroOptimizer_Stage3.step                engine:step
            parameter_offload:DeepSpeedZeRoOffload.__init__          engine:make_offload    module \
                                                                     max_reuse_distance max_live_parameters
            partitioned_param_coordinator:PartitionedParameterCoordinator.fetch_sub_module  engine:fetch  forward
            partition_parameters:Init._ensure_availability_of_partitioned_params         engine:make_available
            partition_parameters:Init._partition                     engine:partition       param_list has_been_updated
            """,
            "deepspeed.runtime.zero.",
            f"{__name__}.",
            severity=Severity.ESSENTIAL,
            feature="frozen weights in files",
        )
        + rows(
            """
            _get_zero_frozen_param_attributes  engine:frozen_attributes  attr_func
            load_module_state_dict             engine:load_module_state_dict  checkpoint
            """,
            "deepspeed.runtime.engine:DeepSpeedEngine.",
            f"{__name__}.",
            severity=Severity.ESSENTIAL,
            feature="frozen weights in files",
        )
        + rows(
            "transformers.generation.utils:GenerationMixin.generate engine:generate",
            ours=f"{__name__}.",
            feature="a warning of what generate reads",
        )
    },
    tools={"file_swapper": f"{__name__}.swapper:FileSwapper", "arena_bytes": f"{__name__}.weights:arena_bytes"},
)
