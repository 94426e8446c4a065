"""Weights of a sharded training for those who use them beside it, again and again; no files.

:mod:`.wire`, :mod:`.receiver`, :mod:`.reads` and ``vllm_*`` run in the engine, and import torch and vLLM alone.
"""

from __future__ import annotations

from ...plugin_api import PatchScope, Plugin, Row, Weight


_ONLINE_DPO = "trl.experimental.online_dpo.online_dpo_trainer:OnlineDPOTrainer"
_OPENRLHF, _VERL = "openrlhf.trainer.ray.ppo_actor", "verl.workers.engine.fsdp.transformer_impl"
_ASYNC_GRPO = "trl.experimental.async_grpo.async_grpo_trainer"

PLUGIN = Plugin(
    "stream",
    rows={
        PatchScope.BLOCK: [
            # TRL: what gives weights to vLLM, and what that calls.
            *[
                Row(f"trl.generation.{name}", leads_to, relies_on, feature="weights for vLLM by TRL", since="1.11")
                for name, leads_to, relies_on in (
                    ("vllm_generation:VLLMGeneration.sync_weights", f"{__name__}.trl:sync_weights", ""),
                    ("vllm_generation:VLLMGeneration._iter_named_params", "", ""),
                    ("vllm_client:VLLMClient.update_named_params", "", "metadata named_params"),
                )
            ],
            *[
                Row(
                    f"{_ASYNC_GRPO}:{name}",
                    leads_to,
                    weight=Weight.PARTITIONS,
                    feature="weights for vLLM by TRL's AsyncGRPO",
                    since="1.16",
                )
                for name, leads_to in (
                    ("_iter_vllm_named_params", f"{__name__}.trl:iter_named_params"),
                    ("AsyncGRPOTrainer._sync_weight_merged", f"{__name__}.trl:sync_weight_merged"),
                    ("AsyncGRPOTrainer._streaming_iter", ""),
                )
            ],
            *[
                Row(f"{_ONLINE_DPO}.{name}", leads_to, feature="weights for vLLM by TRL's online DPO", since="1.16")
                for name, leads_to in (
                    ("_move_model_to_vllm", f"{__name__}.trl:move_model_to_vllm"),
                    ("_move_model_to_vllm_inner", ""),
                )
            ],
            # OpenRLHF and verl: the same, and what of verl's gives tensors their names.
            Row(
                f"{_OPENRLHF}:ActorPPOTrainer.broadcast_to_vllm",
                f"{__name__}.openrlhf:broadcast_to_vllm",
                feature="weights for vLLM by OpenRLHF",
                since="0.11",
            ),
            *[
                Row(f"{_VERL}:{name}", leads_to, relies_on, feature="weights for engines by verl's FSDP2", since="0.9")
                for name, leads_to, relies_on in (
                    ("FSDPEngine.get_per_tensor_param", f"{__name__}.verl:get_per_tensor_param", ""),
                    ("normalize_peft_param_name", "", "params"),
                    ("convert_weight_keys", "", "state_dict model"),
                    ("unfuse_moe_params", "", "weights model_type"),
                )
            ],
        ],
    },
)
