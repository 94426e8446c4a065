"""Where stock transformers 5.23 falls short under ZeRO-3, streaming does as plain loading does; a row for each case.

Stock itself is not tested here: what it does may change. Every test of a model type looks for the part of the model
that made stock raise, or differ from plain loading, so that a tiny config cannot lose it unnoticed.

| case | shown by (`here` is this file) |
|---|---|
| unexpected keys are reported on all ranks | `test_incomplete::test_missing_and_unexpected_keys` |
| a shape mismatch raises on all ranks | `test_arguments::test_ignore_mismatched_sizes` |
| with `ignore_mismatched_sizes=True`, initialised and reported | `test_arguments::test_ignore_mismatched_sizes` |
| missing keys are initialised | `test_incomplete::test_missing_and_unexpected_keys` |
| ... with one module gathered at a time | `here::test_missing_keys_are_gathered_by_module` |
| both ends of a tie in the file, with different values | `test_incomplete::test_ties` |
| conversions that look at shapes: Qwen3-VL-MoE in the v5 layout | `test_parity::test_equals_plain_loading` |
| ... Molmo2's `Split` | `here::test_split_by_shapes` |
| DeepSeek-V4 as `save_pretrained` writes it | `here::test_rename_that_hits_too_much` |
| 0-dimensional parameters: CLIP | `test_incomplete::test_models_that_stock_cannot_load` |
| ... and its family | `here::test_zero_dimensional_parameters` |
| weight norm: wav2vec2 | `test_incomplete::test_models_that_stock_cannot_load` |
| ... EnCodec, HuBERT | `here::test_weight_norm` |
| initialisation looks at shapes: DAC, Funnel, Youtu | `here::test_init_looks_at_shapes` |
| sinusoidal positions set in init: Marian, Pegasus, RoFormer | `here::test_sinusoidal_positions` |
| BLIP-2, InstructBLIP: fused `qkv.bias` | `here::test_bias_replaced_in_init` |
| RecurrentGemma's `normalizer` | `here::test_buffer_computed_in_init` |
| parameters that `__init__` freezes: AFMoE, AudioFlamingo 3 | `here::test_frozen_in_init` |
| ... and any other | `test_odd_parameters::test_equals_plain_loading` |
| `_keep_in_fp32_modules_strict`: ERNIE 4.5 MoE | `here::test_kept_in_fp32` |
| ... and any other | `test_odd_parameters::test_equals_plain_loading_in_16_bit` |
| FP8 checkpoints are dequantised, and partitioned | `../packed/test_quantised::test_dequantised_as_plain` |
| a PEFT adapter's folder as the model's path | `test_adapters::test_adapter_folder_as_model_path` |
| memory: no rank has the whole checkpoint mapped and resident | `here::test_resident_memory` |
| ... nor a whole large parameter | `test_memory_bound::test_nothing_as_large_as_the_largest_parameter_is_allocated` |
"""

import ast
import gc
import json
import re
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from benchmarks.moe_checkpoint import make_moe_checkpoint
from tests.sampling import chosen
from tests.support.checkpoint_files import Tensors, rewritten
from tests.support.cluster import run_ranks
from tests.support.parity import assert_same, compare, differences, ds_config, load_with
from tests.support.zoo import Checkpoint
from tests.sweep.tiny import make_checkpoints


MIB = 2**20


