"""Watches how large the tensors are that a piece of code allocates, in every Python thread."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_zero_stream.checkpoint.lazy import LazyTensor


class AllocationWatch:
    """A context that knows the largest allocation of host memory for a tensor inside it.

    Two watchers complement each other. The profiler sees everything that torch's allocator gives to the calling
    thread, also inside kernels and inside the dispatch of tensor subclasses. A dispatch mode sees the storage behind
    every result of an operation; as modes belong to a thread, every thread that starts inside enters one of its own.
    Neither sees memory that is not torch's, such as `bytes`.
    """

    def __init__(self) -> None:
        self.profiled: list[int] = []
        """Bytes of every allocation in the calling thread."""

        self.stored: dict[int, str] = {}
        """Bytes of storages that operations returned, in any thread, with the last operation that did."""

    @property
    def largest(self) -> int:
        return max([0, *self.profiled, *self.stored])

    def __enter__(self) -> AllocationWatch:
        self._run = run = threading.Thread.run

        def run_watched(thread: threading.Thread) -> None:
            with _StorageMode(self.stored):
                run(thread)

        threading.Thread.run = run_watched  # type: ignore[method-assign]
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
        self._profile.__enter__()
        self._mode = _StorageMode(self.stored)
        self._mode.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._mode.__exit__(*exception)
        self._profile.__exit__(*exception)
        threading.Thread.run = self._run  # type: ignore[method-assign]
        for event in self._profile.profiler.kineto_results.events():
            if event.name() == "[memory]" and event.nbytes() > 0:
                self.profiled.append(event.nbytes())


class _StorageMode(TorchDispatchMode):
    def __init__(self, stored: dict[int, str]) -> None:
        super().__init__()
        self._stored = stored

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            # A lazy tensor's storage is on paper only.
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, LazyTensor):
                storage = leaf.untyped_storage()
                if storage.device.type != "meta":
                    self._stored[storage.nbytes()] = str(func)
        return result
