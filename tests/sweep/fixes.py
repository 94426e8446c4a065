"""Config values that shrinking by names cannot guess, by model type."""

from typing import Any


def _rope(mrope_section: list[int] | None = None) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}
    return rope if mrope_section is None else {**rope, "mrope_section": mrope_section}


_TIME_SERIES = {"prediction_length": 4, "context_length": 8}
_HUNYUAN = {"head_dim": 16}
_COMPASS = {"rope_parameters": {"full_attention": _rope()}}
_DENSE_AND_SPARSE = {"num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"]}
_DIFFUSION_GEMMA = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 9}
# Sliding layers have widths of their own, which the config keeps by layer, where shrinking does not look.
_DOTS3 = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 16,
    "swa_qk_nope_head_dim": 12,
    "swa_v_head_dim": 8,
}
# The experts of each layer, -1 for a dense one: an older spelling, of which the config makes what it keeps by layer.
_DOTS3_VISION = {"num_hidden_layers": 3, "pyramid_num_routed": [-1, 2, 4]}
_ERNIE = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "rope_parameters": _rope([1, 1, 2])}
# A layer of each kind with keys and values of its own, then one of each kind that takes them from those. An assistant
# has only the second sort by default, but of those alone transformers 5.23 makes no model: see kv_sharing_modes.
_SHARED_KV = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_GEMMA3N = {**_SHARED_KV, "intermediate_size": 65}  # by default one for each of its 35 layers
# Of a vocabulary the last parts are the codes of images, then those of sounds.
_APERTUS = {
    **{"image_token_id": 10, "audio_token_id": 11, "image_token_offset": 20, "audio_token_offset": 36},
    "vision_config": {"codebook_size": 16, "base_channels": 32},
    "audio_config": {"codebook_size": 16},
}
_DORY = {
    **{"num_hidden_layers": 3, "n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1},
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_HY_V4 = {"qk_rope_head_dim": 8, "rope_parameters": _rope([2, 1, 1])}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": "auto"}
_ATOMS = {
    "hidden_size": 16,
    "output_dim": 12,
    "num_attention_heads": 2,
    "head_dim": 8,
    "num_spatial_rope_pairs_per_axis": 1,
    "num_uid_rope_pairs": 1,
}
# The kernel, stride and padding of each convolution, which have no defaults.
_OCR_BLOCKS = {
    "neck_out_channels": 16,
    "intraclass_block_config": {
        "reduce_channel": [1, 1, 0],
        "return_channel": [1, 1, 0],
        **{
            f"{name}_{ratio}": [kernel, 1, [side // 2 for side in kernel]]
            for ratio, size in (("longratio", 7), ("midratio", 5), ("shortratio", 3))
            for name, kernel in (
                ("vertical_long_to_small_conv", [size, 1]),
                ("horizontal_small_to_long_conv", [1, size]),
                ("symmetric_conv_long", [size, size]),
            )
        },
    },
    "kernel_list": [3, 2, 2],
}
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
_SWIN = {
    "model_type": "swin",
    "embed_dim": 12,
    "depths": [1, 1, 1, 1],
    "num_heads": [1, 1, 2, 2],
    "out_indices": [2, 3, 4],
}
# The default backbones of the types below come from timm.
_DETR = {"use_timm_backbone": False, "backbone": None, "use_pretrained_backbone": False, "backbone_config": _RESNET}

BASES: dict[str, dict[str, Any]] = {
    "conditional_detr": _DETR,
    "dab-detr": _DETR,
    "deformable_detr": _DETR,
    "detr": _DETR,
    "gemma4_assistant": {
        "text_config": {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    },
    "omdet-turbo": {"use_timm_backbone": False, "backbone_config": _SWIN},
    "table-transformer": _DETR,
}
"""Model type -> arguments without which its default config, the one that is shrunk, cannot be made."""

FIXES: dict[str, dict[str, Any]] = {
    "apertus1p5": _APERTUS,
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
    "dory": _DORY,
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": {"text_config": _DOTS3, "vision_config": _DOTS3_VISION},
    "dots3_note_text": _DOTS3,
    "dots3_note_vision_encoder": _DOTS3_VISION,
    "emu3": {"vocabulary_map": {"<image>": 10}, "vq_config": {"base_channels": 32}},
    "ernie4_5_vl_moe": {"text_config": _ERNIE},
    "ernie4_5_vl_moe_text": _ERNIE,
    "esm": {"vocab_size": 33, "pad_token_id": 1},
    "esmfold2": {
        "single_inputs_size": _ATOMS["output_dim"] + 2 * 33 + 1,  # two residue types of 33 and the profile
        "atom_encoder": _ATOMS,
        "structure_head": {"diffusion_module": {"atom_encoder": {**_ATOMS, "output_dim": 24}}},
    },
    "gemma3n": {"text_config": _GEMMA3N},
    "gemma3n_text": _GEMMA3N,
    "gemma4_unified_assistant": {"text_config": _SHARED_KV},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "granite4_vision": {
        "downsample_rate": "4/8",
        "deepstack_layer_map": [[0, 1]],
        "spatial_target_layers": [0, 1],
        "vision_config": {"hidden_size": 64, "num_attention_heads": 4},  # the Q-Former gets a head for every 64
    },
    "granitemoehybrid": _MAMBA,
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_v1_moe": _HUNYUAN,
    "hunyuan_vl": {"text_config": _HUNYUAN},
    "hunyuan_vl_text": _HUNYUAN,
    "hy_v4_vl": {"text_config": _HY_V4},
    "hy_v4_vl_text": _HY_V4,
    "informer": _TIME_SERIES,
    "janus": {"vq_config": {"base_channels": 32}},
    "lfm2_moe": {"num_hidden_layers": 2, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "ministral": {"head_dim": 4},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "moonshine_streaming": {"num_key_value_heads": 2},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "perceiver": {"num_self_attends_per_block": 2, "d_latents": 40},
    "pix2struct_text_model": {"initializer_range": 0.02},
    "pp_ocrv5_server_det": _OCR_BLOCKS,
    "pp_ocrv6_medium_det": _OCR_BLOCKS,
    "qwen3_omni_moe": {
        # The talker reads the merge size off its config, whose class has no such field.
        "talker_config": {"text_config": {"shared_expert_intermediate_size": 9}, "spatial_merge_size": 2}
    },
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 9},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "swin2sr": {"embed_dim": 12, "num_heads": [2] * 6, "depths": [1] * 6},
    # Of the parts of a T5Gemma 2 the whole sets the dropout; by themselves they have none.
    "t5gemma2_decoder": {"dropout_rate": 0.0},
    "t5gemma2_encoder": {"text_config": {"dropout_rate": 0.0}},
    "t5gemma2_text": {"dropout_rate": 0.0},
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

FILES: dict[str, dict[str, Any]] = {"qwen2_5_omni": {"spk_dict.pt": {}}}
"""Model type -> pickled files that loading wants beside the checkpoint."""

NO_LOADING_INFO = {"JevForDecision", "Qwen2_5OmniForConditionalGeneration"}
"""Classes whose own ``from_pretrained`` fails when asked for the loading info."""

UNBUILT: dict[str, str] = {
    "gemma4_assistant": "a part of another model, whose cache it uses",
    "inkling_audio": "a plain load of it fails in transformers itself",
}
"""Model type -> why no tiny model of it can be made, besides packages that are absent and configs of no model."""

EXPECTED_REASONS = ("needs a package", "no model class takes its config")
"""How the reasons begin that any type may have."""
