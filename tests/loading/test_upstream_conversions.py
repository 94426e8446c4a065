"""transformers' own tests of checkpoint conversions hold for streamed models.

Docstrings name the test that each stands for; tests/support/upstream.py says in which files those are.
"""

import gc
import inspect
import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, conversion_mapping, core_model_loading
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    MergeModulelist,
    PermuteForRope,
    WeightConverter,
    WeightRenaming,
)

from tests.support.checkpoint_files import Tensors, differing
from tests.support.cluster import run_ranks
from tests.support.parity import assert_same, compare, differences, ds_config, load_with
from tests.support.upstream import full_state, randomise
from tests.support.zoo import Checkpoint, build_model


# transformers 5.1 has none of these, and the cases that need them are left out.
Conv3dToLinear = getattr(core_model_loading, "Conv3dToLinear", None)
GroupWeightRename = getattr(core_model_loading, "GroupWeightRename", None)
PrefixChange = getattr(core_model_loading, "PrefixChange", None)

WIDTH, EXPERTS, INNER = 8, 3, 5


class TinyConfig(PreTrainedConfig):
    model_type = "upstream_tiny"


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.ModuleDict({f"{name}_proj": nn.Linear(WIDTH, WIDTH, bias=False) for name in "qkv"})
        self.experts = nn.ParameterDict(
            {
                "gate_up_proj": nn.Parameter(torch.zeros(EXPERTS, 2 * INNER, WIDTH)),
                "down_proj": nn.Parameter(torch.zeros(EXPERTS, WIDTH, INNER)),
            }
        )
        self.norm1 = nn.LayerNorm(WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)


class Tiny(PreTrainedModel):
    config_class = TinyConfig
    base_model_prefix = "model"


class Body(Tiny):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.post_init()


class Bare(Tiny):
    """Nothing but the body, so that a prefix may be added to all keys."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__(config)
        self.model = Body(config)
        self.post_init()


class Task(Tiny):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__(config)
        self.model = Body(config)
        self.mlp = nn.ModuleDict({"down_proj": nn.Linear(WIDTH, WIDTH)})
        self.patch = nn.Linear(3 * 2**3, WIDTH)
        self.post_init()


class Part(Tiny):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__(config)
        self.q_proj = nn.Linear(WIDTH, WIDTH)
        self.post_init()


class OtherPart(Part):
    pass


class Parts(Tiny):
    """Sub-models, of which two are of one class."""

    base_model_prefix = ""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__(config)
        self.encoder, self.decoder, self.other = Part(config), Part(config), OtherPart(config)
        self.q_proj = nn.Linear(WIDTH, WIDTH)
        self.post_init()


QKV = [f"attn.{name}_proj.weight" for name in "qkv"]


def fused_qkv(tensors: Tensors, layer: str, change: Callable[[torch.Tensor], torch.Tensor] | None = None) -> None:
    """In `tensors`, the three projections of a layer become one; two of them are changed before."""
    parts = [tensors.pop(f"{layer}.{name}") for name in QKV]
    if change is not None:
        parts[:2] = map(change, parts[:2])
    tensors[f"{layer}.attn.qkv_proj.weight"] = torch.cat(parts)


def hub_layout(state: Tensors) -> Tensors:
    """One tensor for each expert's each projection, and fused attention."""
    tensors = dict(state)
    for layer in ("model.layers.0", "model.layers.1"):
        fused_qkv(tensors, layer)
        gate_up, down = (tensors.pop(f"{layer}.experts.{name}_proj") for name in ("gate_up", "down"))
        for expert in range(EXPERTS):
            tensors[f"{layer}.experts.{expert}.w1.weight"] = gate_up[expert, :INNER]
            tensors[f"{layer}.experts.{expert}.w3.weight"] = gate_up[expert, INNER:]
            tensors[f"{layer}.experts.{expert}.w2.weight"] = down[expert]
    return {name.replace("mlp.down_proj", "mlp.w2"): value for name, value in tensors.items()}