def test_each_named_test_exists() -> None:
    named = re.findall(r"`([\w./]+)::(\w+)`", __doc__ or "")
    assert len(named) == len(re.findall(r"^\| ", __doc__ or "", re.MULTILINE)) - 1, "a test in each row but the first"
    for module, name in named:
        path = Path(__file__) if module == "here" else Path(__file__).parent / f"{module}.py"
        tree = ast.parse(path.read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{module}::{name}"


# -------------------------------------------------------------------------------------------- models, by their types


def leave(tensors: Tensors, config: dict[str, Any]) -> None:
    pass


def without_positions(tensors: Tensors, config: dict[str, Any]) -> None:
    for name in [name for name in tensors if "embed_positions" in name]:
        del tensors[name]


def with_positions(tensors: Tensors, config: dict[str, Any]) -> None:
    """Others than those that initialisation computes."""
    generator = torch.Generator().manual_seed(1)
    for part in ("encoder", "decoder"):
        positions = torch.randn(config["max_position_embeddings"], config["d_model"], generator=generator)
        tensors[f"model.{part}.embed_positions.weight"] = positions


def with_padding_token(tensors: Tensors, config: dict[str, Any]) -> None:
    """Initialisation zeroes the row of the padding token, if there is one."""
    config["pad_token_id"] = 3


@dataclass(frozen=True)
class Case:
    """A tiny checkpoint of one model type.

    Attributes:
        cause: what stock stumbled over, out of the model as plain loading gives it and of the keys in the file.
        change: applied to the file's tensors and to the config.
        dtype: of the file, of the load, and of DeepSpeed.
    """

    cause: Callable[[transformers.PreTrainedModel, set[str]], list[str]]
    change: Callable[[Tensors, dict[str, Any]], None] = leave
    dtype: torch.dtype = torch.float32


def parameters(wanted: Callable[[str, nn.Parameter], bool]) -> Callable[[nn.Module, set[str]], list[str]]:
    return lambda model, keys: [name for name, param in model.named_parameters() if wanted(name, param)]


def of_module(kind: type[nn.Module]) -> Callable[[nn.Module, set[str]], list[str]]:
    return lambda model, keys: [name for name, module in model.named_modules() if isinstance(module, kind)]


def frozen_by_init(model: transformers.PreTrainedModel, keys: set[str]) -> list[str]:
    with torch.device("meta"):
        fresh = type(model)(model.config)
    return [name for name, param in fresh.named_parameters() if not param.requires_grad]


def replaced_bias(model: nn.Module, keys: set[str]) -> list[str]:
    found = parameters(lambda name, param: name.endswith("qkv.bias"))(model, keys)
    return [name for name in found if dict(model.named_parameters())[name].ne(0).all()]


def normalizer(model: transformers.PreTrainedModel, keys: set[str]) -> list[str]:
    expected = torch.tensor(model.config.hidden_size**0.5, dtype=torch.bfloat16)
    return [name for name, value in model.named_buffers() if "normalizer" in name and value.eq(expected)]


def read_positions(model: nn.Module, keys: set[str]) -> list[str]:
    return parameters(lambda name, param: "embed_positions" in name and name in keys)(model, keys)


def computed_positions(model: nn.Module, keys: set[str]) -> list[str]:
    """The first of them is that of the angle 0: sines of 0, cosines of 1."""
    found = parameters(lambda name, param: "embed_positions" in name and name not in keys)(model, keys)
    return [name for name in found if set(dict(model.named_parameters())[name][0].tolist()) == {0.0, 1.0}]


ZERO_DIMENSIONAL = Case(parameters(lambda name, param: param.ndim == 0))
WEIGHT_NORM = Case(parameters(lambda name, param: name.endswith("parametrizations.weight.original0")))
READ = Case(read_positions)
COMPUTED = Case(computed_positions, without_positions)
REPLACED_BIAS = Case(replaced_bias)
FROZEN = Case(frozen_by_init)

CASES: dict[str, Case] = {
    "molmo2": Case(lambda model, keys: [key for key in keys if key.endswith("att_proj.weight")]),
    "deepseek_v4": Case(lambda model, keys: [key for key in keys if key == "model.norm.weight"]),
    "chinese_clip": ZERO_DIMENSIONAL,
    "clipseg": ZERO_DIMENSIONAL,
    "owlvit": ZERO_DIMENSIONAL,
    "clap": ZERO_DIMENSIONAL,
    "encodec": WEIGHT_NORM,
    "hubert": WEIGHT_NORM,
    "dac": Case(of_module(nn.ConvTranspose1d)),
    "funnel": Case(of_module(nn.Linear)),
    "youtu": Case(
        lambda model, keys: [
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.Embedding) and module.padding_idx is not None
        ],
        with_padding_token,
    ),
    "marian": Case(read_positions, with_positions),
    "pegasus": READ,
    "roformer": READ,
    "marian-computed": COMPUTED,
    "pegasus-computed": COMPUTED,
    "roformer-computed": COMPUTED,
    "blip-2": REPLACED_BIAS,
    "instructblip": REPLACED_BIAS,
    "recurrent_gemma": Case(normalizer),
    "afmoe": FROZEN,
    "audioflamingo3": FROZEN,
    "ernie4_5_moe": Case(parameters(lambda name, param: param.dtype == torch.float32), dtype=torch.bfloat16),
}


