"""In place of transformers' module of this name, which is in no source distribution: ranks of a CPU, over gloo."""

import functools
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing


multiprocessing.set_forkserver_preload(["torch", "transformers.modeling_utils", "transformers.testing_utils"])


def _get_distributed_device_type() -> str:
    return "cpu"


def _get_distributed_backend() -> str:
    return "gloo"


def _get_rank_device(rank: int) -> torch.device:
    return torch.device("cpu")


def _set_rank_device(rank: int) -> None:
    torch.set_num_threads(1)


def _start_rank_processes(function: Callable[..., None], args: tuple[Any, ...] = (), nprocs: int = 1) -> None:
    torch.multiprocessing.start_processes(function, args=args, nprocs=nprocs, start_method="forkserver")


def _run_rank(rank: int, function: Callable[..., None], args: Any, kwargs: Any, world_size: int, store: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    try:
        function(rank, *args, **kwargs)
    finally:
        dist.destroy_process_group()


def run_distributed(world_size: int = 2) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def of(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> None:
            with tempfile.TemporaryDirectory() as folder:
                _start_rank_processes(
                    _run_rank, (function, args, kwargs, world_size, os.path.join(folder, "store")), world_size
                )

        return call

    return of
