"""A spread of model types out of the sweep: every family of conversion ops and of unusual initialisation.

`make sweep` runs all of them.
"""

from pathlib import Path

import pytest

from tests.sweep.destinations import Destination
from tests.sweep.report import failures
from tests.sweep.run import Sweep, make, sweep
from tests.sweep.tables import Table, page, table
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
    result = sweep(
        IN_BF16.split(), checkpoints / "bf16", destinations=[Destination("zero3x3")], dtypes=("bf16", "fp32-bf16")
    )
    assert result.cannot_build == {}
    assert failures(result) == []


@pytest.mark.slow
def test_weights_that_stay_in_files(cluster: None, checkpoints: Path) -> None:
    result = sweep(IN_BF16.split(), checkpoints / "bf16", destinations=[Destination("filesx2")], dtypes=("bf16",))
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


@pytest.mark.slow
def test_a_model_that_fails_loses_no_other(cluster: None, checkpoints: Path) -> None:
    """One checkpoint of three is damaged; the others still get their rows, and so does it."""
    ids = ["bert", "gpt2", "vit"]
    folder = checkpoints / "damaged"
    cases, _ = make(ids, ["fp32"], folder)
    assert list(cases) == ids
    for file in (folder / "gpt2" / "fp32").glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-100])
    result = sweep(ids, folder)
    assert [result.outcome(("ours", "zero3x2", "fp32"), name) for name in ids] == ["equal", "failed", "equal"]
    (line,) = failures(result)
    assert line.startswith("gpt2 (zero3x2 fp32)")


@pytest.mark.slow
def test_shards_and_what_stock_does(cluster: None, checkpoints: Path) -> None:
    """Stock is wrong for NomicBert, and torch does not shard CLIP's scalars, whoever loads."""
    ids, destinations = ["nomic_bert", "clip", "mixtral"], [Destination("fsdp2"), Destination("tp2")]
    result = sweep(ids, checkpoints / "sharded", destinations=destinations, stock=True)
    assert failures(result) == []
    outcomes = {run: {name: result.outcome(run, name) for name in rows} for run, rows in result.rows.items()}
    assert outcomes == {
        ("ours", "fsdp2", "fp32"): {"nomic_bert": "equal", "clip": "refused", "mixtral": "equal"},
        ("stock", "fsdp2", "fp32"): {"nomic_bert": "different", "clip": "failed", "mixtral": "equal"},
        ("ours", "tp2", "fp32"): {"mixtral": "equal"},
        ("stock", "tp2", "fp32"): {"mixtral": "equal"},
    }
    first = table(result)
    rows = Table.parse(first).rows
    assert rows["nomic_bert"]["stock fsdp2 fp32"] == "wrong values: k_proj, q_proj, v_proj (6 tensors)"
    first_page = page(result, "made up 1.0", first, "# Types\n")
    # A later sweep of other models and destinations leaves all of that there.
    later = Sweep(cases={"bert": {"id": "bert", "class": "B", "parameters": 1}})
    later.rows["ours", "zero3x2", "fp32"] = {"bert": {"differences": []}}
    both = table(later, first)
    kept = Table.parse(both).rows
    assert {name: {column: text for column, text in row.items() if text} for name, row in kept.items()} == {
        "bert": {"type": "bert", "class": "B", "parameters": "1", "zero3x2 fp32": "equal"},
        **{name: {column: text for column, text in row.items() if text} for name, row in rows.items()},
    }
    both_page = page(later, "made up 2.0", both, first_page)
    assert set(first_page.splitlines()) - {"3 model types can be built; 0 cannot."} < set(both_page.splitlines())
    assert {"| FSDP2 | made up 1.0 |", "| ZeRO-3 partitions | made up 2.0 |"} < set(both_page.splitlines())


@pytest.mark.slow
def test_what_initialisation_code_gives_and_freezes(cluster: None, checkpoints: Path) -> None:
    """Buffers that a whole model's code fills, a parameter that it freezes, parameters that are not in the files."""
    result = sweep(["falcon_h1", "hrm_text", "marian"], checkpoints / "code", destinations=[Destination("fsdp2")])
    assert len(result.cases) == 3 and failures(result) == []


@pytest.mark.parametrize(
    ("text", "sizes", "world_size", "family"),
    [
        ("zero3x3/5", {}, 3, "zero3"),
        ("filesx2", {}, 2, "files"),
        ("fsdp2-tp2-ep2", {"fsdp_size": 2, "tp_size": 2, "ep_size": 2}, 4, "ep"),
        ("replicate2-fsdp2", {"dp_replicate_size": 2, "fsdp_size": 2}, 4, "fsdp"),
        ("fsdp2-tp2", {"fsdp_size": 2, "tp_size": 2}, 4, "tp"),
    ],
)
def test_destinations(text: str, sizes: dict[str, int], world_size: int, family: str) -> None:
    destination = Destination.parse(text)
    assert (destination.sizes, destination.world_size, destination.family) == (sizes, world_size, family)
    assert destination.every == (5 if text.endswith("/5") else 1)


def test_a_destination_that_is_none() -> None:
    with pytest.raises(ValueError, match="expected zero3xN"):
        Destination.parse("fsdp")


def test_no_type_is_lost_without_a_word() -> None:
    """A type that cannot be shrunk fails the sweep, unless the reason is on record."""
    reasons = {
        "timm": "needs a package: timm",
        "sam_prompt": "no model class takes its config",
        "inkling_audio": "RuntimeError: plain loading fails",
        "new_type": "ValueError: heads do not divide",
    }
    (line,) = failures(Sweep(cannot_build=reasons))
    assert line.startswith("new_type cannot be built: ValueError")
