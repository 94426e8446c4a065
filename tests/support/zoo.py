"""Tiny checkpoints of real model classes, in the layout their hub repositories have.

Sizes are odd on purpose: many parameters' numel is divisible by neither 2, 3 nor 4, so ZeRO pads their partitions.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel


Checkpoint = Callable[..., Path]
"""The fixture `zoo_checkpoint`."""

VOCAB = 311
TEXT = dict(
    vocab_size=VOCAB,
    hidden_size=35,
    num_hidden_layers=2,
    num_attention_heads=5,
    num_key_value_heads=1,
    head_dim=14,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    # The default, grouped matrix products, wants rows of a multiple of 16 bytes.
    experts_implementation="eager",
)
QWEN_EXPERTS = dict(intermediate_size=55, moe_intermediate_size=17, num_experts=5, num_experts_per_tok=2)
QWEN3_VL_TRANSPOSED = (".experts.gate_up_proj", ".experts.down_proj")


@dataclass(frozen=True)
class Recipe:
    """How to build one model of the zoo and what to feed it."""

    name: str
    build: Callable[[], PreTrainedModel]
    auto_class: str
    inputs: Callable[[], dict[str, Tensor]]
    transposed: tuple[str, ...] = ()
    """Ends of the keys that the hub's layout has transposed, although `save_pretrained` does not."""


def _text_inputs() -> dict[str, Tensor]:
    tokens = torch.randint(5, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens.clone()}


def _sequence_to_sequence_inputs() -> dict[str, Tensor]:
    inputs = _text_inputs()
    return {**inputs, "labels": inputs["labels"][:, :5].clone()}


def _image_inputs() -> dict[str, Tensor]:
    """One 4x4 grid of patches, merged 2x2 into four image tokens, in front of the text."""
    vision = _qwen3_vl_moe_config().vision_config
    inputs = _text_inputs()
    tokens = inputs["input_ids"][:1]
    tokens[0, :6] = torch.tensor([4, 3, 3, 3, 3, 5])
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "mm_token_type_ids": (tokens == 3).long(),
        "pixel_values": torch.randn(16, width, generator=torch.Generator().manual_seed(2)),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "labels": tokens.clone(),
    }


def _qwen3_moe() -> PreTrainedModel:
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**TEXT, **QWEN_EXPERTS))


def _mixtral() -> PreTrainedModel:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**TEXT, intermediate_size=29, num_local_experts=5, num_experts_per_tok=2)
    )


def _deepseek_v3() -> PreTrainedModel:
    """One dense layer, one of experts; latent attention."""
    text = {key: value for key, value in TEXT.items() if key not in ("head_dim", "num_key_value_heads")}
    config = transformers.DeepseekV3Config(
        **text,
        intermediate_size=55,
        moe_intermediate_size=17,
        num_key_value_heads=5,
        n_routed_experts=6,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=13,
        kv_lora_rank=11,
        qk_nope_head_dim=10,
        qk_rope_head_dim=6,
        v_head_dim=9,
        num_mtp_layers=0,
    )
    return transformers.DeepseekV3ForCausalLM(config)


def _gpt_oss() -> PreTrainedModel:
    return transformers.GptOssForCausalLM(
        transformers.GptOssConfig(**TEXT, intermediate_size=23, num_local_experts=5, num_experts_per_tok=2)
    )


def _llama4() -> PreTrainedModel:
    """One dense layer, one of experts."""
    config = transformers.Llama4TextConfig(
        **TEXT,
        intermediate_size=23,
        intermediate_size_mlp=49,
        num_local_experts=5,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
    )
    return transformers.Llama4ForCausalLM(config)


def _olmoe() -> PreTrainedModel:
    """Its width is heads times head size, hence even: nothing to pad at world size 2."""
    text = {**TEXT, "hidden_size": 70, "num_key_value_heads": 5}
    del text["head_dim"]
    return transformers.OlmoeForCausalLM(
        transformers.OlmoeConfig(**text, intermediate_size=19, num_experts=5, num_experts_per_tok=2)
    )


def _qwen3_vl_moe_config() -> transformers.PreTrainedConfig:
    text = dict(**TEXT, **QWEN_EXPERTS, rope_parameters=_multimodal_rope(), tie_word_embeddings=False)
    vision = dict(
        depth=2,
        hidden_size=36,
        intermediate_size=45,
        num_heads=3,
        patch_size=4,
        temporal_patch_size=2,
        spatial_merge_size=2,
        out_hidden_size=35,
        num_position_embeddings=25,
        deepstack_visual_indexes=[0],
    )
    return transformers.Qwen3VLMoeConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=3,
        vision_start_token_id=4,
        vision_end_token_id=5,
        video_token_id=6,
    )


