"""The random numbers of every rank: Python's, NumPy's, torch's on the CPU and on its device."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from transformers.utils import logging

from .. import accelerators
from ..checkpoint.urls import on_this_host
from ..errors import CheckpointError, UnsupportedError


logger = logging.get_logger(__name__)

FILE = "rng.safetensors"

_OF_NUMPY = "MT19937"
_ON_HOST = ("python", "python_gauss", "numpy", "numpy_gauss", "torch")

Arrays = dict[str, torch.Tensor]


def write_ranks(of_ranks: Sequence[Arrays], path: Path) -> None:
    """Write what :func:`of_this_rank` has given on each rank, in order of rank."""
    named = ((rank, name, array) for rank, arrays in enumerate(of_ranks) for name, array in arrays.items())
    # By a file of Python's own: safetensors' has no other reader than its owner.
    path.write_bytes(save({f"{rank}.{name}": array for rank, name, array in named}))


def read_ranks(path: Path) -> bytes:
    """What :func:`write_ranks` has written.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        return on_this_host(path).read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: the random numbers of the ranks cannot be read: {error}") from error


def restore_rank(path: Path, of_ranks: bytes, rank: int) -> bool:
    """Go on with the random numbers of `rank`, of those that :func:`read_ranks` has read from `path`.

    Returns False if no such rank was there.

    Raises:
        CheckpointError: the file is not one of :func:`write_ranks`.
    """
    prefix = f"{rank}."
    try:
        found = {name.removeprefix(prefix): it for name, it in load(of_ranks).items() if name.startswith(prefix)}
    except SafetensorError as error:
        raise CheckpointError(f"{path}: the random numbers of the ranks cannot be read: {error}") from error
    if not found:
        return False
    try:
        version, *numbers, index = found["python"].tolist()
        gauss = found.get("python_gauss", torch.empty(0)).tolist()
        random.setstate((version, (*numbers, index), *(gauss or [None])))
        keys, position = found["numpy"][:-1], int(found["numpy"][-1])
        second = found.get("numpy_gauss", torch.empty(0)).tolist()
        np.random.set_state((_OF_NUMPY, keys.numpy().astype(np.uint32), position, len(second), *(second or [0.0])))
        torch.set_rng_state(found["torch"])
        kind = accelerators.kind()
        if kind is not None and kind in found:
            accelerators.set_random_state(kind, found[kind])
        elif kind is not None:
            logger.warning_once(f"{path}: it was saved without a {kind} device, so random numbers on that are new.")
        if others := sorted(found.keys() - {*_ON_HOST, kind}):
            logger.warning_once(
                f"{path}: it was saved with random numbers of {', '.join(others)}. Without such a device they are "
                "left out."
            )
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        what = f"the random numbers of rank {rank} are not what save_state writes"
        raise CheckpointError(f"{path}: {what}: {error}") from error
    return True


def of_this_rank() -> Arrays:
    """Raises an UnsupportedError if NumPy's global generator is not the one that it comes with."""
    # Both make normal numbers in pairs, and keep the second one of a pair.
    version, numbers, gauss = random.getstate()
    of_numpy: Any = np.random.get_state(legacy=False)
    if of_numpy["bit_generator"] != _OF_NUMPY:
        raise UnsupportedError(
            f"save_state: expected NumPy's global random numbers to be made by {_OF_NUMPY}; found "
            f"{of_numpy['bit_generator']}, of which no state is kept. Leave out np.random.set_bit_generator, and draw "
            "from a np.random.Generator of your own."
        )
    arrays = {
        "python": torch.tensor([version, *numbers], dtype=torch.int64),
        "numpy": torch.tensor([*map(int, of_numpy["state"]["key"]), of_numpy["state"]["pos"]], dtype=torch.int64),
        "torch": torch.get_rng_state(),
    }
    if gauss is not None:
        arrays["python_gauss"] = torch.tensor([gauss], dtype=torch.float64)
    if of_numpy["has_gauss"]:
        arrays["numpy_gauss"] = torch.tensor([of_numpy["gauss"]], dtype=torch.float64)
    kind = accelerators.kind()
    if kind is not None:
        arrays[kind] = accelerators.random_state(kind)
    return arrays
