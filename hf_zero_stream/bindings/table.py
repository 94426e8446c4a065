"""The table of all that is bent of other libraries, to which plug-ins add their rows; nothing is bent outside it.

Within a patch scope rows stand in the order in which they are called. Four scopes are everybody's
(:class:`..registry.PatchScope`); each of the others is entered by one module.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence

from ..errors import PACKAGE, refuse_unknown_version
from ..registry import PatchScope, Row, Severity, broken_plugins, plugins, rows
from ..settings.config import announced_local_rank
from .install import Installation


REACHED = PatchScope("REACHED", "in a process that `hf-zero-stream run` has reached, and that has no ranks yet")
DEFERRED = PatchScope("DEFERRED", "while models live that accelerate will shard, or DeepSpeed cut")
PARTITIONED = PatchScope("PARTITIONED", "from the first load into ZeRO-3 partitions on")
WHOLE = PatchScope("WHOLE", "while models live that ranks have loaded whole")

_ESSENTIAL = Severity.ESSENTIAL
_MODEL = "transformers.modeling_utils:PreTrainedModel."
_TRAINER = "saves and training states of the Trainer"
_FSDP2 = "FSDP2 by accelerate"
_MPI = rows(
    "deepspeed.comm.comm:mpi_discovery bindings.streaming:discover_ranks", feature="an error that names launchers"
)

ROWS_OF_CORE: Mapping[PatchScope, Sequence[Row]] = {
    PatchScope.MODELS: [
        *rows(
            "save_pretrained saving.calls:save_pretrained_hook save_directory state_dict", _MODEL, severity=_ESSENTIAL
        ),
        # PEFT: adapters are put on a model; they are merged, and each layer is.
        *rows(
            """
            BaseTuner.inject_adapter        seams.adapters:inject_adapter       model adapter_name
            BaseTuner._check_merge_allowed  seams.adapters:check_merge_allowed
            onload_layer                    seams.adapters:onload_layer         layer
            """,
            "peft.tuners.tuners_utils:",
            feature="adapters on models of ours",
        ),
    ],
    REACHED: [
        *rows(
            "torch.distributed.distributed_c10d:_update_default_pg bindings.streaming:enter_with_group",
            feature="ranks that no launcher announces",
        ),
        *_MPI,
    ],
    PatchScope.BLOCK: [
        # Ranks make contact as soon as there is a process group.
        *rows("torch.distributed.distributed_c10d:_update_default_pg ranks.presence:set_default_group"),
        *_MPI,
        # A load: an Auto class, what lies beside a model, the model's class.
        *rows(
            """
            models.auto.modeling_auto:*.from_pretrained      loading.entrance:auto_model_hook
            models.auto.tokenization_auto:*.from_pretrained  loading.entrance:tokenizer_hook
            tokenization_utils_base:*.from_pretrained        loading.entrance:tokenizer_hook
            models.auto.processing_auto:*.from_pretrained    loading.entrance:processor_hook
            """,
            "transformers.",
        ),
        *rows(
            "from_pretrained loading.entrance:from_pretrained_hook pretrained_model_name_or_path",
            _MODEL,
            severity=_ESSENTIAL,
        ),
        *rows(
            "peft.peft_model:PeftModel.save_pretrained saving.calls:save_adapters_hook save_directory state_dict",
            feature="saves of adapters",
        ),
        # accelerate: what it prepares, saves and resumes.
        *rows(
            """
            get_state_dict  saving.hooks:get_state_dict  model
            save_model      saving.hooks:save_model      model save_directory max_shard_size safe_serialization
            """,
            "accelerate.accelerator:Accelerator.",
            feature="saves by accelerate",
        ),
        *rows(
            """
            Accelerator.save_state  state.hooks:save_state_of_accelerator
            Accelerator.load_state  state.hooks:load_state_of_accelerator
            save_fsdp_model         state.hooks:save_fsdp_model
            save_fsdp_optimizer     state.hooks:save_fsdp_optimizer
            load_fsdp_model         state.hooks:load_fsdp_model
            load_fsdp_optimizer     state.hooks:load_fsdp_optimizer
            """,
            "accelerate.accelerator:",
            feature="training states of accelerate",
        ),
        *rows(
            "transformers.training_args:TrainingArguments.__post_init__ reports.measures:follow_trainer",
            feature="bars that follow TrainingArguments(disable_tqdm=...)",
        ),
        # The Trainer: when it begins, saves, removes older checkpoints, ends, and goes on. The last ones are set on
        # one Trainer, while it saves.
        *rows(
            """
            Trainer.train                           state.hooks:trainer_train           resume_from_checkpoint
            Trainer._load_from_checkpoint           state.hooks:trainer_load_model      resume_from_checkpoint model
            Trainer._load_optimizer_and_scheduler   state.hooks:trainer_load_rest       checkpoint
            Trainer._save_checkpoint                state.hooks:trainer_save
            Trainer.save_model                      saving.hooks:trainer_save_model     output_dir _internal_call
            Trainer._save_optimizer_and_scheduler   state.hooks:trainer_save_rest       output_dir
            rotate_checkpoints                      state.hooks:rotate_checkpoints      >=5.2
            Trainer._load_best_model                state.hooks:trainer_load_best
            Trainer._save
            Trainer._push_from_checkpoint
            Trainer._get_output_dir
            Trainer._rotate_checkpoints             <5.2
            """,
            "transformers.trainer:",
            feature=_TRAINER,
        ),
        *rows(
            """
            save_checkpoint  state.engine_hooks:save_checkpoint  save_dir tag client_state save_latest \
                             exclude_frozen_parameters
            load_checkpoint  state.engine_hooks:load_checkpoint  load_dir tag load_module_strict load_module_only \
                             load_optimizer_states load_lr_scheduler_states custom_load_fn
            """,
            "deepspeed.runtime.engine:DeepSpeedEngine.",
            feature="training states of DeepSpeed's engine",
        ),
    ],
    PatchScope.LOAD: [
        # ZeRO-3 is hidden from all of transformers for the whole load, also where others have put a function in place.
        *rows(
            """
            is_deepspeed_zero3_enabled              seams.ds_config:is_enabled
            get_hf_quantizer                        seams.loading:get_hf_quantizer
            _get_resolved_checkpoint_files          seams.loading:get_resolved_checkpoint_files
            get_checkpoint_shard_files              seams.loading:get_checkpoint_shard_files
            load_state_dict                         seams.loading:load_state_dict
            PreTrainedModel._load_pretrained_model  seams.loading:load_pretrained_model          load_config
            """,
            "transformers.modeling_utils:",
            severity=_ESSENTIAL,
        ),
        *rows(
            "transformers.modeling_utils:_tied_params_are_equal seams.loading:tied_params_are_equal >=5.23",
            feature="tying anew",
        ),
        *rows(
            "transformers.modeling_utils:PreTrainedModel.is_custom_code >=5.17",
            feature="distributed_config",
        ),
        # Of these some are set on a model or a module, some called, for a load or a save.
        *rows(
            """
            modeling_utils:PreTrainedModel._move_missing_keys_from_meta_to_device
            modeling_utils:PreTrainedModel._initialize_missing_keys
            modeling_utils:PreTrainedModel._initialize_weights
            modeling_utils:PreTrainedModel._adjust_missing_and_unexpected_keys
            core_model_loading:convert_and_load_state_dict_in_model
            core_model_loading:WeightConverter.convert
            modeling_utils:_add_variant
            modeling_utils:is_fsdp_enabled
            modeling_utils:is_local_dist_rank_0
            integrations.deepspeed:_hf_deepspeed_config_weak_ref
            integrations.deepspeed:set_hf_deepspeed_config
            """,
            "transformers.",
            severity=_ESSENTIAL,
        ),
    ],
    PatchScope.SAVE: [
        # The layout of files.
        *rows("transformers.modeling_utils:unwrap_model seams.saving:unwrap_model", severity=Severity.SPEED),
        *rows(
            """
            split_torch_state_dict_into_shards  seams.saving:split
            safe_save_file                      seams.saving:save_file
            """,
            "transformers.modeling_utils:",
            severity=_ESSENTIAL,
        ),
        # Edits between two steps of an optimizer. PEFT's are seen by the rows for models; what one object can be told
        # is set on that object (`Steps.editors`).
        *rows(
            """
            deepspeed.runtime.zero.partition_parameters:GatheredParameters.__init__  holdings.steps:gather \
                                            params modifier_rank
            torch.nn.modules.module:Module.load_state_dict  holdings.steps:load_values
            """,
            feature="edits of a model that wait for a save in the background",
        ),
    ],
    DEFERRED: [
        *rows(
            """
            accelerate.accelerator:Accelerator.prepare_model              loading.prepare:fill_first
            accelerate.accelerator:fsdp2_prepare_model                    loading.prepare:prepare_fsdp2         >=1.6
            accelerate.utils.fsdp_utils:fsdp2_load_full_state_dict        loading.prepare:load_full_state_dict  >=1.6
            deepspeed.runtime.engine:DeepSpeedEngine._configure_distributed_model \
                                                                          loading.prepare:fill_first
            torch.nn:Parameter.__setattr__                                loading.prepare:set_attribute
            torch.nn.parallel.distributed:DistributedDataParallel.__init__ loading.prepare:fill_first
            torch.distributed.fsdp.fully_sharded_data_parallel:FullyShardedDataParallel.__init__ \
                                                                          loading.prepare:fill_first
            torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.__init__ loading.prepare:make_record
            transformers.modeling_utils:PreTrainedModel.resize_token_embeddings \
                                                                          loading.prepare:resize_token_embeddings
            """,
            severity=_ESSENTIAL,
            feature=_FSDP2,
        ),
    ],
    PARTITIONED: [
        *rows(
            "torch.optim.swa_utils:AveragedModel.__init__ saving.beside:refuse_empty_copy model",
            feature="an error where an average of weights would be empty",
        ),
    ],
    WHOLE: [
        *rows(
            "_convert_to_zero_parameters loading.whole:partition ds_config module",
            "deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload.",
            feature="warnings of configs that come after the load",
        ),
    ],
}


TABLE: Mapping[PatchScope, Sequence[Row]] = {
    scope: [row for table in (ROWS_OF_CORE, *(plugin.rows for plugin in plugins())) for row in table.get(scope, ())]
    for scope in dict.fromkeys([*ROWS_OF_CORE, *(scope for plugin in plugins() for scope in plugin.rows)])
}
"""The rows of the core, and behind them those of plug-ins."""

if announced_local_rank() == 0 and broken_plugins():
    logging.getLogger(PACKAGE).warning("hf_zero_stream does without some plug-ins. %s", broken_plugins())


@functools.cache
def installed(scope: PatchScope) -> Installation:
    """The installation, shared by all, of the rows of a patch scope."""
    below = scope.on_top_of
    return Installation(scope, TABLE, on_top_of=None if below is None else installed(below))


@functools.cache  # once
def install_model_rows() -> None:
    """Install the rows for models that transformers and PEFT alone would save, adapt or merge wrongly, for good."""
    installed(PatchScope.MODELS).__enter__()


@functools.cache  # once
def install_partition_rows() -> None:
    """Install the rows for models that ZeRO-3 has partitioned, for good."""
    installed(PARTITIONED).__enter__()


def refuse_lacking(feature: str) -> None:
    """Raise a VersionError if an installed version lacks what a feature needs that stock would do wrongly."""
    of_feature = [row for table in TABLE.values() for row in table if row.feature == feature]
    if lacking := [what for row in of_feature if (what := row.lacking())]:
        refuse_unknown_version(of_feature[0].package, lacking, feature)


def refuse_unsafe_partitions() -> None:
    """Raise a VersionError if an installed version lacks what keeps it from taking empty partitions for weights."""
    for table in TABLE.values():
        for row in table:
            if row.severity is Severity.PARTITIONS and (what := row.lacking()):
                refuse_unknown_version(row.package, [what], row.feature)
