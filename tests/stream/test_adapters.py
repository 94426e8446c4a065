"""Adapters of PEFT are merged into what a weight stream gives, as PEFT merges them, or streamed by themselves."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist

import hf_zero_stream
from hf_zero_stream.errors import UnsupportedError
from hf_zero_stream.plugins.stream.merging import merges_values
from tests.support.checkpoint_files import differing, tensors_of
from tests.support.cluster import run_ranks
from tests.support.packed_models import Folders
from tests.support.packed_training import load as load_packed
from tests.support.packed_training import with_adapters
from tests.support.parity import ds_config
from tests.support.streams import (
    Adapt,
    dora,
    lora,
    lora_of_experts,
    randomised,
    stream_adapted,
    taken,
    under_fsdp2,
    under_zero_3,
)
from tests.support.zoo import Checkpoint, build_model


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("name", "adapt"),
    [("llama", lora), ("llama", dora), ("qwen3_moe", lora_of_experts)],
    ids=["lora", "dora", "experts"],
)
@pytest.mark.parametrize("home", [under_zero_3, under_fsdp2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_merged(
    cluster: None,
    zoo_checkpoint: Checkpoint,
    tmp_path: Path,
    name: str,
    adapt: Adapt,
    home: Callable[..., object],
    dtype: torch.dtype,
) -> None:
    found, others = run_ranks(2, stream_adapted, zoo_checkpoint(name), tmp_path, home, adapt, dtype)
    assert found == {"merged": [], "again": [], "model's": [], "adapters": [], "changed": True}
    assert others == {"merged": [], "model's": [], "adapters": []}


def test_what_the_plan_depends_on() -> None:
    """Not on how a model describes itself, which is another after a step of DeepSpeed's; but on what is merged."""
    model = lora(build_model("llama"))
    stream = hf_zero_stream.weight_stream(model)
    before, plan = taken(stream), stream.buckets
    model.base_model.model.model.norm.extra_repr = lambda: "trained"
    assert differing(before, taken(stream)) == [] and stream.buckets is plan
    model.merge_adapter()
    with pytest.raises(UnsupportedError, match="unmerge_adapter"):
        taken(stream)
    model.unmerge_adapter()
    assert taken(stream).keys() == before.keys()


@pytest.mark.parametrize("name", ["llama", "qwen3"], ids=["", "tied"])
def test_trained_tokens(name: str, tmp_path: Path) -> None:
    """PEFT puts the embeddings into two modules, one inside the other."""
    config = peft.LoraConfig(r=3, target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [1, 5]})
    model = randomised(peft.get_peft_model(build_model(name), config))
    found = taken(hf_zero_stream.weight_stream(model))
    model.merge_and_unload().save_pretrained(tmp_path)
    assert differing(found, tensors_of(tmp_path)) == []


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("LNTuningConfig", {"target_modules": ["input_layernorm", "norm"]}),
        ("IA3Config", {"target_modules": ["q_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
        ("OFTConfig", {"target_modules": ["q_proj"], "oft_block_size": 4}),
        ("VeraConfig", {"target_modules": ["q_proj"], "r": 2}),
        ("LoKrConfig", {"target_modules": ["q_proj"], "r": 2}),
        ("ShiraConfig", {"target_modules": ["q_proj"], "r": 2}),
    ],
)
def test_other_kinds(kind: str, arguments: dict[str, Any], tmp_path: Path) -> None:
    """Some change weights in place when they are merged, others put a layer in another's place."""
    model = randomised(peft.get_peft_model(build_model("llama"), getattr(peft, kind)(**arguments)))
    found = taken(hf_zero_stream.weight_stream(model))
    model.merge_and_unload().save_pretrained(tmp_path)
    assert differing(found, tensors_of(tmp_path)) == []


def test_disabled() -> None:
    """As the model computes then: without adapters, and with the originals of what is trained in full."""
    expected = {name: param.detach().clone() for name, param in build_model("llama").named_parameters()}
    model = randomised(lora(build_model("llama")))
    stream = hf_zero_stream.weight_stream(model)
    merged = taken(stream)
    with model.disable_adapter():
        assert differing(taken(stream), expected) == []
    assert differing(taken(stream), merged) == [] and "lm_head.weight" in differing(merged, expected)


def test_the_active_adapter(tmp_path: Path) -> None:
    """Files of several adapters have the same names in them."""
    model = lora(build_model("llama"))
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj", "k_proj"]))
    stream = hf_zero_stream.weight_stream(model, only="trainable")
    for name in ("default", "other"):
        model.set_adapter(name)
        randomised(model).save_pretrained(tmp_path / name, selected_adapters=[name])
        assert differing(taken(stream), tensors_of(tmp_path / name, "**/*.safetensors")) == []
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(UnsupportedError, match="expects one active adapter; got default, other"):
        taken(stream)


def test_on_weights_that_others_have_quantised() -> None:
    """As bitsandbytes' and others' are in a model that transformers has loaded in each process."""
    model = lora(build_model("llama"))
    assert merges_values(model)
    model.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight = torch.nn.Parameter(
        torch.zeros(12, dtype=torch.uint8), requires_grad=False
    )
    assert not merges_values(model)
    with pytest.raises(UnsupportedError, match=r"are quantised \(torch.uint8\): nothing can be merged"):
        hf_zero_stream.weight_stream(model)
    assert taken(hf_zero_stream.weight_stream(model, only="trainable"))


def test_no_adapters_of_layers() -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(UnsupportedError, match="expected adapters of layers; PROMPT_TUNING"):
        hf_zero_stream.weight_stream(peft.get_peft_model(build_model("llama"), config))


def stream_beside_packed(checkpoint: Path, folder: Path) -> list[str]:
    model = with_adapters(load_packed(checkpoint, ds_config(torch.bfloat16)))
    with pytest.raises(UnsupportedError, match='Stream adapters by themselves, with only="trainable"'):
        hf_zero_stream.weight_stream(model)
    found = taken(hf_zero_stream.weight_stream(model, "all", only="trainable"))
    with hf_zero_stream.streaming():
        model.save_pretrained(folder)
    dist.barrier()
    return differing(found, tensors_of(folder))


@pytest.mark.plugin("packed")
def test_beside_packed_weights(cluster: None, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    checkpoint = Folders(tmp_path_factory)("nf4, dense")
    assert run_ranks(2, stream_beside_packed, checkpoint, tmp_path) == [[], []]
