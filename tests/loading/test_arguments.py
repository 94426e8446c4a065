"""Each argument of `from_pretrained` that streams means what it means in plain loading; docs/settings.md lists them.

Those that say which files are read are in tests/loading/test_refused_arguments.py, those that are refused or handed to
stock in tests/loading/test_refused_arguments.py.
"""

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tqdm import tqdm
from transformers.core_model_loading import WeightRenaming

import hf_zero_stream
from tests.sampling import chosen
from tests.support.checkpoint_files import Tensors, rewritten
from tests.support.cluster import run_ranks
from tests.support.messages import Messages
from tests.support.parity import assert_same, compare, differences, ds_config, errors_of, load_with
from tests.support.zoo import Checkpoint, build_model


CAUSAL = "AutoModelForCausalLM"


def one_shard(source: Path, folder: Path, names: Callable[[str], str] = str) -> Path:
    """A copy of a checkpoint in a single shard, with renamed tensors."""

    def rename(tensors: Tensors) -> None:
        for key in [*tensors]:
            tensors[names(key)] = tensors.pop(key)

    return rewritten(source, folder, rename)


def see_config(model: Any) -> dict[str, Any]:
    """The config, less what a load under ZeRO-3 has to change."""
    found = model.config.to_dict()
    found["name_or_path"] = model.name_or_path
    found["attn"], found["experts"] = model.config._attn_implementation, model.config._experts_implementation
    return found


def see_generation_config(model: Any) -> dict[str, Any]:
    return model.generation_config.to_dict()


# --------------------------------------------------------------------------------------------------------------- dtype


@pytest.mark.parametrize(
    "dtype", ["auto", torch.bfloat16, "bfloat16", None, torch.float32], ids=["auto", "bf16", "name", "none", "fp32"]
)
@pytest.mark.parametrize("argument", ["dtype", "torch_dtype"])
def test_dtype(cluster: None, zoo_checkpoint: Checkpoint, dtype: Any, argument: str) -> None:
    """Parameters take DeepSpeed's dtype; buffers and the config take the one asked for, as in plain loading."""
    folder = zoo_checkpoint("llama4", torch.bfloat16)
    results = run_ranks(2, compare, CAUSAL, folder, {argument: dtype}, torch.bfloat16, see_config)
    assert_same(results)