def make(name: str, folder: Path) -> str:
    """Write the case's checkpoint, in one shard; returns its class as `tests.support.parity.find_class` takes it."""
    case = CASES[name]
    made = make_checkpoints(name.removesuffix("-computed"), None, {case.dtype: folder})
    config = json.loads((folder / "config.json").read_text())
    rewritten(folder, folder, lambda tensors: case.change(tensors, config))
    (folder / "config.json").write_text(json.dumps(config))
    return f"{made['module']}:{made['class']}"


def compare_all(cases: dict[str, tuple[Path, str]]) -> dict[str, dict[str, Any]]:
    """What each case's model comes to on this rank. An error in one, on which all ranks agree, leaves the others."""
    found: dict[str, dict[str, Any]] = {}
    for name, (folder, class_name) in cases.items():
        gc.collect()  # the DeepSpeed config lives with the model before, and with it ZeRO-3
        try:
            found[name] = compare_case(CASES[name], folder, class_name)
        except Exception:
            found[name] = {"error": traceback.format_exc()}
    return found


def compare_case(case: Case, folder: Path, class_name: str) -> dict[str, Any]:
    kwargs = {"dtype": case.dtype, "output_loading_info": True}
    plain, plain_info = load_with("plain", class_name, folder, {}, kwargs)
    cause = case.cause(plain, set(load_file(folder / "model.safetensors")))
    streamed, info = load_with("streamed", class_name, folder, ds_config(case.dtype), kwargs)
    return {
        "error": None,
        "cause": cause,
        "differences": differences(streamed, plain, case.dtype),
        "info": info,
        "plain_info": plain_info,
        "reads": [rank["reads"] for rank in streamed.streaming_report.to_dict()["ranks"]],
    }


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, cluster: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[dict[str, dict[str, Any]]]]:
    """All cases of these models in one start of two ranks: what each rank found, by case."""
    folder = tmp_path_factory.mktemp("cases")
    models = chosen(request, CASES, "model_type")
    names = [name for name in CASES if name.removesuffix("-computed") in models]
    cases = {name: (folder / name, make(name, folder / name)) for name in names}
    yield run_ranks(2, compare_all, cases, timeout=240)


def assert_as_plain(results: list[dict[str, dict[str, Any]]], name: str) -> dict[str, Any]:
    """Every parameter, buffer, tie, `requires_grad` and the loading info, on both ranks; returns the first rank's."""
    for rank in results:
        found = rank[name]
        assert found["error"] is None, found["error"]
        assert found["cause"], "the checkpoint has lost what this case is about"
        assert found["info"] == found["plain_info"]
        assert found["differences"] == []
        assert all(found["reads"])
    return results[0][name]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["molmo2"])
def test_split_by_shapes(results: Any, model_type: str) -> None:
    """A fused projection is split by the shapes of the parameters that it becomes, which ZeRO-3 has emptied."""
    assert_as_plain(results, model_type)


@pytest.mark.parametrize("model_type", ["deepseek_v4"])
def test_rename_that_hits_too_much(results: Any, model_type: str) -> None:
    """A rename of the hub's layout also matches a key of the layout that `save_pretrained` writes."""
    assert not assert_as_plain(results, model_type)["info"]["missing_keys"]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["chinese_clip", "clipseg", "owlvit", "clap"])
def test_zero_dimensional_parameters(results: Any, model_type: str) -> None:
    """Their values are the file's, as are their shapes."""
    assert_as_plain(results, model_type)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["encodec", "hubert"])
def test_weight_norm(results: Any, model_type: str) -> None:
    """Both factors of a normed weight come from the file, though initialisation code computes them from the weight."""
    assert_as_plain(results, model_type)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["dac", "funnel", "youtu"])
def test_init_looks_at_shapes(results: Any, model_type: str) -> None:
    """Initialisation code that unpacks a shape, indexes a row, or calls `reset_parameters`, even on loaded values."""
    assert not assert_as_plain(results, model_type)["info"]["missing_keys"]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["", "-computed"], ids=["read", "computed"])
@pytest.mark.parametrize("model_type", ["marian", "pegasus", "roformer"])
def test_sinusoidal_positions(results: Any, model_type: str, where: str) -> None:
    """Initialisation computes them from the parameter's shape, which must not overwrite those that the file has."""
    assert_as_plain(results, model_type + where)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["blip-2", "instructblip"])
