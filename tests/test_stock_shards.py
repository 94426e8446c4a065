"""Which parameters stock transformers gets wrong under `distributed_config`: predictions, and real stock loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor

from hf_zero_stream.cli import doctor
from hf_zero_stream.loading.stock_shards import StockShards, stock_shards
from hf_zero_stream.reports.text import folded_names
from tests.cluster import run_ranks
from tests.sweep.tiny import make_checkpoints


def load_by_stock(folder: Path, class_name: str) -> tuple[list[str], str]:
    """(sharded parameters that this rank got wrong in a stock load, the error that it raised)."""
    model_class = getattr(transformers, class_name)
    plain = dict(model_class.from_pretrained(folder).named_parameters(remove_duplicate=False))
    try:
        model = model_class.from_pretrained(folder, distributed_config={"fsdp_size": 2})
    except Exception as error:
        return [], f"{type(error).__name__}: {error}"
    wrong = []
    for name, param in model.named_parameters(remove_duplicate=False):
        if isinstance(param, DTensor):
            parts = plain[name].chunk(2)
            mine = parts[dist.get_rank()] if dist.get_rank() < len(parts) else plain[name][:0]
            if not torch.equal(param.to_local(), mine):
                wrong.append(name)
    return wrong, ""


def predicted_and_real(model_type: str, folder: Path) -> tuple[StockShards, set[str], str]:
    made = make_checkpoints(model_type, None, {torch.float32: folder})
    ranks = run_ranks(2, load_by_stock, folder, made["class"])
    return stock_shards(str(folder)), {name for wrong, _ in ranks for name in wrong}, ranks[0][1]


@pytest.mark.parametrize(
    ("model_type", "part"), [("nomic_bert", "q_proj"), ("step3p7", "vision_model"), ("qwen3_moe", ""), ("llama", "")]
)
def test_predictions_are_what_stock_does(cluster: None, tmp_path: Path, model_type: str, part: str) -> None:
    predicted, wrong, error = predicted_and_real(model_type, tmp_path)
    assert not error and not predicted.refused and not predicted.unknown
    assert set(predicted.wrong) == wrong
    assert bool(wrong) == bool(part) and any(part in name for name in [*wrong, ""])
    what_doctor_says = next(doctor._check_stock_shards(tmp_path))
    if not wrong:
        assert what_doctor_says.status == "ok"
        return
    assert what_doctor_says.status == "note" and "wrong values" in what_doctor_says.text
    assert folded_names(predicted.wrong)[0] in what_doctor_says.text


@pytest.mark.parametrize(
    ("model_type", "part", "message"),
    [("gte", "gate_proj", "raising an error"), ("kimi_k25", "q_proj", "automatic conversion of the weights")],
)
def test_what_stock_refuses(cluster: None, tmp_path: Path, model_type: str, part: str, message: str) -> None:
    """The pieces have other shapes than the shards, or cannot be converted: stock notices."""
    predicted, _, error = predicted_and_real(model_type, tmp_path)
    assert message in error
    assert any(part in name for name in predicted.refused)
    assert "cannot load these" in next(doctor._check_stock_shards(tmp_path)).text


def test_folders_without_a_model(tmp_path: Path) -> None:
    assert not list(doctor._check_stock_shards(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "nonsense"}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert next(doctor._check_stock_shards(tmp_path)).status == "no"
