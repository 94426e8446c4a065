"""Another plug-in may say how weights of a quant_method are dequantised; then they stay quantised as ours do."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_zero_stream.plugins.packed.quantisers import by_transformers
from hf_zero_stream.registry import Plugin, plugins
from tests.packed.test_packed_weights import check, dequantising_config, lazy_model
from tests.support.quantised_checkpoints import fp8


def as_fp8(fields: Mapping[str, Any], *, casts: bool) -> Mapping[str, Any] | None:
    """FP8 by another name."""
    return by_transformers({**fields, "quant_method": "fp8"}, casts=casts)


def test_of_another_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fp8(tmp_path)
    how = {"dtype": torch.bfloat16, "quantization_config": dequantising_config(tmp_path)}
    with lazy_model(tmp_path, keep_quantized=True, **how) as dequantised:
        values = {key: param.materialise() for key, param in dequantised.named_parameters()}
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"fp8"', '"of another"'))
    found = (*plugins(), Plugin("another", quantisers={"of another": f"{__name__}:as_fp8"}))
    monkeypatch.setattr("hf_zero_stream.plugins.packed.quantisers.plugins", lambda: found)
    check(tmp_path, torch.bfloat16, values)