def hub_mapping() -> list[Any]:
    return [
        WeightConverter(
            ["experts.*.w1.weight", "experts.*.w3.weight"],
            "experts.gate_up_proj",
            operations=[MergeModulelist(dim=0), Concatenate(dim=1)],
        ),
        WeightConverter("experts.*.w2.weight", "experts.down_proj", operations=[MergeModulelist(dim=0)]),
        WeightConverter("attn.qkv_proj.weight", QKV, operations=[Chunk(dim=0)]),
        WeightRenaming("mlp.w2", "mlp.down_proj"),
    ]


def interleaved_layout(state: Tensors) -> Tensors:
    tensors = dict(state)
    for layer in ("model.layers.0", "model.layers.1"):
        fused_qkv(tensors, layer)
    return {re.sub("^model", "decoder", name): value for name, value in tensors.items()}


def rotated_layout(state: Tensors) -> Tensors:
    """Rows of queries and keys as for complex rotary embeddings: the two of a pair side by side."""
    tensors = dict(state)
    for layer in ("model.layers.0", "model.layers.1"):
        fused_qkv(tensors, layer, lambda rows: rows.view(2, 2, -1, WIDTH).transpose(1, 2).reshape(WIDTH, WIDTH))
    return tensors


def renamed(pattern: str, replacement: str | Callable[[re.Match[str]], str]) -> Callable[[Tensors], Tensors]:
    return lambda state: {re.sub(pattern, replacement, name): value for name, value in state.items()}


def unchanged(state: Tensors) -> Tensors:
    return dict(state)


def group() -> list[Any]:
    return [GroupWeightRename(["norm0", "norm1"], ["norm1", "norm2"])]


REMOVED, REMOVED_INSIDE = {"prefix_to_remove": "bad_name"}, {"prefix_to_remove": "bad", "model_prefix": "model.layers"}
ADDED, ADDED_INSIDE = {"prefix_to_add": "model"}, {"prefix_to_add": "layers", "model_prefix": "model"}


def old_q(model: str) -> Callable[[Tensors], Tensors]:
    return renamed(rf"^({model})\.q_proj", r"\1.old_q")


Mapping = Callable[[], list[Any]]


def prefix(**change: str) -> Mapping:
    return lambda: [PrefixChange(**change)]


CONVERSIONS: dict[str, tuple[type[Tiny], Callable[[Tensors], Tensors], str, Mapping]] = {
    "moe_and_qkv": (Task, hub_layout, "upstream_tiny", hub_mapping),
    "interleaved": (
        Task,
        interleaved_layout,
        "upstream_tiny",
        lambda: [
            WeightRenaming("^decoder", "model"),
            WeightConverter("attn.qkv_proj.weight", QKV, operations=[Chunk(dim=0)]),
        ],
    ),
}
"""What it is -> the class, the file's tensors out of the model's, and where the conversions are registered.

The names are those of the tests that they stand for: `test_moe_and_qkv_conversion` and its reverse,
`test_interleaved_renaming_and_converter_round_trip`, `test_qkv_chunk_rope_permute_...`,
`test_conv3d_linear_conversion_ops`, `test_group_weight_rename`, `test_can_remove_prefix`, `test_can_add_prefix` (and
both for submodules), `test_scoped_...`, `test_sibling_submodels_same_class_both_get_transforms`. Below are those that
only newer versions of transformers can do.
"""

if "permute_layer_names" in inspect.signature(PermuteForRope).parameters:
    ROPE = {"permute_layer_names": ["q_proj", "k_proj"]}
    CONVERSIONS["rope"] = (
        Task,
        rotated_layout,
        "upstream_tiny",
        lambda: [WeightConverter("attn.qkv_proj.weight", QKV, operations=[Chunk(dim=0), PermuteForRope(**ROPE)])],
    )
if Conv3dToLinear is not None:
    CONVERSIONS["conv3d"] = (
        Task,
        lambda state: {k: v.view(WIDTH, 3, 2, 2, 2) if k == "patch.weight" else v for k, v in state.items()},
        "upstream_tiny",
        lambda: [WeightConverter("patch.weight", "patch.weight", operations=[Conv3dToLinear(3, (2, 2, 2))])],
    )
