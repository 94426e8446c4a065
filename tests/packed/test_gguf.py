"""GGUF files under ZeRO-3: dequantised and partitioned where asked for, else left to stock with a reason."""

import re
from collections.abc import Mapping
from pathlib import Path

import gguf
import pytest
import torch
import transformers

from tests.support.cluster import run_ranks
from tests.support.loading import load_with
from tests.support.parity import load_and_compare


Q8 = gguf.GGMLQuantizationType.Q8_0

# The names of a GGUF file for those of transformers.
LFM2 = {
    "model.embed_tokens.": "token_embd.",
    "model.embedding_norm.": "token_embd_norm.",
    "model.layers.": "blk.",
    ".operator_norm.": ".attn_norm.",
    ".self_attn.q_proj.": ".attn_q.",
    ".self_attn.k_proj.": ".attn_k.",
    ".self_attn.v_proj.": ".attn_v.",
    ".self_attn.out_proj.": ".attn_output.",
    ".self_attn.q_layernorm.": ".attn_q_norm.",
    ".self_attn.k_layernorm.": ".attn_k_norm.",
    ".feed_forward.w1.": ".ffn_gate.",
    ".feed_forward.w3.": ".ffn_up.",
    ".feed_forward.w2.": ".ffn_down.",
    ".conv.conv.": ".shortconv.conv.",
    ".conv.in_proj.": ".shortconv.in_proj.",
    ".conv.out_proj.": ".shortconv.out_proj.",
}
LLAMA = {
    "lm_head.": "output.",
    "model.embed_tokens.": "token_embd.",
    "model.norm.": "output_norm.",
    "model.layers.": "blk.",
    ".input_layernorm.": ".attn_norm.",
    ".post_attention_layernorm.": ".ffn_norm.",
    ".self_attn.q_proj.": ".attn_q.",
    ".self_attn.k_proj.": ".attn_k.",
    ".self_attn.v_proj.": ".attn_v.",
    ".self_attn.o_proj.": ".attn_output.",
    ".mlp.gate_proj.": ".ffn_gate.",
    ".mlp.up_proj.": ".ffn_up.",
    ".mlp.down_proj.": ".ffn_down.",
}
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def write(path: Path, architecture: str, model: transformers.PreTrainedModel, names: Mapping[str, str]) -> None:
    """Matrices in Q8_0 (blocks of 32 values in 34 bytes), the rest in fp32."""
    config = model.config
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_token_list([str(token) for token in range(config.vocab_size)])
    writer.add_vocab_size(config.vocab_size)
    if architecture == "lfm2":
        writer.add_head_count_kv([config.num_key_value_heads * (kind != "conv") for kind in config.layer_types])
        writer.add_shortconv_l_cache(config.conv_L_cache)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        assert not re.match(r"model|lm_head", name), name
        values = tensor.squeeze().numpy()
        if values.ndim == 2 and "shortconv.conv" not in name:
            writer.add_tensor(name, gguf.quantize(values, Q8), raw_dtype=Q8)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_lfm2(path: Path) -> None:
    config = transformers.Lfm2Config(
        **SIZES, num_hidden_layers=2, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False
    )
    write(path, "lfm2", transformers.Lfm2ForCausalLM(config), LFM2)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    torch.manual_seed(0)
    write_lfm2(folder / "lfm2.gguf")
    llama = transformers.LlamaConfig(**SIZES, num_hidden_layers=2)
    write(folder / "llama.gguf", "llama", transformers.LlamaForCausalLM(llama), LLAMA)
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["lfm2.gguf", "llama.gguf"])
def test_dequantised_as_plain(cluster: None, files: Path, name: str, dtype: torch.dtype) -> None:
    """lfm2's blocks are dequantised piece by piece; llama's file transformers itself dequantises, before us."""
    kwargs = {"gguf_file": name, "quantization_config": transformers.GgufConfig(dequantize=True)}
    for result in run_ranks(3, load_and_compare, "AutoModelForCausalLM", files, dtype, dtype, kwargs):
        assert result["differences"] == []
        assert result["info"] == result["plain_info"]
        assert [rank["materialised"] for rank in result["report"]["ranks"]] == [{}] * 3


def load_packed(folder: Path) -> tuple[bool, bool]:
    """Whether the model streams, and whether it is partitioned."""
    model = load_with("streamed", "AutoModelForCausalLM", folder, {}, {"gguf_file": "llama.gguf"})
    return hasattr(model, "streaming_report"), any(hasattr(param, "ds_tensor") for param in model.parameters())


def test_without_dequantize_it_is_left_to_stock(cluster: None, files: Path) -> None:
    assert run_ranks(2, load_packed, files) == [(False, False)] * 2
