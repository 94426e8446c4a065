"""Config values that shrinking by names cannot guess, by model type."""

from __future__ import annotations

from typing import Any


def _rope(mrope_section: list[int] | None = None) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}
    return rope if mrope_section is None else {**rope, "mrope_section": mrope_section}


_TIME_SERIES = {"prediction_length": 4, "context_length": 8}
_HUNYUAN = {"head_dim": 16}
_COMPASS = {"rope_parameters": {"full_attention": _rope()}}
_DENSE_AND_SPARSE = {"num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"]}
_DIFFUSION_GEMMA = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 9}
_ERNIE = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rope_parameters": _rope([1, 1, 2]),
}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": "auto"}
_QWEN4 = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
}
_COSMOS = {"head_dim": 8, "rope_parameters": _rope([2, 1, 1])}

_RESNET = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 8, 12, 12],
    "depths": [1, 1, 1, 1],
    "out_features": ["stage2", "stage3", "stage4"],
}
# Their default backbones come from timm.
_DETR = {"use_timm_backbone": False, "backbone": None, "use_pretrained_backbone": False, "backbone_config": _RESNET}

BASES: dict[str, dict[str, Any]] = {
    "conditional_detr": _DETR,
    "dab-detr": _DETR,
    "deformable_detr": _DETR,
    "detr": _DETR,
    "gemma4_assistant": {
        "text_config": {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    },
    "table-transformer": _DETR,
}
"""Model type -> arguments without which its default config, the one that is shrunk, cannot be made."""

FIXES: dict[str, dict[str, Any]] = {
    "arcee": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "autoformer": _TIME_SERIES,
    "bamba": _MAMBA,
    "chameleon": {"vocabulary_map": {"<image>": 10, "IMGIMGA": 11, "IMGIMGB": 12}, "vq_config": {"base_channels": 32}},
    "chameleon_vqgan": {"base_channels": 32},
    "cohere_compass": {"text_config": _COMPASS},
    "cohere_compass_text": _COMPASS,
    "cosmos3_edge": {"text_config": _COSMOS},
    "cosmos3_edge_text": _COSMOS,
    "cvt": {"depth": [1, 2, 3]},
    "dbrx": {"attn_config": {"rope_theta": 10_000.0}},
    "deepseek_ocr2": {"text_config": _DENSE_AND_SPARSE},
    "deepseek_ocr2_text": _DENSE_AND_SPARSE,
    "depth_pro": {"scaled_images_feature_dims": (16, 16, 8)},
    "diffusion_gemma": {"text_config": _DIFFUSION_GEMMA},
    "diffusion_gemma_text": _DIFFUSION_GEMMA,
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "emu3": {"vocabulary_map": {"<image>": 10}, "vq_config": {"base_channels": 32}},
    "ernie4_5_vl_moe": {"text_config": _ERNIE},
    "ernie4_5_vl_moe_text": _ERNIE,
    "esm": {"vocab_size": 33, "pad_token_id": 1},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "granite4_vision": {"deepstack_layer_map": [[0, 1]], "spatial_target_layers": [0, 1]},
    "granitemoehybrid": _MAMBA,
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_v1_moe": _HUNYUAN,
    "hunyuan_vl": {"text_config": _HUNYUAN},
    "hunyuan_vl_text": _HUNYUAN,
    "informer": _TIME_SERIES,
    "janus": {"vq_config": {"base_channels": 32}},
    "lfm2_moe": {"num_hidden_layers": 2, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "ministral": {"head_dim": 4},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "moonshine_streaming": {"num_key_value_heads": 2},
    "nemotron": {"num_key_value_heads": 2},
    "qwen3_omni_moe": {"talker_config": {"text_config": {"shared_expert_intermediate_size": 9}}},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 9},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "swin2sr": {"embed_dim": 12, "num_heads": [2] * 6, "depths": [1] * 6},
    "time_series_transformer": _TIME_SERIES,
    "vitmatte": {"fusion_hidden_sizes": [8, 8, 4, 4]},
    "zamba": {"num_hidden_layers": 14},
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "hybrid_layer_ids": [1, 3],
        "num_mem_blocks": 1,
    },
}
"""Model type -> arguments of its config on top of the shrunk ones, sub-configs as dicts."""

FILES: dict[str, dict[str, Any]] = {
    "qwen2_5_omni": {"spk_dict.pt": {}},
}
"""Model type -> pickled files that loading wants beside the checkpoint."""

NO_LOADING_INFO = {"JevForDecision", "Qwen2_5OmniForConditionalGeneration"}
"""Classes whose own ``from_pretrained`` fails when asked for the loading info."""
