"""The environment variables of launchers that this package reads.

Ranks and sizes only count for a rank that cannot ask the others where they run (see :mod:`.topology`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping


__all__ = [
    "LOCAL_RANKS",
    "LOCAL_SIZES",
    "agent_holds_store",
    "announced_local_rank",
    "announced_local_size",
    "announces_zero3",
    "announces_zero3_init",
]

LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
"""A rank's number on its host: torchrun, accelerate and deepspeed; Open MPI; Hydra (MPICH, Intel MPI); Slurm."""

_MPI_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", *_MPI_LOCAL_SIZES, "SLURM_NTASKS_PER_NODE")
"""Ranks on this host: torchrun and accelerate; deepspeed; Open MPI; Hydra; Slurm."""


def announced_local_rank(environ: Mapping[str, str] = os.environ) -> int:
    """This rank's number on its host; 0 if no launcher announces it."""
    return _first_number(LOCAL_RANKS, environ, 0)


def announced_local_size(environ: Mapping[str, str] = os.environ) -> int:
    """The number of ranks on this host; 1 if no launcher announces it."""
    return _first_number(LOCAL_SIZES, environ, 1)


def agent_holds_store() -> bool:
    """Whether torchrun's agent, and not rank 0, holds the key-value store of the process group."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def announces_zero3(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether accelerate's launcher announces DeepSpeed ZeRO-3."""
    return environ.get("ACCELERATE_USE_DEEPSPEED") == "true" and environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE") == "3"


def announces_zero3_init(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether accelerate's ``zero3_init_flag`` is on, or not set."""
    return environ.get("ACCELERATE_DEEPSPEED_ZERO3_INIT", "true") == "true"


def _first_number(names: tuple[str, ...], environ: Mapping[str, str], default: int) -> int:
    found = next((environ[name] for name in names if name in environ), "")
    match = re.match(r"\d+", found)  # Slurm may write "2(x3)"
    return int(match[0]) if match else default
