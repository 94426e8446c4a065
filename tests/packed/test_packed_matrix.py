"""Training beside packed weights, and GGUF files.

- Training beside packed weights gives the losses of the dequantised model: every format, dense and a mixture. Losses
  of three steps, alone, with hpZ, and with `offload_param` to the CPU: those of the dequantised model under ZeRO-3,
  bit for bit, in bf16 and fp32; in fp32 those of one process without DeepSpeed to 3e-7. That process clips gradients
  at 1.0, as DeepSpeed does where `gradient_clipping` is not set; without that, losses of MXFP4 differ by 4e-5.
- What becomes of quantised checkpoints if a release renames a function that we replace, or no longer calls it.
- GGUF files under ZeRO-3: dequantised and partitioned where asked for, else left to stock with a reason.
"""

import re
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import torch.distributed as dist
import transformers

import hf_zero_stream
from hf_zero_stream.bindings.table import TABLE
from hf_zero_stream.holdings.introspection import is_streamed, packed_weights
from hf_zero_stream.registry import PatchScope
from tests.packed.test_dequantised import load as load_dequantised
from tests.packed.test_packed_peft import losses_of_kinds
from tests.support.checkpoint_files import differing
from tests.support.cluster import run_ranks
from tests.support.messages import outcome_of
from tests.support.mutations import MUTATIONS, Mutation, mutated, mutation_of, mutations
from tests.support.packed_training import (
    adapter_engine,
    count_alive,
    inputs,
    load,
    one_module_at_a_time,
    packed_names,
    plain_losses,
    trained,
    watched_memory,
    with_adapters,
)
from tests.support.parity import compare, ds_config, load_with, whole_values
from tests.support.quantised_checkpoints import MODELS, Folders, compressed_tensors, in_file


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory)


def losses(folder: Path, homes_in_fp32: Container[str]) -> dict[str, Any]:
    world_size = dist.get_world_size()
    homes: dict[str, dict[str, Any]] = {
        "alone": {},
        "hpZ": {"zero_hpz_partition_size": 2 if world_size % 2 == 0 else world_size},
        "offload": {"offload_param": {"device": "cpu"}},
    }
    found: dict[str, Any] = {}
    for dtype in (torch.bfloat16, torch.float32):
        _, dequantised = trained(folder, ds_config(dtype), False)
        found[str(dtype)] = {"dequantised": dequantised}
        for home, zero in homes.items():
            if dtype == torch.float32 and home not in homes_in_fp32:
                continue
            engine, found[str(dtype)][home] = trained(folder, ds_config(dtype, **zero), True)
    found["names"] = packed_names(engine.module)
    return found


HOMES = ("alone", "hpZ", "offload")


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_losses(cluster: None, folders: Folders, name: str, world_size: int) -> None:
    """Bit for bit those of the dequantised model under ZeRO-3; in fp32 also those of one process without it."""
    (plain,) = run_ranks(1, plain_losses, folders(name), torch.float32)
    for found in run_ranks(world_size, losses, folders(name), HOMES, timeout=600):
        bf16, fp32 = found["torch.bfloat16"], found["torch.float32"]
        assert bf16["alone"] == bf16["hpZ"] == bf16["offload"] == bf16["dequantised"]
        assert all(fp32[home] == fp32["dequantised"] for home in HOMES)
        assert fp32["alone"] == pytest.approx(plain, rel=3e-7)  # an ulp of DeepSpeed's Adam grows
        assert len(set(bf16["alone"])) == len(set(fp32["alone"])) == 3, "three steps must change the loss"
        assert any("experts.down_proj" in each for each in found["names"]) == name.endswith("mixture")


@pytest.mark.slow
def test_losses_of_nodes(cluster: None, folders: Folders) -> None:
    """hpZ in two nodes of two ranks."""
    for found in run_ranks(4, losses, folders("FP8 by blocks, mixture"), HOMES, timeout=600):
        bf16 = found["torch.bfloat16"]
        assert bf16["alone"] == bf16["hpZ"] == bf16["offload"] == bf16["dequantised"]


# ------------------------------------------------------------------------------------------------------- memory


PADDING = 4
"""Bytes by which gathered parameters of a module are longer than what is packed."""


