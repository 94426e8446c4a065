"""docs/fits.md is what `benchmarks.fits` writes."""

from pathlib import Path

import pytest
from transformers import LlamaConfig

from benchmarks import fits
from benchmarks.sparse_checkpoint import make_sparse_checkpoint
from tests.support.cluster import ROOT


PAGE = (ROOT / "docs" / "fits.md").read_text()


def test_the_page_has_every_model_and_is_whole() -> None:
    head, *sections = PAGE.split("\n## ")
    assert head == fits.HEAD.rstrip("\n") + "\n"
    assert [section.partition("\n")[0] for section in sections] == list(fits.MODELS)
    for section in sections:
        rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith(("| 8 ", "| 64 "))]
        assert {(row[1], row[2]) for row in rows} == {(it, on) for it in ("all", "LoRA") for on in ("ZeRO-3", "FSDP2")}
        for row in rows:
            peak = max(map(int, row[4:7]))
            assert row[8:] == ["fits" if peak <= size else "-" for size in fits.CARDS.values()]


def test_offload_is_planned_where_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2
    )
    place = str(make_sparse_checkpoint(tmp_path / "llama", config))
    monkeypatch.setattr(fits, "GPUS", (2,))
    found = list(fits.rows(place))
    assert [(row.trains, row.engine) for row in found] == [
        (trains, engine) for trains in ("all", "LoRA") for engine in ("ZeRO-3", "FSDP2")
    ]
    assert all(row.on_host == "nothing" and row.fits("80 GB") for row in found)
    monkeypatch.setitem(fits.CARDS, "80 GB", 0)
    assert [row.on_host for row in fits.rows(place) if row.engine == "ZeRO-3"] == list(fits.OFFLOADS) * 2


@pytest.mark.slow
def test_the_figures_of_one_model_are_planned_again() -> None:
    model = "Qwen/Qwen3-30B-A3B"
    folder = make_sparse_checkpoint(fits.CACHE / "qwen3-30b-a3b-bf16", fits.MODELS[model]())
    assert fits.section(model, list(fits.rows(str(folder)))) in PAGE
