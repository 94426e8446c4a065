"""What a state has of random numbers, and has not, is said."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from hf_zero_stream.errors import UnsupportedError
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


def test_without_such_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved on a GPU, resumed on a CPU."""
    said: list[str] = []
    monkeypatch.setattr(rng.logger, "warning_once", said.append)
    path = tmp_path / rng.FILE
    rng.write_ranks([rng.of_this_rank() | {"cuda": torch.zeros(16, dtype=torch.uint8)}], path)
    assert rng.restore_rank(path, 0)
    (line,) = said
    assert "random numbers of cuda. Without such a device they are left out" in line


def test_pairs(tmp_path: Path) -> None:
    """Both Python and NumPy keep the second normal number of a pair."""
    random.gauss(0, 1), np.random.normal()
    rng.write_ranks([rng.of_this_rank()], tmp_path / rng.FILE)
    expected = [random.gauss(0, 1), random.random(), *np.random.normal(size=3)]
    rng.restore_rank(tmp_path / rng.FILE, 0)
    assert [random.gauss(0, 1), random.random(), *np.random.normal(size=3)] == expected


def test_another_generator_of_numpy() -> None:
    usual = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        with pytest.raises(UnsupportedError, match="made by MT19937; found PCG64, of which no state is kept"):
            rng.of_this_rank()
    finally:
        np.random.set_bit_generator(usual)