def memory(folder: Path) -> dict[str, Any]:
    from deepspeed.utils import z3_leaf_module

    config = one_module_at_a_time()
    base = load(folder, config)
    report = base.streaming_report.to_dict()["ranks"]
    engine = adapter_engine(with_adapters(base), config)
    alive_after_forward = []
    of_modules = (packed_weights(module).values() for module in base.modules())
    largest = max(sum(weight.row_bytes * len(weight.rows) for weight in each) for each in of_modules)
    with watched_memory(most=largest + PADDING) as seen:

        def look(module: Any, *_: Any) -> None:
            alive_after_forward.append(count_alive(seen["gathered"]))

        inside: set[Any] = set()
        for module in engine.module.modules():
            if z3_leaf_module(module):  # DeepSpeed gathers it as one
                inside.update(child for child in module.modules() if child is not module)
            if any(map(packed_weights, module.modules() if z3_leaf_module(module) else [module])):
                if module not in inside:
                    module.register_forward_hook(look)
        for _ in range(2):  # DeepSpeed knows the order of modules in the second step
            loss = engine(**inputs()).loss
            engine.backward(loss)
            engine.step()
            alive = count_alive(seen["gathered"])
    return {
        "after forward": max(alive_after_forward),
        "after backward": alive,
        "looked": len(alive_after_forward),
        "largest module": largest,
        "read": [rank["bytes_read"] for rank in report],
        "resident": sum(param.ds_tensor.nbytes for param in base.parameters() if not param.requires_grad),
        **{key: seen[key] for key in ("bytes", "peak", "matrices", "overlapping")},
    }


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MODELS)
def test_memory(cluster: None, folders: Folders, name: str) -> None:
    """Of packed bytes each rank reads and holds its part, and one module's are gathered at a time, and soon freed."""
    whole = in_file(folders(name, 256))
    for found in run_ranks(2, memory, folders(name, 256), timeout=300):
        assert all(read <= 1.02 * whole / 2 for read in found["read"])
        assert found["resident"] <= 1.02 * whole / 2
        assert sum(found["bytes"].values()) <= 1.02 * whole, "packed bytes are gathered"
        assert found["looked"] >= 2 and found["matrices"] > 1.5 * found["looked"]
        assert found["after forward"] == found["after backward"] == 0
        assert found["peak"] <= found["largest module"] + PADDING, "one module at a time"
        assert found["overlapping"] == 0, "one matrix at a time"


OF_FORMATS = {
    "mxfp4": "MXFP4",
    "finegrained_fp8": "FP8 by blocks",
    "compressed_tensors": "int4 by group",
    "gguf": "GGUF",
}
"""Quantised checkpoints that lead to each row for dequantising, by the module of the row."""


def dequantised_values(folder: Path, **kwargs: Any) -> dict[str, torch.Tensor]:
    if (folder / "lfm2.gguf").exists():
        how = {"gguf_file": "lfm2.gguf", "quantization_config": transformers.GgufConfig(dequantize=True)}
        load = transformers.AutoModelForCausalLM.from_pretrained
        return whole_values(load(folder, dtype=torch.bfloat16, **how, **kwargs))
    return whole_values(load_dequantised(folder, **kwargs))


def mutated_when_dequantised(number: int, folder: Path) -> dict[str, Any]:
    """By mutation: the names of wrong values, or what is raised."""
    plain, found = dequantised_values(folder), {}

    def streamed() -> Any:
        with hf_zero_stream.streaming(hf_zero_stream.StreamingConfig(progress=False)):
            return dequantised_values(folder, ds_config=ds_config(torch.bfloat16))

    for mutate in (lambda row, patch: row, *MUTATIONS):
        with mutation_of(TABLE[PatchScope.LOAD][number], PatchScope.LOAD, mutate):
            values = outcome_of(streamed)
        found[mutate.__name__] = values if isinstance(values, str) else differing(values, plain)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [number for number, row in enumerate(TABLE[PatchScope.LOAD]) if row.feature == "dequantising"]
)
def test_never_other_dequantised_values(cluster: None, tmp_path: Path, number: int) -> None:
    kind = next(kind for module, kind in OF_FORMATS.items() if module in TABLE[PatchScope.LOAD][number].of)
    if kind == "GGUF":
        write_lfm2(tmp_path / "lfm2.gguf")
    else:
        MODELS[f"{kind}, mixture"](tmp_path)
    for found in run_ranks(2, mutated_when_dequantised, number, tmp_path, timeout=200):
        assert found.pop("<lambda>") == []
        assert all(what == [] or "Error" in what for what in found.values()), found


@pytest.fixture(scope="module")
def int4(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint, and the losses of adapters on it."""
    compressed_tensors(folder := tmp_path_factory.mktemp("int4"), "int4 with zero points")
    return folder, run_ranks(2, losses_of_kinds, folder, ["IA3"])[0]


@pytest.mark.parametrize("mutation", mutations(("peft.", "compressed_tensors."), "MODELS", "COMPRESSED"))
def test_adapters_on_quantised_weights(int4: tuple[Path, Any], mutation: Mutation) -> None:
    """Packed, and dequantised while they are loaded."""
    outcome, _ = run_ranks(2, mutated, mutation, losses_of_kinds, int4[0], ["IA3"])
    assert isinstance(outcome, str) or outcome == int4[1], outcome


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
    kwargs = {"dtype": dtype, "gguf_file": name, "quantization_config": transformers.GgufConfig(dequantize=True)}
    for result in run_ranks(3, compare, "AutoModelForCausalLM", files, kwargs, dtype):
        assert result["differences"] == []
        assert result["info"] == result["plain_info"]
        assert [rank["materialised"] for rank in result["report"]["ranks"]] == [{}] * 3


def load_packed(folder: Path) -> tuple[bool, bool]:
    """Whether the model streams, and whether it is partitioned."""
    model = load_with("streamed", "AutoModelForCausalLM", folder, {}, {"gguf_file": "llama.gguf"})
    return is_streamed(model), any(hasattr(param, "ds_tensor") for param in model.parameters())


def test_without_dequantize_it_is_left_to_stock(cluster: None, files: Path) -> None:
    assert run_ranks(2, load_packed, files) == [(False, False)] * 2
