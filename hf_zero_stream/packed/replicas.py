"""Parameters that every rank holds whole beside a model that FSDP2 has sharded, such as adapters put on it later.

FSDP2 does not know them. Without help each rank would train its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh


__all__ = ["keep_alike"]


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
        param.register_post_accumulate_grad_hook(replicas.note)


class _Replicas:
    def __init__(self, params: Sequence[nn.Parameter], mesh: DeviceMesh) -> None:
        self._params, self._mesh, self._is_queued = list(params), mesh, False

    def note(self, _: torch.Tensor) -> None:
        """Have gradients averaged once the backward pass that runs has ended."""
        if not self._is_queued:
            self._is_queued = True
            Variable._execution_engine.queue_callback(self._average)

    def _average(self) -> None:
        self._is_queued = False
        of_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for param in self._params:
            if param.requires_grad:
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
                of_dtype.setdefault(param.dtype, []).append(param.grad)
        for grads in of_dtype.values():
            flat = torch.cat([grad.reshape(-1) for grad in grads])
            for group in self._mesh.get_all_groups():
                dist.all_reduce(flat, group=group)
            flat /= self._mesh.size()
            for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(mean.view_as(grad))
