"""Running out of memory, said in terms of what it was wanted for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..errors import LoadError


__all__ = ["allocating", "is_out_of_memory"]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory could not be allocated, in Python, by torch on a CPU or on a device."""
    on_cpu = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return on_cpu or isinstance(error, (MemoryError, torch.OutOfMemoryError))


@contextmanager
def allocating(name: str, nbytes: int, device: torch.device | str, rank: int) -> Iterator[None]:
    """Raise a LoadError that says that `nbytes` bytes were wanted for `name`, if there is not enough memory inside."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise LoadError(
            f"out of memory on rank {rank}: {nbytes} bytes for {name} on {device}. Use more ranks or offload_param, "
            "or free what else is there; plan() says beforehand what a rank needs."
        ) from error
