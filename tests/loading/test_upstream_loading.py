"""transformers' own tests of loading under ZeRO-3, resized embeddings and composite models, inside `streaming()`.

Docstrings name the test that each stands for; tests/support/upstream.py says in which files those are.
"""

import gc
import json
import logging
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from transformers import PreTrainedConfig
from transformers.integrations.deepspeed import HfDeepSpeedConfig, deepspeed_config, is_deepspeed_zero3_enabled

from hf_zero_stream import streaming
from hf_zero_stream.holdings.introspection import is_streamed
from tests.support.checkpoint_files import differing
from tests.support.cluster import run_ranks
from tests.support.messages import Messages
from tests.support.parity import (
    assert_same,
    compare,
    differences,
    ds_config,
    find_class,
    load_with,
    three_losses,
    whole,
)
from tests.support.upstream import compare_dtypes, full_state, gpt2_config, is_partitioned, randomise, tiny_checkpoint
from tests.support.zoo import ZOO, Checkpoint


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt2")
    randomise(transformers.GPT2LMHeadModel(gpt2_config())).save_pretrained(folder)
    return folder


# ------------------------------------------------------------------------------------------- detection, and dtypes


class Announcements(Messages):
    """What of transformers' log says that it found ZeRO-3."""

    def __init__(self) -> None:
        super().__init__()
        self.setLevel(logging.INFO)
        transformers.utils.logging.set_verbosity_info()
        transformers.utils.logging.get_logger("transformers").addHandler(self)

    def take(self) -> list[str]:
        """Those since the last call."""
        found = [message for message in self.found if "ZeRO-3" in message]
        self.found.clear()
        return found


