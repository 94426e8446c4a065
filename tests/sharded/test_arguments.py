"""`from_pretrained(distributed_config=...)` and what else is said in it.

- What else is said in a `from_pretrained` that shards: as in plain loading, and errors as stock's.
- ``from_pretrained(distributed_config=...)``: each rank reads its local shards, into the storage that FSDP2 owns.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

import hf_zero_stream
from hf_zero_stream.holdings.introspection import is_streamed
from tests import sampling
from tests.loading.test_adapters import make_adapter
from tests.loading.test_arguments import one_shard
from tests.support.cluster import run_ranks
from tests.support.messages import Messages, message_of
from tests.support.odd_models import AroundOne, make_around_one, make_bert
from tests.support.saving import SHARD_SIZE, different
from tests.support.sharded import (
    Case,
    Sizes,
    compare_sharded,
    even_model,
    load_sharded,
    sharded_differences,
    wrong_cases,
)
from tests.support.zoo import ZOO, Checkpoint, build_model


CAUSAL = "AutoModelForCausalLM"

FSDP, TP, HSDP = {"fsdp_size": 2}, {"tp_size": 2}, {"dp_replicate_size": 2, "fsdp_size": 2}


def make_lora(base: Path, folder: Path) -> Path:
    """An adapter that has no module of its own."""
    model = peft.get_peft_model(build_model("llama"), peft.LoraConfig(r=3, target_modules=["q_proj", "v_proj"]))
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.normal_()
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(folder)
    return folder


@pytest.mark.plugin("pickled")
def test_arguments(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder, model, bins = zoo_checkpoint("llama"), build_model("llama"), tmp_path / "bins"
    model.save_pretrained(tmp_path / "variant", variant="fp9", max_shard_size="60KB")
    shutil.copytree(folder, tmp_path / "deep" / "model")
    renamed = one_shard(zoo_checkpoint("qwen3_moe"), tmp_path / "renamed", lambda key: key.replace("model.", "t."))
    model.config.save_pretrained(bins)
    torch.save(model.state_dict(), bins / "pytorch_model.bin")
    cases: dict[str, Case] = {
        "variant": (CAUSAL, tmp_path / "variant", {"variant": "fp9"}),
        "subfolder": (CAUSAL, tmp_path, {"subfolder": "deep/model"}),
        "key_mapping": (CAUSAL, renamed, {"key_mapping": {r"^t\.": "model."}}),
        "state_dict": ("LlamaForCausalLM", None, {"config": model.config, "state_dict": model.state_dict()}),
        "bin": (CAUSAL, bins, {}),
        "mismatched": (CAUSAL, folder, {"vocab_size": 30, "ignore_mismatched_sizes": True}),
        "dtype": (CAUSAL, folder, {"dtype": torch.bfloat16}),
        "adapter": (CAUSAL, make_lora(folder, tmp_path / "adapter"), {}),
    }
    assert run_ranks(2, wrong_cases, cases, sampling.every(2, [FSDP, TP])) == [{}, {}]


# ----------------------------------------------------------------------------------------- the arguments that shard


def load_in_all_forms(folder: Path) -> dict[str, Any]:
    """What of each form is neither as in stock nor as in plain loading."""
    transformers.utils.logging.set_verbosity_error()
    model_class = transformers.AutoModelForCausalLM
    plain, found = model_class.from_pretrained(folder), {}
    forms: dict[str, dict[str, Any]] = {
        "tp_plan": {"tp_plan": "auto"},
        "tp_size": {"tp_size": 2},
        "both": {"tp_plan": "auto", "tp_size": 2},
        "device_mesh": {"tp_plan": "auto", "device_mesh": init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))},
        "dict": {"distributed_config": {"fsdp_size": 2}},
        "tp_plan inside": {"distributed_config": DistributedConfig(tp_plan="auto")},
        "own plan": {"distributed_config": DistributedConfig(tp_size=2, tp_plan={"lm_head": "colwise"})},
        "experts": {"distributed_config": DistributedConfig(fsdp_size=2, ep_size=2)},
    }
    for name, kwargs in forms.items():
        stock = model_class.from_pretrained(folder, **kwargs)
        with hf_zero_stream.streaming():
            model = model_class.from_pretrained(folder, **kwargs)
        layouts = [
            {name: str(getattr(param, "placements", "")) for name, param in each.named_parameters()}
            for each in (stock, model)
        ]
        found[name] = sharded_differences(model, plain) + ([] if layouts[0] == layouts[1] else ["layout"])
        if not is_streamed(model) or not any(isinstance(p, DTensor) for p in model.parameters()):
            found[name].append("not streamed")
    model = hf_zero_stream.StreamingAutoModelForCausalLM.from_pretrained(folder, tp_size=2)
    found["Streaming class"] = sharded_differences(model, plain)
    return found


def test_all_forms(cluster: None, tmp_path: Path) -> None:
    even_model("qwen3_moe").save_pretrained(tmp_path)
    for found in run_ranks(2, load_in_all_forms, tmp_path):
        assert len(found) == 9 and not any(found.values()), found


def unsharded(folder: Path) -> list[bool]:
    """Whether these, which ask for nothing, shard."""
    found = []
    for kwargs in (
        {"distributed_config": DistributedConfig(enable_expert_parallel=True)},
        {"distributed_config": DistributedConfig(fsdp_size=1, tp_size=1)},
        {"distributed_config": {}},
        {"device_mesh": init_device_mesh("cpu", (2,))},
    ):
        with hf_zero_stream.streaming():
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, **kwargs)
        found.append(any(isinstance(param, DTensor) for param in model.parameters()))
    return found


def test_arguments_that_ask_for_nothing(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    assert run_ranks(2, unsharded, zoo_checkpoint("llama")) == [[False] * 4] * 2


def errors_of_both(folders: dict[str, Path]) -> dict[str, Any]:
    """The type and the text of stock's error and of ours."""
    auto, found = transformers.AutoModelForCausalLM, {}
    bert = transformers.AutoModelForMaskedLM
    calls: dict[str, Callable[[], Any]] = {
        "too many ranks": lambda: auto.from_pretrained(folders["llama"], distributed_config={"fsdp_size": 3}),
        "too few ranks": lambda: auto.from_pretrained(
            folders["llama"], distributed_config=DistributedConfig(fsdp_size=2, tp_size=2)
        ),
        "no such size": lambda: auto.from_pretrained(folders["llama"], distributed_config={"tp_size": 0}),
        "both": lambda: auto.from_pretrained(folders["llama"], tp_size=2, distributed_config={"tp_size": 2}),
        "device_map": lambda: auto.from_pretrained(folders["llama"], tp_size=2, device_map="cpu"),
        "no plan": lambda: bert.from_pretrained(folders["bert"], distributed_config={"tp_size": 2, "ep_size": 2}),
        "no such plan": lambda: auto.from_pretrained(
            folders["llama"], distributed_config={"tp_size": 2, "tp_plan": {"lm_head": "diagonal"}}
        ),
        "experts alone": lambda: auto.from_pretrained(
            folders["moe"], distributed_config={"tp_size": 2, "enable_expert_parallel": True}
        ),
        "path": lambda: auto.from_pretrained("/nowhere/at/all", distributed_config={"fsdp_size": 2}),
        "mismatched": lambda: auto.from_pretrained(folders["llama"], vocab_size=9, tp_size=2),
        "modules_to_save": lambda: auto.from_pretrained(folders["adapter"], distributed_config={"fsdp_size": 2}),
        "nested": lambda: AroundOne.from_pretrained(folders["nested"], distributed_config={"fsdp_size": 2}),
    }
    transformers.utils.logging.set_verbosity_error()
    for name, call in calls.items():
        dist.barrier()
        stock = message_of(call)
        dist.barrier()
        with hf_zero_stream.streaming():
            found[name] = [stock, message_of(call)]
    return found