def test_bias_replaced_in_init(results: Any, model_type: str) -> None:
    """`__init__` replaces a bias by a new parameter made of others; it is partitioned, and has the file's values."""
    assert_as_plain(results, model_type)


@pytest.mark.parametrize("model_type", ["recurrent_gemma"])
def test_buffer_computed_in_init(results: Any, model_type: str) -> None:
    """A buffer that is in no file, in a dtype of its own."""
    assert_as_plain(results, model_type)


@pytest.mark.parametrize("model_type", ["afmoe", "audioflamingo3"])
def test_frozen_in_init(results: Any, model_type: str) -> None:
    """`requires_grad` is what plain loading makes of it.

    transformers 5 makes each floating-point parameter that it loads trainable, frozen by `__init__` or not; under
    ZeRO-3 stock leaves these frozen.
    """
    assert_as_plain(results, model_type)


@pytest.mark.parametrize("model_type", ["ernie4_5_moe"])
def test_kept_in_fp32(results: Any, model_type: str) -> None:
    """Plain loading keeps them in fp32; ZeRO-3 wants one dtype, and they come to it from the file's fp32 directly."""
    found = assert_as_plain(results, model_type)
    assert any("gate.weight" in name for name in found["cause"])


# ----------------------------------------------------------------------------------------------------- missing keys


class Watched(transformers.BertModel):
    """Notes which parameters are gathered whenever a module's initialisation code is about to run."""

    seen: ClassVar[list[tuple[set[str], set[str]]]] = []

    def _init_weights(self, module: nn.Module) -> None:
        named = dict(self.named_parameters())
        own = {id(param) for param in module.parameters(recurse=False)}
        full = {name for name, param in named.items() if str(getattr(param, "ds_status", "")).endswith(".AVAILABLE")}
        Watched.seen.append((full, {name for name, param in named.items() if id(param) in own}))
        super()._init_weights(module)


def load_watched(folder: Path) -> dict[str, Any]:
    Watched.seen.clear()
    return {**compare(f"{__name__}:Watched", folder, {}), "seen": [pair for pair in Watched.seen if pair[0]]}


def test_missing_keys_are_gathered_by_module(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Whatever initialisation code meets in full are missing parameters of its own module; none is left out."""
    lost = ("word_embeddings", "layer.0.intermediate", "layer.1.attention.self.query.weight")

    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if any(part in name for part in lost)]:
            del tensors[name]

    rewritten(zoo_checkpoint("bert"), tmp_path, change)
    results = run_ranks(2, load_watched, tmp_path)
    assert_same(results)
    for result in results:
        missing = result["info"]["missing_keys"]
        assert len(missing) == 6, "the pooler, which is in no checkpoint of this head, has two"
        assert set().union(*(gathered for gathered, _ in result["seen"])) == missing
        for gathered, own in result["seen"]:
            assert gathered <= own


# ----------------------------------------------------------------------------------------------------------- memory


def resident_growth(folder: Path, how: str) -> dict[str, int]:
    """By how much the resident memory, mapped files included, grows at its peak while `folder` is loaded."""
    import rich.table  # noqa: F401 - what the first load would import
    from transformers import Qwen3MoeForCausalLM  # noqa: F401

    import hf_zero_stream.destinations.deepspeed.partitioned
    import hf_zero_stream.engine.load  # noqa: F401

    config = {**ds_config(torch.bfloat16), "hf_zero_stream": {"staging_bytes": 4 * MIB}}
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    model = load_with(how, "AutoModelForCausalLM", folder, config, {"dtype": "auto"})
    peak = _status("VmHWM")
    return {"growth": peak - before, "partition": sum(param.ds_tensor.nbytes for param in model.parameters())}


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def test_resident_memory(cluster: None, tmp_path: Path) -> None:
    """A rank that mapped the checkpoint and read it would have all of it resident, beside its partition."""
    folder = make_moe_checkpoint(tmp_path / "moe", 2e8, num_layers=1, num_experts=16)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    for found in run_ranks(2, resident_growth, folder, "streamed"):
        assert found["partition"] >= size / 2 - MIB
        assert found["growth"] < found["partition"] + size / 4
