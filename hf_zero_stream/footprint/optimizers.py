"""Temporary tensors that a step of torch's AdamW makes, from torch 2.13's ``torch/optim/adam.py``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal


AdamW = Literal["single", "foreach", "fused"]
"""How torch's AdamW steps: tensor by tensor, over lists of tensors, or in one kernel."""

ADAMW_COPIES: Mapping[AdamW, int] = {"single": 2, "foreach": 1, "fused": 0}
"""Temporary tensors of each way, of the size of what is stepped at once."""


def adamw_copies(adamw: AdamW | None, place: str) -> int:
    """Temporary tensors of torch's AdamW; without a choice it takes lists of tensors where their device allows it."""
    return ADAMW_COPIES[adamw or ("single" if place == "cpu" else "foreach")]


def is_lower(changed: Mapping[str, int], peak: Mapping[str, int]) -> bool:
    """Whether a peak is lower by a tenth in some place."""
    return any(changed.get(place, 0) < 0.9 * nbytes for place, nbytes in peak.items())
