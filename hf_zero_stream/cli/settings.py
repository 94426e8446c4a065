"""The DeepSpeed config that commands plan and load with."""

from __future__ import annotations

from enum import Enum
from typing import Any

import typer

from .output import read_json_option


__all__ = ["Dtype", "zero3_config"]


class Dtype(str, Enum):
    """Dtypes that DeepSpeed trains in."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


def zero3_config(path: str | None, dtype: Dtype | None) -> dict[str, Any]:
    """The DeepSpeed config at `path`, default plain ZeRO-3, made to train in `dtype`.

    Raises:
        typer.BadParameter: it cannot be read, or its stage is another.
    """
    config = read_json_option("--ds-config", path) if path else {"zero_optimization": {"stage": 3}}
    zero = config.get("zero_optimization")
    stage = zero.get("stage") if isinstance(zero, dict) else None
    if stage != 3:
        raise typer.BadParameter(f"--ds-config: expected zero_optimization.stage 3; found {stage!r} in {path}")
    if dtype is not None:
        config = {key: value for key, value in config.items() if key not in ("bf16", "bfloat16", "fp16")}
        if dtype is not Dtype.fp32:
            config[dtype.value] = {"enabled": True}
    return config