def test_errors_are_stocks(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    nested = make_around_one(tmp_path / "nested", make_bert(tmp_path / "inner", 1), 3)
    folders = {"llama": zoo_checkpoint("llama"), "bert": zoo_checkpoint("bert"), "nested": nested}
    folders["moe"] = zoo_checkpoint("qwen3_moe")
    folders["adapter"] = make_adapter("llama", folders["llama"], tmp_path / "adapter")
    for found in run_ranks(2, errors_of_both, folders):
        for name, (stock, ours) in found.items():
            assert stock == ours, f"{name}\n{stock}\n{ours}"


EP = {"fsdp_size": 2, "ep_size": 2}


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "gpt_oss", "qwen3_vl_moe", "bert", "t5"])
def test_equals_plain_loading(cluster: None, zoo_checkpoint: Checkpoint, name: str) -> None:
    of_sizes = [FSDP, TP] if name not in ("bert", "t5") else [FSDP]
    for found in run_ranks(2, compare_sharded, ZOO[name].auto_class, zoo_checkpoint(name), of_sizes):
        for of_size in found:
            assert not of_size["differences"], of_size
            assert of_size["sharded"]
            assert of_size["report"].bytes_read <= 1.3 * of_size["report"].bytes_needed


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_three_ranks(cluster: None, zoo_checkpoint: Checkpoint, name: str) -> None:
    """Dimensions that three does not divide: FSDP2 pads them."""
    for found in run_ranks(3, compare_sharded, ZOO[name].auto_class, zoo_checkpoint(name), [{"fsdp_size": 3}]):
        assert not found[0]["differences"], found


