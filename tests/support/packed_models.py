"""The models of the packed matrices: each format that stays quantised, dense and as a mixture where it has one."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.quantised_checkpoints import (
    SCHEMES,
    bitsandbytes,
    compressed_tensors,
    dense_fp8,
    fp4_experts,
    fp8,
    mxfp4,
)


WITHOUT_EXPERTS = ("float8 by block", "int8 by channel", "int4 with zero points", "int4 with zero points by channel")
"""Schemes of compressed-tensors in which transformers dequantises no experts."""

BITSANDBYTES = ("nf4", "fp4", "double nf4", "int8")


def _bitsandbytes(folder: Path, kind: str, experts: int, width: int = 64) -> None:
    bitsandbytes(folder, kind, width=width, dequantised=folder / "plain", experts=experts)


MODELS: dict[str, Callable[..., Any]] = {
    "FP8 by blocks, dense": dense_fp8,
    "FP8 by blocks, mixture": fp8,
    "FP8 with experts in float4, mixture": fp4_experts,
    "MXFP4, mixture": mxfp4,
    **{f"{name}, dense": partial(compressed_tensors, scheme_name=name, experts=False) for name in SCHEMES},
    **{
        f"{name}, mixture": partial(compressed_tensors, scheme_name=name, experts=True)
        for name in SCHEMES
        if name not in WITHOUT_EXPERTS
    },
    **{f"{kind}, dense": partial(_bitsandbytes, kind=kind, experts=0) for kind in BITSANDBYTES},
    **{f"{kind}, mixture": partial(_bitsandbytes, kind=kind, experts=3) for kind in BITSANDBYTES},
}
"""Each makes a checkpoint in a folder; the argument `width` makes it larger."""


class Folders:
    """Checkpoints of `MODELS`, made when they are first asked for."""

    def __init__(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self._factory = tmp_path_factory
        self._made: dict[tuple[str, int], Path] = {}

    def __call__(self, name: str, width: int = 0) -> Path:
        if (name, width) not in self._made:
            folder = self._made[name, width] = self._factory.mktemp("checkpoint")
            MODELS[name](folder, **{"width": width} if width else {})
        return self._made[name, width]


def in_file(folder: Path) -> int:
    """Bytes of the tensors of the checkpoint in `folder`."""
    with open(folder / "model.safetensors", "rb") as file:
        header = int.from_bytes(file.read(8), "little")
    return (folder / "model.safetensors").stat().st_size - 8 - header