if GroupWeightRename is not None:
    CONVERSIONS |= {
        "group_rename": (Task, renamed("norm([12])", lambda m: f"norm{int(m[1]) - 1}"), "upstream_tiny", group),
        "group_rename, converted already": (Task, unchanged, "upstream_tiny", group),
    }
if PrefixChange is not None:
    CONVERSIONS |= {
        # Before, saving undid conversions that loading had not done.
        "moe_and_qkv, converted already": (Task, unchanged, "upstream_tiny", hub_mapping),
        "remove_prefix": (Task, renamed("^", "bad_name."), "upstream_tiny", prefix(**REMOVED)),
        "remove_prefix, converted already": (Task, unchanged, "upstream_tiny", prefix(**REMOVED)),
        "add_prefix": (Bare, renamed(r"^model\.", ""), "upstream_tiny", prefix(**ADDED)),
        "add_prefix, converted already": (Bare, unchanged, "upstream_tiny", prefix(**ADDED)),
        "remove_prefix_submodule": (
            Task,
            renamed(r"\.layers\.", ".layers.bad."),
            "upstream_tiny",
            prefix(**REMOVED_INSIDE),
        ),
        "add_prefix_submodule": (Bare, renamed(r"\.layers\.", "."), "upstream_tiny", prefix(**ADDED_INSIDE)),
    }
if hasattr(WeightRenaming("old", "new"), "scope_prefix"):
    # Registered for a class, wherever in a model it is.
    CONVERSIONS |= {
        "scoped": (Parts, old_q("other"), "OtherPart", lambda: [WeightRenaming("^old_q", "q_proj")]),
        "siblings": (Parts, old_q("encoder|decoder"), "Part", lambda: [WeightRenaming("^old_q", "q_proj")]),
    }


def tiny_model(model_class: type[Tiny]) -> Tiny:
    return randomise(model_class(TinyConfig(num_attention_heads=2)))


def write(folder: Path, tensors: Tensors, config: PreTrainedConfig) -> None:
    config.save_pretrained(folder)
    tensors = {name: value.clone(memory_format=torch.contiguous_format) for name, value in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def convert(model_class: str, registered_as: str, mapping: list[Any], folder: Path, output: Path) -> dict[str, Any]:
    """Load plain and streamed with registered conversions, and save what was streamed."""
    conversion_mapping.register_checkpoint_conversion_mapping(registered_as, mapping, overwrite=True)
    try:
        plain, plain_info = load_with("plain", model_class, folder, {}, {"output_loading_info": True})
        streamed, info = load_with("streamed", model_class, folder, ds_config(), {"output_loading_info": True})
        state = full_state(streamed)
        streamed.save_pretrained(output, state_dict=state)
        dist.barrier()  # the first rank writes
        return {
            "differences": differences(streamed, plain, torch.float32),
            "info": info,
            "plain_info": plain_info,
            "state": state,
            "saved": load_file(output / "model.safetensors"),
            "materialised": streamed.streaming_report.to_dict()["ranks"][dist.get_rank()]["materialised"],
        }
    finally:
        conversion_mapping.register_checkpoint_conversion_mapping(registered_as, [], overwrite=True)


def convert_all(folder: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, (model_class, _, registered_as, mapping) in CONVERSIONS.items():
        gc.collect()
        try:
            class_name = f"{__name__}:{model_class.__name__}"
            found[name] = convert(class_name, registered_as, mapping(), folder / name, folder / name / "saved")
        except Exception:
            found[name] = {"error": traceback.format_exc()}
    return found


@pytest.fixture(scope="module")
def converted(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, dict[str, Any]]]]:
    """What each rank found, by conversion."""
    folder = tmp_path_factory.mktemp("conversions")
    for name, (model_class, to_file, *_) in CONVERSIONS.items():
        model = tiny_model(model_class)
        write(folder / name, to_file(model.state_dict()), model.config)
    yield run_ranks(2, convert_all, folder)