def test_several_dimensions(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    of_sizes: list[Sizes] = [HSDP, {"fsdp_size": 2, "tp_size": 2}, {"fsdp_size": 2, "tp_size": 2, "ep_size": 2}]
    for found in run_ranks(4, compare_sharded, "AutoModelForCausalLM", zoo_checkpoint("deepseek_v3"), of_sizes):
        for of_size in found:
            assert not of_size["differences"], of_size


def save_sharded(folder: Path, of_sizes: list[Sizes], target: Path) -> None:
    for number, sizes in enumerate(of_sizes):
        model = load_sharded(transformers.AutoModelForCausalLM, folder, sizes)
        hf_zero_stream.save_pretrained(model, target / f"ours {number}", max_shard_size=SHARD_SIZE)
        with hf_zero_stream.streaming():
            model.save_pretrained(target / f"inside {number}", max_shard_size=SHARD_SIZE)


@pytest.mark.parametrize(
    ("world_size", "of_sizes"), [(2, [FSDP, TP, EP]), (4, [HSDP, {"fsdp_size": 2, "tp_size": 2}])]
)
def test_saving(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, world_size: int, of_sizes: list[Sizes]
) -> None:
    """The folder of the whole model, byte for byte; replicas are written once."""
    folder = zoo_checkpoint("deepseek_v3")
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder)
    whole.save_pretrained(tmp_path / "whole", max_shard_size=SHARD_SIZE)
    run_ranks(world_size, save_sharded, folder, of_sizes, tmp_path)
    for number in range(len(of_sizes)):
        assert different(tmp_path / f"ours {number}", tmp_path / "whole") == []
        assert different(tmp_path / f"inside {number}", tmp_path / "whole") == []


def load_beside_stock(folder: Path, sizes: Sizes, pieces: Path | None = None) -> dict[str, Any]:
    """Whether a load that is left to transformers gives this rank what transformers alone gives it.

    If `pieces` is given, it is a folder to make with ``distributed_checkpoint=True``, and to load.
    """

    def load() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**sizes))

    if pieces is not None:
        load().save_pretrained(pieces, distributed_checkpoint=True)
        dist.barrier()
        folder = pieces
    messages = Messages()
    transformers.utils.logging.get_logger("hf_zero_stream").addHandler(messages)
    expected = {name: local(tensor) for name, tensor in load().state_dict().items()}
    with hf_zero_stream.streaming(hf_zero_stream.StreamingConfig(progress=False)):
        model = load()
    found = {name: local(tensor) for name, tensor in model.state_dict().items()}
    return {
        "names": sorted(found),
        "equal": found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found),
        "streamed": is_streamed(model),
        "said": [text for text in messages.found if "leaves this load to transformers" in text],
    }


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def test_pipelines_are_left_to_stock(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    found = run_ranks(2, load_beside_stock, zoo_checkpoint("llama"), {"pp_size": 2})
    assert_left_to_stock(*found, "with pp_size=2 ranks hold different models")


def assert_left_to_stock(first: dict[str, Any], second: dict[str, Any], why: str) -> None:
    for found in (first, second):
        assert found["equal"] and found["names"] and not found["streamed"]
    assert len(first["said"]) == 1 and why in first["said"][0]
    assert second["said"] == []


@pytest.mark.parametrize("sizes", [FSDP, TP], ids=str)
def test_pieces_of_ranks_are_left_to_stock(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, sizes: Sizes
) -> None:
    """A folder of ``save_pretrained(distributed_checkpoint=True)``."""
    pieces = tmp_path / "pieces"
    found = run_ranks(2, load_beside_stock, zoo_checkpoint("llama"), sizes, pieces)
    assert list(pieces.glob("shard-*.safetensors"))
    assert_left_to_stock(*found, "in pieces of safetensors")


def test_missing_parameters_are_those_of_a_plain_load(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    """As if rank 0 had initialised the whole model: shards repeat no rows, and replicas are the same."""
    folder = zoo_checkpoint("llama")
    worlds: list[tuple[int, list[Sizes]]] = [(2, [FSDP, TP]), (4, [HSDP])]
    for world_size, of_sizes in sampling.every(2, worlds):
        for found in run_ranks(world_size, load_with_more_layers, folder, of_sizes):
            for of_size in found:
                assert not of_size["differences"], of_size


def load_with_more_layers(folder: Path, of_sizes: list[Sizes]) -> list[dict[str, Any]]:
    transformers.utils.logging.set_verbosity_error()
    return compare_sharded("AutoModelForCausalLM", folder, of_sizes, num_hidden_layers=3, dtype=torch.bfloat16)
