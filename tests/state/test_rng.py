"""What a state has of random numbers, and has not, is said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_zero_stream.state import rng


def test_of_another_kind_of_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved on a CPU, resumed on a GPU: the generator of that begins anew, with a warning."""
    said: list[str] = []
    monkeypatch.setattr(rng.logger, "warning_once", said.append)
    path = tmp_path / rng.FILE
    rng.write_ranks([rng.of_this_rank()], path)
    expected = torch.rand(2)
    monkeypatch.setattr(rng.accelerators, "kind", lambda: "cuda")
    assert rng.restore_rank(path, 0)
    assert torch.equal(torch.rand(2), expected)
    (line,) = said
    assert "saved without a cuda device" in line
