"""A spread of model types out of the sweep: every family of conversion ops and of unusual initialisation.

`make sweep` runs all of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sweep.report import failures
from tests.sweep.run import make, sweep
from tests.sweep.tiny import all_types, candidate_classes


FAMILIES = {
    "experts": "qwen3_moe mixtral deepseek_v2 deepseek_v4 ernie4_5_moe ernie4_5_vl_moe glm4_moe granitemoe jamba "
    "minimax phimoe afmoe zaya nemotron_h lfm2_moe olmoe gpt_oss llama4",
    "text": "llama gemma3_text falcon gpt2 gpt_neox bloom mamba rwkv recurrent_gemma youtu modernbert olmo3 exaone4",
    "encoders": "bert albert deberta-v2 funnel roformer electra xlnet canine big_bird reformer",
    "encoder_decoders": "t5 bart marian pegasus m2m_100 led prophetnet switch_transformers",
    "vision": "clip chinese_clip siglip blip blip-2 instructblip qwen2_vl qwen3_vl_moe llava molmo2 paligemma "
    "vit beit swin rt_detr convnext sam dpt",
    "audio": "wav2vec2 hubert whisper dac encodec audioflamingo3 speecht5 vits musicgen patchtst",
}
IN_BF16 = (
    "qwen3_moe deepseek_v4 t5 clip wav2vec2 blip-2 molmo2 marian recurrent_gemma ernie4_5_vl_moe switch_transformers"
)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sweep")


@pytest.mark.slow
@pytest.mark.parametrize("family", list(FAMILIES))
def test_loads_as_plain(cluster: None, checkpoints: Path, family: str) -> None:
    result = sweep(FAMILIES[family].split(), checkpoints / family, batch=10)
    assert result.cannot_build == {}
    assert failures(result) == []


@pytest.mark.slow
def test_in_bf16_on_three_ranks(cluster: None, checkpoints: Path) -> None:
    result = sweep(IN_BF16.split(), checkpoints / "bf16", worlds=(3,), dtypes=("bf16", "fp32-bf16"))
    assert result.cannot_build == {}
    assert failures(result) == []


def test_the_spread_is_wide() -> None:
    types = {name for names in FAMILIES.values() for name in names.split()}
    assert len(types) >= 60
    assert types <= set(all_types())


def test_a_class_is_found_for_parts_of_composite_models() -> None:
    assert candidate_classes("siglip_text_model")[0].__name__ == "SiglipTextModel"
    assert candidate_classes("blip_text_model")[0].__name__ == "BlipTextModel"
    assert candidate_classes("bert")[0].__name__ == "BertForMaskedLM"


def test_a_model_that_fails_loses_no_other(cluster: None, checkpoints: Path) -> None:
    """One checkpoint of three is damaged; the others still get their rows, and so does it."""
    ids = ["bert", "gpt2", "vit"]
    folder = checkpoints / "damaged"
    cases, _ = make(ids, ["fp32"], folder)
    assert list(cases) == ids
    for file in (folder / "gpt2" / "fp32").glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-100])
    result = sweep(ids, folder)
    assert [result.outcome("ours", "fp32", 2, name) for name in ids] == ["equal", "failed", "equal"]
    (line,) = failures(result)
    assert line.startswith("gpt2 (fp32, 2 ranks)")
