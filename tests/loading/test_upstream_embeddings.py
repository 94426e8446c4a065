"""transformers' own tests of resized embeddings and of composite models hold for streamed models.

Docstrings name the test that each stands for; tests/support/upstream.py says in which files those are.
"""

import gc
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import transformers
from transformers.integrations.deepspeed import HfDeepSpeedConfig

from hf_zero_stream import streaming
from tests.support.checkpoint_files import differing
from tests.support.cluster import run_ranks
from tests.support.loading import assert_same, compare, load_with
from tests.support.parity import ds_config, three_losses
from tests.support.upstream import compare_dtypes, full_state, tiny_checkpoint
from tests.support.whole import whole
from tests.support.zoo import ZOO, Checkpoint


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


@pytest.fixture(scope="module")
def composites(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model type -> a tiny checkpoint in bf16."""
    root = tmp_path_factory.mktemp("composites")
    return {model_type: tiny_checkpoint(model_type, root / model_type) for model_type in ("clip", "llava")}


COMPOSITES = [
    ("clip", "CLIPModel"),
    ("clip", "CLIPTextModel"),
    ("clip", "CLIPVisionModelWithProjection"),
    ("clip", "AutoModel"),
    ("llava", "LlavaForConditionalGeneration"),
    ("llava", "LlavaModel"),
    ("llava", "AutoModelForImageTextToText"),
]


@pytest.mark.parametrize(("model_type", "class_name"), COMPOSITES)
@pytest.mark.sample(2)
def test_composite_models(cluster: None, composites: dict[str, Path], model_type: str, class_name: str) -> None:
    """`test_model_from_pretrained_dtype_composite`..., whole and in part: one dtype, or one for each sub-config."""
    dtypes: list[Any] = ["auto", "float32"]
    if class_name not in ("CLIPTextModel", "CLIPVisionModelWithProjection"):
        dtypes.append({"text_config": "float32", "vision_config": "float16", "": "bfloat16"})
    for rank in run_ranks(2, compare_dtypes, composites[model_type], class_name, dtypes, torch.bfloat16):
        for found in rank.values():
            assert found["differences"] == []
            assert found["dtypes"] == found["expected"]
        assert rank["auto"]["dtypes"][""] == torch.bfloat16


def pair(how: str, class_name: str, method: str, folders: list[Path], kwargs: dict[str, Any]) -> Any:
    kept = HfDeepSpeedConfig(ds_config()) if how == "streamed" else None
    torch.manual_seed(0)
    with streaming():
        model = getattr(getattr(transformers, class_name), method)(*map(str, folders), **kwargs)
    return model, kept


def compare_pairs(class_name: str, method: str, folders: list[Path], kwargs: dict[str, Any]) -> list[str]:
    plain, _ = pair("plain", class_name, method, folders, kwargs)
    streamed, kept = pair("streamed", class_name, method, folders, kwargs)
    ours, theirs = ({name: whole(param) for name, param in model.named_parameters()} for model in (streamed, plain))
    parts = [name for name, part in streamed.named_children() if hasattr(part, "streaming_report")]
    return [*differing(ours, theirs), *([] if len(parts) == 2 else [f"streamed: {parts}"])]


@pytest.mark.slow
def test_model_of_two_loads(cluster: None, zoo_checkpoint: Checkpoint, composites: dict[str, Path]) -> None:
    """`EncoderDecoderModelTest`, `VisionTextDualEncoderIntegrationTest`: one call that loads two checkpoints."""
    bert, clip = zoo_checkpoint("bert"), composites["clip"]
    kwargs = {"decoder_is_decoder": True, "decoder_add_cross_attention": True}
    method = "from_encoder_decoder_pretrained"
    assert run_ranks(2, compare_pairs, "EncoderDecoderModel", method, [bert, bert], kwargs) == [[], []]
    method = "from_vision_text_pretrained"
    assert run_ranks(2, compare_pairs, "VisionTextDualEncoderModel", method, [clip, bert], {}) == [[], []]