def _multimodal_rope() -> dict[str, object]:
    return {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 2, 2], "mrope_interleaved": True}


def _qwen3_vl_moe() -> PreTrainedModel:
    return transformers.Qwen3VLMoeForConditionalGeneration(_qwen3_vl_moe_config())


def _llama() -> PreTrainedModel:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**TEXT, intermediate_size=85, tie_word_embeddings=False)
    )


def _qwen3() -> PreTrainedModel:
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**TEXT, intermediate_size=85, tie_word_embeddings=True)
    )


def _t5() -> PreTrainedModel:
    config = transformers.T5Config(
        vocab_size=VOCAB,
        d_model=35,
        d_kv=13,
        d_ff=55,
        num_layers=2,
        num_heads=3,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
        dropout_rate=0.0,
    )
    return transformers.T5ForConditionalGeneration(config)


def _bert() -> PreTrainedModel:
    config = transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=35,
        num_hidden_layers=2,
        num_attention_heads=5,
        intermediate_size=85,
        max_position_embeddings=35,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(config)


_RECIPES = [
    Recipe("qwen3_moe", _qwen3_moe, "AutoModelForCausalLM", _text_inputs),
    Recipe("mixtral", _mixtral, "AutoModelForCausalLM", _text_inputs),
    Recipe("deepseek_v3", _deepseek_v3, "AutoModelForCausalLM", _text_inputs),
    Recipe("gpt_oss", _gpt_oss, "AutoModelForCausalLM", _text_inputs),
    Recipe("llama4", _llama4, "AutoModelForCausalLM", _text_inputs),
    Recipe("olmoe", _olmoe, "AutoModelForCausalLM", _text_inputs),
    Recipe("qwen3_vl_moe", _qwen3_vl_moe, "AutoModelForImageTextToText", _image_inputs, QWEN3_VL_TRANSPOSED),
    Recipe("qwen3_vl_moe_v5", _qwen3_vl_moe, "AutoModelForImageTextToText", _image_inputs),
    Recipe("llama", _llama, "AutoModelForCausalLM", _text_inputs),
    Recipe("qwen3", _qwen3, "AutoModelForCausalLM", _text_inputs),
    Recipe("t5", _t5, "AutoModelForSeq2SeqLM", _sequence_to_sequence_inputs),
    Recipe("bert", _bert, "AutoModelForMaskedLM", _text_inputs),
]
ZOO: dict[str, Recipe] = {recipe.name: recipe for recipe in _RECIPES}


def build_model(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model that `make_checkpoint` saves: the same values on every call.

    Every floating-point parameter and saved buffer gets noise on top of its initial value, norms and biases too,
    so that no two stretches of bytes are alike.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ZOO[name].build()
        saved = model.state_dict(keep_vars=True)
        with torch.no_grad():
            for tensor in {id(tensor): tensor for tensor in saved.values()}.values():
                if tensor.is_floating_point():
                    tensor.add_(torch.randn_like(tensor), alpha=0.05)
        full_precision = {
            key: tensor.detach().clone()
            for key, tensor in saved.items()
            if any(part in key for part in model._keep_in_fp32_modules_strict or ())
        }
    # As in the hub's files, what must stay in fp32 does, whatever the rest is.
    model.to(dtype)
    for key, tensor in full_precision.items():
        module_name, _, name = key.rpartition(".")
        getattr(model.get_submodule(module_name), name).data = tensor
    return model


def make_checkpoint(
    name: str, folder: str | Path, dtype: torch.dtype = torch.float32, max_shard_size: int | str = "200KB"
) -> Path:
    """Save a zoo model in shards of at most `max_shard_size`, and at least two of them; returns the folder."""
    folder = Path(folder)
    model = build_model(name, dtype)
    total_bytes = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
    limit_bytes = min(_bytes(max_shard_size), total_bytes * 2 // 3)
    model.save_pretrained(folder, max_shard_size=limit_bytes)
    _transpose(folder, ZOO[name].transposed)
    # `save_pretrained` drops the choice of experts implementation, `from_pretrained` honours it.
    config = json.loads((folder / "config.json").read_text())
    for part in (config, config.get("text_config", {})):
        part["experts_implementation"] = "eager"
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder


def _transpose(folder: Path, endings: tuple[str, ...]) -> None:
    """Rewrite the shards with the last two dimensions of some tensors exchanged."""
    for path in folder.glob("*.safetensors") if endings else ():
        tensors = load_file(path)
        tensors |= {key: tensors[key].mT.contiguous() for key in tensors if key.endswith(endings)}
        save_file(tensors, path, metadata={"format": "pt"})


def _bytes(size: int | str) -> int:
    if isinstance(size, int):
        return size
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
    return int(float(size[:-2]) * units[size[-2:].upper()])
