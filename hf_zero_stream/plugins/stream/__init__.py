"""Weights of a sharded training for those who use them beside it, again and again; no files.

:mod:`.wire`, :mod:`.receiver`, :mod:`.reads` and ``vllm_*`` run in the engine, and import torch and vLLM alone.
"""

from __future__ import annotations

from ...plugin_api import PatchScope, Plugin, Severity, rows


PLUGIN = Plugin(
    "stream",
    rows={
        PatchScope.BLOCK: [
            # TRL: what gives weights to vLLM, and what that calls.
            *rows(
                """
                vllm_generation:VLLMGeneration.sync_weights       trl:sync_weights       >=1.11
                vllm_generation:VLLMGeneration._iter_named_params                        >=1.11
                vllm_client:VLLMClient.update_named_params        metadata named_params  >=1.11
                """,
                "trl.generation.",
                f"{__name__}.",
                feature="weights for vLLM by TRL",
            ),
            *rows(
                """
                _iter_vllm_named_params                trl:iter_named_params    >=1.16
                AsyncGRPOTrainer._sync_weight_merged   trl:sync_weight_merged   >=1.16
                AsyncGRPOTrainer._streaming_iter                                >=1.16
                """,
                "trl.experimental.async_grpo.async_grpo_trainer:",
                f"{__name__}.",
                feature="weights for vLLM by TRL's AsyncGRPO",
                severity=Severity.PARTITIONS,
            ),
            *rows(
                """
                _move_model_to_vllm        trl:move_model_to_vllm  >=1.16
                _move_model_to_vllm_inner                          >=1.16
                """,
                "trl.experimental.online_dpo.online_dpo_trainer:OnlineDPOTrainer.",
                f"{__name__}.",
                feature="weights for vLLM by TRL's online DPO",
            ),
            # OpenRLHF and verl: the same, and what of verl's gives tensors their names.
            *rows(
                "ActorPPOTrainer.broadcast_to_vllm openrlhf:broadcast_to_vllm >=0.11",
                "openrlhf.trainer.ray.ppo_actor:",
                f"{__name__}.",
                feature="weights for vLLM by OpenRLHF",
            ),
            *rows(
                """
                FSDPEngine.get_per_tensor_param  verl:get_per_tensor_param  >=0.9
                normalize_peft_param_name        params                     >=0.9
                convert_weight_keys              state_dict model           >=0.9
                unfuse_moe_params                weights model_type         >=0.9
                """,
                "verl.workers.engine.fsdp.transformer_impl:",
                f"{__name__}.",
                feature="weights for engines by verl's FSDP2",
            ),
        ],
    },
)
