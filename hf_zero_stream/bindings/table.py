"""The table of all that is bent of other libraries, to which plug-ins add their rows; nothing is bent outside it.

Within a patch scope rows stand in the order in which they are called.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence

from ..errors import PACKAGE, refuse_unknown_version
from ..registry import PatchScope, Row, Weight, broken_plugins, plugins
from ..settings.config import announced_local_rank
from .install import Installation


_ESSENTIAL, _SPEED = Weight.ESSENTIAL, Weight.SPEED
_MODELING, _LOADING = "transformers.modeling_utils", "transformers.core_model_loading"
_MODEL = f"{_MODELING}:PreTrainedModel"
_TRAINER, _ENGINE = "transformers.trainer", "deepspeed.runtime.engine:DeepSpeedEngine"
_ACCELERATOR, _PEFT = "accelerate.accelerator", "peft.tuners.tuners_utils"

_DEFAULT_GROUP = "torch.distributed.distributed_c10d:_update_default_pg"

_STATES, _SAVES = "training states of accelerate", "saves by accelerate"
_ZERO = "deepspeed.runtime.zero"
_EDITS = "edits of a model that wait for a save in the background"
_OF_FSDP2 = "FSDP2 by accelerate"
_DDP = "torch.nn.parallel.distributed:DistributedDataParallel"
_FSDP_1 = "torch.distributed.fsdp.fully_sharded_data_parallel:FullyShardedDataParallel"
_PARAM = "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam"


def _trainer(name: str, leads_to: str, relies_on: str = "", *, since: str = "", until: str = "") -> Row:
    saves = "saves and training states of the Trainer"
    return Row(f"{_TRAINER}:{name}", leads_to, relies_on, feature=saves, since=since, until=until)


_MPI = Row(
    "deepspeed.comm.comm:mpi_discovery", ".bindings.streaming:discover_ranks", feature="an error that names launchers"
)

OURS: Mapping[PatchScope, Sequence[Row]] = {
    PatchScope.MODELS: [
        Row(
            f"{_MODEL}.save_pretrained", ".saving.calls:save_pretrained_hook", "save_directory state_dict", _ESSENTIAL
        ),
        # PEFT: adapters are put on a model; they are merged, and each layer is.
        *[
            Row(f"{_PEFT}:{name}", f".seams.adapters:{leads_to}", relies_on, feature="adapters on models of ours")
            for name, leads_to, relies_on in (
                ("BaseTuner.inject_adapter", "inject_adapter", "model adapter_name"),
                ("BaseTuner._check_merge_allowed", "check_merge_allowed", ""),
                ("onload_layer", "onload_layer", "layer"),
            )
        ],
    ],
    PatchScope.REACHED: [
        Row(_DEFAULT_GROUP, ".bindings.streaming:enter_with_group", feature="ranks that no launcher announces"),
        _MPI,
    ],
    PatchScope.BLOCK: [
        # Ranks make contact as soon as there is a process group.
        Row(_DEFAULT_GROUP, ".ranks.presence:set_default_group"),
        _MPI,
        # What waits for the lock of a process that compiles says so.
        Row("torch.utils.file_baton:FileBaton.wait", ".extensions:wait", feature="warnings of locks nobody holds"),
        # A load: an Auto class, the model's class, and what lies beside a model.
        Row("transformers.models.auto.modeling_auto:*.from_pretrained", ".loading.entrance:auto_model_hook"),
        Row("transformers.models.auto.tokenization_auto:*.from_pretrained", ".loading.entrance:tokenizer_hook"),
        Row("transformers.tokenization_utils_base:*.from_pretrained", ".loading.entrance:tokenizer_hook"),
        Row("transformers.models.auto.processing_auto:*.from_pretrained", ".loading.entrance:processor_hook"),
        Row(
            f"{_MODEL}.from_pretrained",
            ".loading.entrance:from_pretrained_hook",
            "pretrained_model_name_or_path",
            _ESSENTIAL,
        ),
        # accelerate: what it prepares, saves and resumes.
        Row(
            f"{_ACCELERATOR}:Accelerator.get_state_dict",
            ".saving.hooks:get_state_dict",
            "model",
            feature=_SAVES,
        ),
        Row(
            f"{_ACCELERATOR}:Accelerator.save_model",
            ".saving.hooks:save_model",
            "model save_directory max_shard_size safe_serialization",
            feature=_SAVES,
        ),
        *[
            Row(
                f"{_ACCELERATOR}:Accelerator.{name}",
                f".state.hooks:{name}_of_accelerator",
                feature=_STATES,
            )
            for name in ("save_state", "load_state")
        ],
        *[
            Row(f"{_ACCELERATOR}:{name}", f".state.hooks:{name}", feature=_STATES)
            for name in ("save_fsdp_model", "save_fsdp_optimizer", "load_fsdp_model", "load_fsdp_optimizer")
        ],
        Row(
            "transformers.training_args:TrainingArguments.__post_init__",
            ".reports.measures:follow_trainer",
            feature="bars that follow TrainingArguments(disable_tqdm=...)",
        ),
        # The Trainer: when it begins, saves, removes older checkpoints, ends, and goes on.
        _trainer("Trainer.train", ".state.hooks:trainer_train", "resume_from_checkpoint"),
        _trainer("Trainer._load_from_checkpoint", ".state.hooks:trainer_load_model", "resume_from_checkpoint model"),
        _trainer("Trainer._load_optimizer_and_scheduler", ".state.hooks:trainer_load_rest", "checkpoint"),
        _trainer("Trainer._save_checkpoint", ".state.hooks:trainer_save"),
        _trainer("Trainer.save_model", ".saving.hooks:trainer_save_model", "output_dir _internal_call"),
        _trainer("Trainer._save_optimizer_and_scheduler", ".state.hooks:trainer_save_rest", "output_dir"),
        _trainer("rotate_checkpoints", ".state.hooks:rotate_checkpoints", since="5.2"),
        _trainer("Trainer._load_best_model", ".state.hooks:trainer_load_best"),
        # Set on one Trainer, while it saves.
        *[_trainer(f"Trainer.{name}", "") for name in ("_save", "_push_from_checkpoint")],
        _trainer("Trainer._rotate_checkpoints", "", until="5.2"),
        # DeepSpeed's engine.
        *[
            Row(
                f"{_ENGINE}.{name}",
                f".state.engine_hooks:{name}",
                relies_on,
                feature="training states of DeepSpeed's engine",
            )
            for name, relies_on in (
                ("save_checkpoint", "save_dir tag client_state save_latest exclude_frozen_parameters"),
                (
                    "load_checkpoint",
                    "load_dir tag load_module_strict load_optimizer_states load_lr_scheduler_states load_module_only "
                    "custom_load_fn",
                ),
            )
        ],
    ],
    PatchScope.LOAD: [
        Row(f"{_MODELING}:get_hf_quantizer", ".seams.loading:get_hf_quantizer", weight=_ESSENTIAL),
        Row(f"{_MODELING}:is_fsdp_enabled", ".seams.loading:is_fsdp_enabled", weight=_ESSENTIAL),
        Row(
            f"{_MODELING}:_get_resolved_checkpoint_files",
            ".seams.loading:get_resolved_checkpoint_files",
            weight=_ESSENTIAL,
        ),
        Row(f"{_MODELING}:get_checkpoint_shard_files", ".seams.loading:get_checkpoint_shard_files", weight=_ESSENTIAL),
        Row(f"{_MODELING}:load_state_dict", ".seams.loading:load_state_dict", weight=_ESSENTIAL),
        Row(f"{_MODEL}.get_init_context", ".seams.building:get_init_context", weight=_ESSENTIAL),
        Row(f"{_MODEL}._load_pretrained_model", ".seams.loading:load_pretrained_model", "load_config", _ESSENTIAL),
        Row(
            f"{_MODEL}._load_and_finalize_distributed_pretrained_model",
            ".seams.loading:load_distributed_checkpoint",
            feature="folders of save_pretrained(distributed_checkpoint=True)",
            since="5.20",
        ),
        # For each tensor of the checkpoint: its converter, its values.
        Row(f"{_LOADING}:deepcopy", ".seams.loading:copy_converter", weight=_SPEED),
        Row(f"{_LOADING}:WeightConverter.convert", ".seams.loading:convert", weight=_ESSENTIAL),
        # What the checkpoint lacks: from here on the lazy tensors have become the destination's.
        Row(f"{_MODEL}._finalize_model_loading", ".seams.loading:finalize_model_loading", weight=_ESSENTIAL),
        Row(f"{_MODEL}._initialize_weights", ".seams.loading:initialize_weights", weight=_ESSENTIAL),
        Row(
            f"{_MODELING}:_tied_params_are_equal",
            ".seams.loading:tied_params_are_equal",
            feature="tying anew",
            since="5.23",
        ),
        # Of these some are set, some called, for a load or a save.
        *[
            Row(of, "", weight=_ESSENTIAL)
            for of in (
                f"{_MODEL}._move_missing_keys_from_meta_to_device",
                f"{_MODEL}._adjust_missing_and_unexpected_keys",
                f"{_LOADING}:convert_and_load_state_dict_in_model",
                f"{_MODELING}:_add_variant",
                f"{_MODELING}:set_zero3_state",
                "transformers.integrations.deepspeed:_hf_deepspeed_config_weak_ref",
                "transformers.integrations.deepspeed:set_hf_deepspeed_config",
            )
        ],
    ],
    PatchScope.SHARDED: [
        Row(f"{_MODEL}.is_custom_code", ".seams.sharding:is_custom_code", feature="distributed_config", since="5.17"),
        Row(f"{_LOADING}:is_dtensor", ".seams.sharding:is_dtensor", feature="distributed_config", since="5.17"),
    ],
    PatchScope.HIDING: [
        Row(f"{_MODELING}:is_deepspeed_zero3_enabled", ".seams.ds_config:is_enabled", weight=_ESSENTIAL)
    ],
    PatchScope.LAYOUT: [
        Row(f"{_MODELING}:unwrap_model", ".seams.saving:unwrap_model", weight=_SPEED),
        Row(f"{_MODELING}:split_torch_state_dict_into_shards", ".seams.saving:split", weight=_ESSENTIAL),
        Row(f"{_MODELING}:safe_save_file", ".seams.saving:save_file", weight=_ESSENTIAL),
    ],
    PatchScope.DEFERRED: [
        Row(
            f"{_ACCELERATOR}:Accelerator.prepare_model",
            ".loading.deferral:prepare_model",
            weight=_ESSENTIAL,
            feature=_OF_FSDP2,
        ),
        Row(
            f"{_ACCELERATOR}:fsdp2_prepare_model",
            ".loading.deferral:prepare_fsdp2",
            weight=_ESSENTIAL,
            feature=_OF_FSDP2,
            since="1.6",
        ),
        Row(
            "accelerate.utils.fsdp_utils:fsdp2_load_full_state_dict",
            ".loading.deferral:load_full_state_dict",
            weight=_ESSENTIAL,
            feature=_OF_FSDP2,
            since="1.6",
        ),
        Row("torch.nn:Parameter.__setattr__", ".loading.deferral:set_attribute", weight=_ESSENTIAL, feature=_OF_FSDP2),
        *[
            Row(f"{wrapper}.__init__", ".loading.deferral:wrap", "module", weight=_ESSENTIAL, feature=_OF_FSDP2)
            for wrapper in (_DDP, _FSDP_1)
        ],
        Row(
            f"{_PARAM}.__init__",
            ".loading.deferral:make_record",
            weight=_ESSENTIAL,
            feature=_OF_FSDP2,
        ),
        Row(
            f"{_MODEL}.resize_token_embeddings",
            ".loading.deferral:resize_token_embeddings",
            weight=_ESSENTIAL,
            feature=_OF_FSDP2,
        ),
        *[
            Row(f"{_PARAM}.{name}", "", weight=_ESSENTIAL, feature="FSDP2")
            for name in ("init_dtype_attrs", "reset_sharded_param", "to_sharded_dtensor", "_init_sharded_param")
        ],
        Row("torch.distributed.fsdp:FSDPModule._get_fsdp_state", "", weight=_ESSENTIAL, feature="FSDP2"),
        *[
            Row(f"{_ENGINE}.{name}", f".loading.deferral:{leads_to}", "model", weight=_ESSENTIAL, feature="AutoTP")
            for name, leads_to in (
                ("_apply_autotp_partitioning", "apply_partitioning"),
                ("_configure_distributed_model", "configure_model"),
            )
        ],
    ],
    # Edits between two steps of an optimizer. PEFT's are seen by the rows for models; what one object can be told is
    # set on that object (`Steps.editors`).
    PatchScope.SNAPSHOT: [
        Row(
            f"{_ZERO}.partition_parameters:GatheredParameters.__init__",
            ".holdings.steps:gather",
            "params modifier_rank",
            feature=_EDITS,
        ),
        Row("torch.nn:Module.load_state_dict", ".holdings.steps:load_values", feature=_EDITS),
    ],
    PatchScope.WHOLE: [
        Row(
            f"{_ZERO}.parameter_offload:DeepSpeedZeRoOffload._convert_to_zero_parameters",
            ".loading.whole:partition",
            "ds_config module",
            feature="warnings of configs that come after the load",
        ),
    ],
    PatchScope.CALLED: [
        Row(f"deepspeed.{owner}.{name}", "", weight=_ESSENTIAL, feature=feature)
        for feature, owner, names in (
            (
                "ZeRO-3",
                "runtime.zero.partition_parameters:Init",
                "_convert_to_deepspeed_param _convert_to_zero_parameters _aligned_size _partition_param",
            ),
            (
                "load_into under ZeRO-3",
                "runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3",
                "_swappable_optimizer_subgroup get_param_id",
            ),
        )
        for name in names.split()
    ],
}


TABLE: Mapping[PatchScope, Sequence[Row]] = {
    scope: [row for table in (OURS, *(plugin.rows for plugin in plugins())) for row in table.get(scope, ())]
    for scope in dict.fromkeys([*OURS, *(scope for plugin in plugins() for scope in plugin.rows)])
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


def refuse_lacking(feature: str) -> None:
    """Raise a VersionError if an installed version lacks what a feature needs that stock would do wrongly."""
    of_feature = [row for rows in TABLE.values() for row in rows if row.feature == feature]
    if lacking := [what for row in of_feature if (what := row.lacking())]:
        refuse_unknown_version(of_feature[0].package, lacking, feature)


def refuse_unsafe_partitions() -> None:
    """Raise a VersionError if an installed version lacks what keeps it from taking empty partitions for weights."""
    for rows in TABLE.values():
        for row in rows:
            if row.weight is Weight.PARTITIONS and (what := row.lacking()):
                refuse_unknown_version(row.package, [what], row.feature)
