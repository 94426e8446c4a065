"""What launchers announce in environment variables: the ranks of a host, and what accelerate is going to shard by."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping


LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
"""A rank's number on its host: torchrun, accelerate and deepspeed; Open MPI; Hydra (MPICH, Intel MPI); Slurm."""

_MPI_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", *_MPI_LOCAL_SIZES, "SLURM_NTASKS_PER_NODE")
"""Ranks on this host: torchrun and accelerate; deepspeed; Open MPI; Hydra; Slurm."""


def announced_local_rank(environ: Mapping[str, str] = os.environ) -> int:
    """This rank's number on its host; 0 if no launcher announces it."""
    return _first_number(LOCAL_RANKS, environ, 0)


def announces_local_rank(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher announces this rank's number on its host."""
    return any(name in environ for name in LOCAL_RANKS)


def announced_local_size(environ: Mapping[str, str] = os.environ) -> int:
    """The number of ranks on this host; 1 if no launcher announces it."""
    return _first_number(LOCAL_SIZES, environ, 1)


def announces_zero3() -> bool:
    """Whether accelerate's launcher announces DeepSpeed ZeRO-3."""
    environ = os.environ
    return environ.get("ACCELERATE_USE_DEEPSPEED") == "true" and environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE") == "3"


def announces_zero3_init() -> bool:
    """Whether accelerate's ``zero3_init_flag`` is on, or not set."""
    return os.environ.get("ACCELERATE_DEEPSPEED_ZERO3_INIT", "true") == "true"


def announces_fsdp2() -> bool:
    """Whether accelerate's launcher announces FSDP2, or ``TrainingArguments(fsdp=...)`` announces FSDP.

    The Trainer sets one variable for FSDP of either version; version 1 is what it has to be asked for.
    """
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        return os.environ.get("FSDP_VERSION") == "2"
    return "FSDP_CPU_RAM_EFFICIENT_LOADING" in os.environ


def _first_number(names: tuple[str, ...], environ: Mapping[str, str], default: int) -> int:
    found = next((environ[name] for name in names if name in environ), "")
    match = re.match(r"\d+", found)  # Slurm may write "2(x3)"
    return int(match[0]) if match else default