def load_with_and_without_zero3(folder: Path, section: str) -> dict[str, Any]:
    announcements = Announcements()
    config: dict[str, Any] = {"train_batch_size": 2, "zero_optimization": {"stage": 3}}
    if section:
        config[section] = {"enabled": True}
    plain = transformers.AutoModel.from_pretrained(folder)
    announced = [announcements.take()]
    kept = HfDeepSpeedConfig(config)
    seen = [kept.is_zero3(), is_deepspeed_zero3_enabled()]
    with streaming():
        model = transformers.AutoModel.from_pretrained(folder)
        seen.append(is_deepspeed_zero3_enabled())
    announced.append(announcements.take())
    seen.append(is_deepspeed_zero3_enabled())
    found_config = deepspeed_config()
    del kept
    seen.append(is_deepspeed_zero3_enabled())
    kept = HfDeepSpeedConfig(config)
    dtype = {"": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[section]
    found = {
        "seen": seen,
        "config": found_config == config,
        "dtypes": {param.dtype for param in model.parameters()},
        "expected": dtype,
        "differences": differences(model, plain, dtype),
    }

    del config["zero_optimization"]
    kept = HfDeepSpeedConfig(config)
    with streaming():
        again = transformers.AutoModel.from_pretrained(folder)
    announced.append(announcements.take())
    pairs = zip(again.parameters(), plain.parameters(), strict=True)
    return {
        **found,
        "announced": announced,
        "seen_after": [kept.is_zero3(), is_deepspeed_zero3_enabled(), hasattr(next(again.parameters()), "ds_id")],
        "plain_after": all(torch.equal(mine, theirs) for mine, theirs in pairs),
    }


@pytest.mark.parametrize("section", ["", "fp16", "bf16"], ids=["default", "fp16", "bf16"])
def test_zero3_is_detected_until_it_is_removed(cluster: None, zoo_checkpoint: Checkpoint, section: str) -> None:
    """`test_init_zero3`: every parameter has DeepSpeed's dtype, and ZeRO-3 is on before, in and after the load.

    As upstream tells it, by an INFO line, and as the model itself shows it.
    """
    announcement = "Detected DeepSpeed ZeRO-3: activating zero.init() for this model"
    for found in run_ranks(2, load_with_and_without_zero3, zoo_checkpoint("t5"), section):
        assert found["announced"] == [[], [announcement], []]
        assert found["seen"] == [True, True, True, True, False], "on until its object goes, though the model stays"
        assert found["config"]
        assert found["dtypes"] == {found["expected"]}
        assert found["differences"] == []
        assert found["seen_after"] == [False, False, False]
        assert found["plain_after"]


@pytest.mark.parametrize("ds_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_dtype_rules(cluster: None, zoo_checkpoint: Checkpoint, ds_dtype: torch.dtype) -> None:
    """`test_model_from_pretrained_dtype`: `dtype` decides over config and buffers, DeepSpeed over parameters."""
    folder = zoo_checkpoint("deepseek_v3", torch.bfloat16)
    dtypes = ["auto", None, "float32", torch.float16, torch.bfloat16]
    for rank in run_ranks(2, compare_dtypes, folder, "AutoModelForCausalLM", dtypes, ds_dtype):
        for found in rank.values():
            assert found["differences"] == []
            assert found["dtypes"] == found["expected"]
        assert [rank[str(dtype)]["dtypes"][""] for dtype in dtypes[-2:]] == dtypes[-2:]
        assert rank["auto"]["dtypes"][""] == torch.bfloat16


# ----------------------------------------------------------------------------------------------- missing parameters


class HeadOnGPT2(transformers.GPT2PreTrainedModel):
    """A head that no checkpoint has, with initialisation code that asks nobody and writes into `.data`."""

    def __init__(self, config: transformers.GPT2Config) -> None:
        super().__init__(config)
        self.transformer = transformers.GPT2Model(config)
        self.new_head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is self.new_head:
            module.weight.data.fill_(-100.0)
            nn.init.constant_(module.bias.data, 100.0)


def load_with_new_head(folder: Path, stage: int) -> dict[str, Any]:
    messages = Messages()
    transformers.utils.logging.get_logger("transformers").addHandler(messages)
    config = {**ds_config(), "zero_optimization": {"stage": stage}}
    model = load_with("streamed", f"{__name__}:HeadOnGPT2", folder, config, {})
    text = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(messages.found))
    return {
        "partitioned": is_partitioned(model),
        "weight": whole(model.new_head.weight).unique().tolist(),
        "bias": whole(model.new_head.bias).unique().tolist(),
        "reported": sorted(re.findall(r"new_head\.(\w+)\s*\|\s*MISSING", text)),
    }


@pytest.mark.parametrize("stage", [3, 0])
def test_missing_head(cluster: None, gpt2: Path, stage: int) -> None:
    """`test_init_zero3_missing_params`: initialised by the model's own code, and in the LOAD REPORT of every rank."""
    for found in run_ranks(2, load_with_new_head, gpt2, stage):
        assert found["partitioned"] is (stage == 3)
        assert (found["weight"], found["bias"]) == ([-100.0], [100.0])
        assert found["reported"] == ["bias", "weight"]


def load_with_seeds(folder: Path, class_name: str) -> dict[str, Any]:
    """Plain loading with rank 0's seed, and a streamed load in which each rank has another."""
    torch.manual_seed(0)
    plain, info = find_class(class_name).from_pretrained(folder, output_loading_info=True)
    after_plain = torch.get_rng_state()
    torch.manual_seed(dist.get_rank())
    with streaming():
        streamed = find_class(class_name).from_pretrained(folder, ds_config=ds_config())
    return {
        "missing": info["missing_keys"],
        "differences": differences(streamed, plain, torch.float32),
        "same_random_state": torch.equal(torch.get_rng_state(), after_plain),
    }


def test_missing_parameters_are_those_of_rank_0(cluster: None, gpt2: Path) -> None:
    """`test_init_zero3_missing_params`, for random values: ranks with different seeds agree on one parameter."""
    ranks = run_ranks(2, load_with_seeds, gpt2, "GPT2ForSequenceClassification")
    for found in ranks:
        assert found["missing"] == {"score.weight"}
        assert found["differences"] == []
    assert ranks[0]["same_random_state"], "what is drawn after the load is what follows a plain load"


def weights_of_config(auto_class: str, config: PreTrainedConfig, name: str, folder: Path) -> dict[str, Any]:
    """`from_config` inside `streaming()` after a streamed load, and outside it, with the same seed."""
    from_config = getattr(transformers, auto_class).from_config
    torch.manual_seed(42)
    baseline = from_config(config, dtype=torch.bfloat16)
    kept = HfDeepSpeedConfig(ds_config(torch.bfloat16))
    with streaming():
        transformers.AutoModelForCausalLM.from_pretrained(folder)
        torch.manual_seed(42)
        inside = from_config(config)
    torch.manual_seed(42)
    outside = from_config(config)
    del kept
    stds = [whole(model.get_parameter(name)).float().std().item() for model in (inside, baseline)]
    return {
        "partitioned": is_partitioned(inside),
        "dtypes": {param.dtype for param in inside.parameters()},
        "streamed": is_streamed(inside),
        "ratio": stds[0] / stds[1],
        "not_as_stock": [
            name
            for (name, mine), theirs in zip(inside.named_parameters(), outside.parameters(), strict=True)
            if not torch.equal(whole(mine), whole(theirs))
        ],
    }


@pytest.mark.sample(1)
@pytest.mark.parametrize("auto_class", ["AutoModelForCausalLM", "AutoModelForImageTextToText"])
def test_from_config_is_left_to_stock(cluster: None, gpt2: Path, tmp_path: Path, auto_class: str) -> None:
    """`test_from_config_zero3_weight_init`: partitioned and initialised as without `streaming()`, to the last bit.

    The second model builds two others by `from_config` inside its `__init__`.
    """
    config: PreTrainedConfig = gpt2_config()
    name = "transformer.h.0.attn.c_attn.weight"
    if auto_class == "AutoModelForImageTextToText":
        config = transformers.AutoConfig.from_pretrained(tiny_checkpoint("llava", tmp_path))
        name = "model.language_model.layers.0.self_attn.q_proj.weight"
    for found in run_ranks(2, weights_of_config, auto_class, config, name, gpt2):
        assert found["partitioned"] and not found["streamed"]
        assert found["dtypes"] == {torch.bfloat16}
        assert found["ratio"] == pytest.approx(1.0, abs=0.3)
        assert found["not_as_stock"] == []


# ------------------------------------------------------------------------------------------------ resized embeddings


RESIZES: dict[str, tuple[dict[str, Any], int]] = {
    "larger": ({"new_num_tokens": 321}, 321),
    "larger, normally distributed": ({"new_num_tokens": 321, "mean_resizing": False}, 321),
    "smaller": ({"new_num_tokens": 300}, 300),
    # Without a number transformers pads the number of rows that ZeRO-3 shows, which is 0, streamed or not.
    "padded": ({"new_num_tokens": 311, "pad_to_multiple_of": 64}, 320),
}


def resize_both(
    name: str, folder: Path, arguments: dict[str, Any], inside: bool, output: Path | None
) -> dict[str, Any]:
    """Resize the embeddings of a plain and of a streamed model alike: what differs then.

    Args:
        inside: resize inside `streaming()`.
        output: where to save the streamed model as it is then; with it, both models are trained too.
    """
    found: dict[str, dict[str, Any]] = {}
    for how in ("plain", "streamed"):
        gc.collect()
        model = load_with(how, ZOO[name].auto_class, folder, ds_config(), {})
        torch.manual_seed(3)
        with streaming() if inside and how == "streamed" else nullcontext():
            model.resize_token_embeddings(**arguments)
        weights = {key: whole(value) for key, value in model.named_parameters(remove_duplicate=False)}
        if how == "streamed" and output is not None:
            model.save_pretrained(output, state_dict=full_state(model))
        ends = [model.get_input_embeddings(), model.get_output_embeddings()]
        found[how] = {
            "weights": weights,
            "rows": {whole(end.weight).shape[0] for end in ends} | {model.config.vocab_size},
            "tied": ends[0].weight is ends[1].weight,
        }
        if output is not None:
            engine, *_ = deepspeed.initialize(model=model, config=ds_config())
            found[how]["losses"] = three_losses(engine, ZOO[name].inputs)
            del engine
        del model, ends
    plain, streamed = (found[how].pop("weights") for how in ("plain", "streamed"))
    return {**found, "differences": differing(streamed, plain)}


def resize_all(name: str, folder: Path, output: Path) -> dict[str, dict[str, Any]]:
    return {
        what: resize_both(name, folder, arguments, what == "smaller", output if what == "larger" else None)
        for what, (arguments, _) in RESIZES.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3", "t5"])
def test_resized_embeddings(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path, name: str) -> None:
    """`test_resize_token_embeddings_zero3`: old rows stay, new ones are initialised, ties hold, and the model trains.

    Saved, the resized model loads again.
    """
    for rank in run_ranks(2, resize_all, name, zoo_checkpoint(name), tmp_path):
        for what, (_, rows) in RESIZES.items():
            found = rank[what]
            assert found["differences"] == [], what
            assert found["streamed"] == found["plain"], what
            assert found["streamed"]["rows"] == {rows}, what
            assert found["streamed"]["tied"] is (name != "llama"), what
        assert len(set(rank["larger"]["streamed"]["losses"])) == 3
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == 321
    results = run_ranks(2, compare, ZOO[name].auto_class, tmp_path, {})
    assert_same(results)
    assert not any(results[0]["info"].values())


# ------------------------------------------------------------------------------------------------- composite models


def pair(how: str, class_name: str, method: str, folders: list[Path], kwargs: dict[str, Any]) -> Any:
    kept = HfDeepSpeedConfig(ds_config()) if how == "streamed" else None
    torch.manual_seed(0)
    with streaming():
        model = getattr(getattr(transformers, class_name), method)(*map(str, folders), **kwargs)
    return model, kept


def compare_pairs(class_name: str, method: str, folders: list[Path], kwargs: dict[str, Any]) -> list[str]:
    plain, _ = pair("plain", class_name, method, folders, kwargs)
    streamed, kept = pair("streamed", class_name, method, folders, kwargs)
    both = (streamed, plain)  # of which the plain one has the checkpoint's dtype
    ours, theirs = ({name: whole(param).float() for name, param in model.named_parameters()} for model in both)
    parts = [name for name, part in streamed.named_children() if is_streamed(part)]
    return [*differing(ours, theirs), *([] if len(parts) == 2 else [f"streamed: {parts}"])]


@pytest.mark.slow
def test_model_of_two_loads(cluster: None, zoo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """`EncoderDecoderModelTest`, `VisionTextDualEncoderIntegrationTest`: one call that loads two checkpoints."""
    bert, clip = zoo_checkpoint("bert"), tiny_checkpoint("clip", tmp_path)
    kwargs = {"decoder_is_decoder": True, "decoder_add_cross_attention": True}
    method = "from_encoder_decoder_pretrained"
    assert run_ranks(2, compare_pairs, "EncoderDecoderModel", method, [bert, bert], kwargs) == [[], []]
    method = "from_vision_text_pretrained"
    assert run_ranks(2, compare_pairs, "VisionTextDualEncoderModel", method, [clip, bert], {}) == [[], []]