@pytest.mark.parametrize("name", list(CONVERSIONS))
def test_conversions(converted: Any, name: str) -> None:
    """The test of the same name in test_core_model_loading.py: the values are right, and saving gives the file again.

    Under ZeRO-3 that includes `test_init_zero3_moe_weight_conversion`.
    """
    model_class, to_file, *_ = CONVERSIONS[name]
    expected = tiny_model(model_class).state_dict()
    for rank in converted:
        found = rank[name]
        assert "error" not in found, found["error"]
        assert found["differences"] == []
        assert found["info"] == found["plain_info"] and not any(found["info"].values())
        assert differing(found["state"], expected) == []
        assert differing(found["saved"], to_file(expected)) == []
        assert found["materialised"] == {}


def compare_converted(class_name: str, folder: Path) -> dict[str, Any]:
    conversion_mapping.register_checkpoint_conversion_mapping("upstream_tiny", hub_mapping(), overwrite=True)
    return compare(f"{__name__}:{class_name}", folder, {})


@pytest.mark.parametrize(("source", "target"), [("Task", "Body"), ("Body", "Task"), ("Bare", "Task")])
def test_conversions_between_base_and_task(cluster: None, tmp_path: Path, source: str, target: str) -> None:
    """`test_scoped_match_falls_back_when_checkpoint_omits_base_prefix`, and the reverse: also before converters."""
    model = tiny_model(globals()[source])
    state = model.state_dict()
    if source == "Body":
        tensors = hub_layout({f"model.{name}": value for name, value in state.items()})
        tensors = {name.removeprefix("model."): value for name, value in tensors.items()}
    else:
        tensors = hub_layout(state)
    write(tmp_path, tensors, model.config)
    results = run_ranks(2, compare_converted, target, tmp_path)
    assert_same(results)
    of_task = {"mlp.down_proj.weight", "mlp.down_proj.bias", "patch.weight", "patch.bias"}
    info = results[0]["info"]
    assert info["missing_keys"] == (of_task if target == "Task" else set())
    assert len(info["unexpected_keys"]) == (4 if target == "Body" else 0)


@pytest.mark.parametrize(
    ("name", "target"), [("qwen3_moe", "AutoModelForCausalLM"), ("bert", "AutoModelForTokenClassification")]
)
def test_base_checkpoint_in_a_task_model(
    cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, name: str, target: str
) -> None:
    """`test_base_model_to_head_model_load`: what `AutoModel` saved; the head is new. Reverse: test_incomplete.py."""
    transformers.AutoModel.from_pretrained(zoo_checkpoint(name)).save_pretrained(tmp_path)
    results = run_ranks(2, compare, target, tmp_path, {})
    assert_same(results)
    missing = results[0]["info"]["missing_keys"]
    assert missing and all(name.startswith(("lm_head", "classifier")) for name in missing)


def gather_all_at_once(folder: Path) -> dict[str, Any]:
    """As the test upstream looks at a model: one gather over everything, with a modifier, twice."""
    expected = build_model("qwen3_moe").state_dict()
    model, info = load_with("streamed", "Qwen3MoeForCausalLM", folder, ds_config(), {"output_loading_info": True})
    named = dict(model.named_parameters())
    different = []
    for _ in range(2):
        with deepspeed.zero.GatheredParameters(list(named.values()), modifier_rank=0):
            different += [name for name, param in named.items() if not torch.equal(param.data, expected[name])]
    return {"info": info, "different": different, "count": len(named)}


def test_experts_are_fused(cluster: None, zoo_checkpoint: Checkpoint) -> None:
    """`test_init_zero3_moe_weight_conversion`: nothing missing or unexpected, and the values of the model saved."""
    for found in run_ranks(2, gather_all_at_once, zoo_checkpoint("qwen3_moe")):
        assert not any(found["info"].values())
        assert found["different"] == [] and found["count"] > 20
