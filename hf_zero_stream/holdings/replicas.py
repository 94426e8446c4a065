"""Parameters that every rank holds whole beside a model that FSDP2 has sharded, such as adapters put on it later.

FSDP2 does not know them. Without help each rank would train its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed import DeviceMesh

from ..errors import refuse_unknown_version


_ENGINE: Any = getattr(Variable, "_execution_engine", None)
"""Autograd's engine; torch's FSDP2 too has it call back at the end of a backward pass."""

refuse_unknown_version("torch", [] if hasattr(_ENGINE, "queue_callback") else ["Variable._execution_engine"])


def keep_alike(params: Sequence[nn.Parameter], mesh: DeviceMesh) -> None:
    """Give all ranks of `mesh` the first one's values of `params`, and from then on the mean of their gradients.

    To be called by all ranks. Gradients are averaged at the end of each backward pass, together, so that a parameter
    may have no gradient on some ranks. Averaging anew what is averaged already changes nothing: so gradients may
    accumulate over backward passes, and the caller may average too.
    """
    for group in mesh.get_all_groups():
        for param in params:
            dist.broadcast(param.data, group=group, group_src=0)
    replicas = _Replicas(params, mesh)
    for param in params:
        is_trained = param.requires_grad
        param.requires_grad_().register_post_accumulate_grad_hook(replicas.note)
        param.requires_grad_(is_trained)  # an adapter that is not active yet may be trained later


class _Replicas:
    def __init__(self, params: Sequence[nn.Parameter], mesh: DeviceMesh) -> None:
        self._params, self._mesh, self._is_queued = list(params), mesh, False

    def note(self, _: torch.Tensor) -> None:
        """Have gradients averaged once the backward pass that runs has ended."""
        if not self._is_queued:
            self._is_queued = True
            _ENGINE.queue_callback(self._average)

    def _average(self) -> None:
        self._is_queued = False
        of_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for param in self._params:
            if param.requires_grad:
                of_dtype.setdefault(param.dtype, []).append(param)
        for params in of_dtype.values():
            # A parameter without a gradient on all ranks must not get one: an optimizer skips it.
            has_grads = torch.tensor([float(param.grad is not None) for param in params]).to(params[0])
            grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in params]
            flat = torch.cat([has_grads, *(grad.reshape(-1) for grad in grads)])
            for group in self._mesh.get_all_groups():
                dist.all_reduce(flat, group=group)
            has_grads, *means = flat.split([len(params), *(param.numel() for param in params)])
            for param, grad, mean, has_grad in zip(params, grads, means, has_grads.tolist(), strict=True):
                if has_grad:
                    grad.copy_(mean.view_as(grad) / self._mesh.size())
                    param.grad = grad