def test_dtype_of_each_part(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    folder = zoo_checkpoint("qwen3_vl_moe")
    dtype = {"text_config": "bfloat16", "vision_config": torch.float16, "": torch.bfloat16}
    results = run_ranks(
        2, compare, "AutoModelForImageTextToText", folder, {"dtype": dtype}, torch.bfloat16, see_config
    )
    assert_same(results)


def test_dtype_and_torch_dtype(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    """`dtype` wins."""
    kwargs = {"dtype": "bfloat16", "torch_dtype": torch.float32}
    assert_same(run_ranks(2, compare, CAUSAL, zoo_checkpoint("llama"), kwargs, torch.bfloat16, see_config))


# ------------------------------------------------------------------------------------------ what the checkpoint brings


def return_types(folder: Path) -> list[str]:
    found = []
    for wanted in (True, False):
        result = load_with("streamed", CAUSAL, folder, ds_config(), {"output_loading_info": wanted})
        found.append(type(result).__name__)
    return found


def test_output_loading_info(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    """The contents are compared by every test that uses `assert_same`."""
    assert run_ranks(2, return_types, zoo_checkpoint("llama")) == [["tuple", "LlamaForCausalLM"]] * 2


@pytest.mark.parametrize("allowed", [True, False])
def test_ignore_mismatched_sizes(cluster: None, zoo_checkpoint: Checkpoint, allowed: bool) -> None:
    kwargs = {"vocab_size": 9, "ignore_mismatched_sizes": allowed}
    folder = zoo_checkpoint("llama")
    if allowed:
        results = run_ranks(2, compare, CAUSAL, folder, kwargs)
        assert_same(results)
        assert len(results[0]["info"]["mismatched_keys"]) == 2
        return
    for plain, streamed in run_ranks(2, errors_of, ["plain", "streamed"], CAUSAL, folder, kwargs):
        assert plain is not None and plain == streamed


@pytest.mark.parametrize("world_size", [2, 3])
def test_key_mapping(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, world_size: int) -> None:
    """Renames of the user come before the model's own conversions (here: experts that are fused)."""

    def rename(key: str) -> str:
        return key.replace("model.layers", "transformer.h").replace("lm_head", "output")

    folder = one_shard(zoo_checkpoint("qwen3_moe"), tmp_path / "renamed", rename)
    kwargs = {"key_mapping": {r"^transformer\.h": "model.layers", "^output": "lm_head"}}
    results = run_ranks(world_size, compare, CAUSAL, folder, kwargs)
    assert_same(results)
    assert not results[0]["info"]["missing_keys"] and not results[0]["info"]["unexpected_keys"]


def kept_conversions(folder: Path) -> list[Any]:
    """The renames that a model remembers for saving."""
    kwargs = {"key_mapping": {"^output": "lm_head", "^unused": "nowhere"}}
    found = []
    for how in ("plain", "streamed"):
        model = load_with(how, CAUSAL, folder, ds_config(), kwargs)
        kept = model._weight_conversions
        found.append([(type(kind).__name__, kind.source_patterns, kind.target_patterns) for kind in kept])
        assert any(isinstance(kind, WeightRenaming) for kind in kept)
    return found


def test_key_mapping_is_remembered(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = one_shard(zoo_checkpoint("qwen3_moe"), tmp_path / "renamed", lambda key: key.replace("lm_head", "output"))
    for plain, streamed in run_ranks(2, kept_conversions, folder):
        assert plain == streamed


def test_state_dict(cluster: None) -> None:
    """The same as from a file; with a path, transformers refuses."""
    model = build_model("qwen3_moe")
    kwargs = {"config": model.config, "state_dict": model.state_dict()}
    results = run_ranks(2, compare, type(model).__name__, None, kwargs)
    assert_same(results, bytes_are_read=False)
    for plain, streamed in run_ranks(2, errors_of, ["plain", "streamed"], type(model).__name__, "somewhere", kwargs):
        assert plain is not None and plain == streamed


# -------------------------------------------------------------------------------------------------------- the config


def test_config_object(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    """The caller's object stays as it was."""
    folder = zoo_checkpoint("llama")
    config = transformers.AutoConfig.from_pretrained(folder, num_hidden_layers=1)
    results = run_ranks(2, compare, CAUSAL, folder, {"config": config}, torch.float32, see_config)
    assert_same(results)
    assert results[0]["info"]["unexpected_keys"], "the second layer"


def test_config_path(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = zoo_checkpoint("llama")
    transformers.AutoConfig.from_pretrained(folder, rms_norm_eps=0.5).save_pretrained(tmp_path)
    kwargs = {"config": str(tmp_path)}
    results = run_ranks(2, compare, "LlamaForCausalLM", folder, kwargs, torch.float32, see_config)
    assert_same(results)
    assert results[0]["probes"][0]["rms_norm_eps"] == 0.5


def test_other_kwargs_update_the_config(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    kwargs = {"num_hidden_layers": 1, "use_cache": False}
    results = run_ranks(2, compare, CAUSAL, zoo_checkpoint("qwen3_moe"), kwargs, torch.float32, see_config)
    assert_same(results)
    assert results[0]["probes"][0]["num_hidden_layers"] == 1


def test_unknown_kwargs(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    """They reach the model's `__init__`, which does not know them."""
    for plain, streamed in run_ranks(
        2, errors_of, ["plain", "streamed"], CAUSAL, zoo_checkpoint("llama"), {"no_such_argument": 1}
    ):
        assert plain is not None and plain[0] == "TypeError" and plain == streamed


def compare_positional(folder: Path) -> list[str]:
    """BertModel(config, add_pooling_layer)."""
    plain = transformers.BertModel.from_pretrained(folder, False)
    with hf_zero_stream.streaming():
        streamed = transformers.BertModel.from_pretrained(folder, False, ds_config=ds_config())
    assert streamed.pooler is None
    return differences(streamed, plain, torch.float32)


def test_model_args(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    assert run_ranks(2, compare_positional, zoo_checkpoint("bert")) == [[], []]


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "no_such_attention"])
def test_attn_implementation(cluster: None, zoo_checkpoint: Checkpoint, implementation: str) -> None:
    kwargs = {"attn_implementation": implementation}
    folder = zoo_checkpoint("llama")
    if implementation.startswith("no"):
        for plain, streamed in run_ranks(2, errors_of, ["plain", "streamed"], CAUSAL, folder, kwargs):
            assert plain is not None and plain == streamed
        return
    results = run_ranks(2, compare, CAUSAL, folder, kwargs, torch.float32, see_config)
    assert_same(results)
    assert results[0]["probes"][0]["attn"] == implementation


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_experts_implementation(cluster: None, zoo_checkpoint: Checkpoint, implementation: str) -> None:
    kwargs = {"experts_implementation": implementation}
    results = run_ranks(2, compare, CAUSAL, zoo_checkpoint("qwen3_moe"), kwargs, torch.float32, see_config)
    assert_same(results)
    assert results[0]["probes"][0]["experts"] == implementation


def test_generation_config(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Given as an argument, and found in the folder."""
    folder = one_shard(zoo_checkpoint("llama"), tmp_path / "llama")
    transformers.GenerationConfig(max_new_tokens=3, num_beams=2).save_pretrained(folder)
    given = transformers.GenerationConfig(max_new_tokens=5)
    for kwargs, expected in (({}, 3), ({"generation_config": given}, 5)):
        results = run_ranks(2, compare, CAUSAL, folder, kwargs, torch.float32, see_generation_config)
        assert_same(results)
        assert results[0]["probes"][0]["max_new_tokens"] == expected


@pytest.mark.slow
def test_fusion_config(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    """Another module, and a conversion of its weights."""
    kwargs = {"fusion_config": {"patch_embeddings": True}}
    folder = zoo_checkpoint("qwen3_vl_moe_v5")
    results = run_ranks(2, compare, "AutoModelForImageTextToText", folder, kwargs, torch.float32, see_patch_embedding)
    assert_same(results)
    assert "linear_proj.weight" in results[0]["probes"][0]


def see_patch_embedding(model: Any) -> list[str]:
    return [name for name, _ in model.model.visual.patch_embed.named_parameters()]


# ----------------------------------------------------------------------------------------- without effect for a folder


class OwnBar(tqdm):  # type: ignore[type-arg]
    pass


CHANGES_NOTHING: list[dict[str, Any]] = [
    {"tqdm_class": OwnBar},
    {"local_files_only": True},
    {"token": "none"},
    {"token": False},
    {"force_download": True},
    {"proxies": {"http": "nowhere.invalid:1"}},
    {"cache_dir": "no-such-folder"},
    {"low_cpu_mem_usage": True},
    {"low_cpu_mem_usage": False},
    {"mirror": "tuna"},
    {"from_tf": True},
    {"from_flax": True},
    {"_fast_init": False},
    {"offload_state_dict": True},
    {"offload_folder": "no-such-folder"},
    {"offload_buffers": True},
    {"max_memory": {"cpu": "1GB"}},
    {"use_kernels": False},
    {"allow_all_kernels": False},
    {"allow_all_kernels": True},
    {"trust_remote_code": True},
    {"trust_remote_code": False},
    {"adapter_kwargs": {}},
    {"adapter_name": "other"},
    {"_from_pipeline": "text-generation"},
    {"_from_auto": True},
    {"_commit_hash": "0" * 40},
    {"code_revision": "main"},
]
NAMED = {"-".join(f"{name}={value}" for name, value in kwargs.items())[:40]: kwargs for kwargs in CHANGES_NOTHING}


def compare_each(folder: Path, names: list[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        found[name] = compare(CAUSAL, folder, NAMED[name], torch.float32, see_config)
        gc.collect()  # while a partitioned model lives, ZeRO-3 counts for the plain load, too
    return found


@pytest.fixture(scope="module")
def compared(request: pytest.FixtureRequest, cluster: None, zoo_checkpoint: Checkpoint) -> list[dict[str, Any]]:
    return run_ranks(2, compare_each, zoo_checkpoint("llama"), chosen(request, NAMED))


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.sample(5)
def test_changes_nothing(compared: list[dict[str, Any]], name: str) -> None:
    """For a local folder of safetensors, without a device map, these have no effect in plain loading either."""
    assert_same([of_rank[name] for of_rank in compared])


# --------------------------------------------------------------------------------------------------------------- ours


def load_and_listen(folder: Path, kwargs: dict[str, Any]) -> tuple[bool, list[str]]:
    messages = Messages()
    transformers.utils.logging.get_logger("transformers").addHandler(messages)
    with hf_zero_stream.streaming():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, **kwargs)
    return all(hasattr(param, "ds_tensor") for param in model.parameters()), messages.found


@pytest.mark.slow
def test_ds_config(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """A dict, a path, or nothing; with a stage below 3 the load is transformers' own."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(ds_config()))
    folder = zoo_checkpoint("llama")
    lower = {**ds_config(), "zero_optimization": {"stage": 2}}
    for config, expected in ((ds_config(), True), (str(path), True), (path, True), (None, False), (lower, False)):
        for partitioned, _ in run_ranks(2, load_and_listen, folder, {"ds_config": config}):
            assert partitioned is expected


def test_strict(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    """More on it in tests/loading/test_incomplete.py."""
    folder = zoo_checkpoint("llama")
    assert_same(run_ranks(2, compare, CAUSAL, folder, {"output_loading_info": True}))
    assert run_ranks(2, errors_of, ["streamed"], CAUSAL, folder, {"strict": True}) == [[None]] * 2
    for (error,) in run_ranks(2, errors_of, ["streamed"], CAUSAL, folder, {"strict": True, "num_hidden_layers": 1}):
        assert error is not None and error[0] == "LoadError" and "unexpected" in error[1]
