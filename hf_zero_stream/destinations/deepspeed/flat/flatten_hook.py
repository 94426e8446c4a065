"""DeepSpeed's flatten of ZeRO stages 1 and 2 takes a buffer in which parameters lie already, instead of copying them.

While its optimizer is constructed, DeepSpeed (``runtime/zero/stage_1_and_2.py``, 0.18.9 and 0.19.8) flattens one group
after the other: on the device if ``available_memory()`` says that a second copy fits, else through the host. Three
attributes are replaced, from when parameters are laid out (see ``replicas.py``) until an engine takes them over:

- the optimizer's constructor: everything is first moved to where its groups ask for it (see ``layout.py``), which is
  nothing in the usual case of one group of all trainable parameters;
- ``flatten_dense_tensors_aligned``: returns the buffer if the tensors lie in it, in order and with the padding;
- ``available_memory`` of the accelerator: inside that constructor the room is there, because nothing will be copied.

Other optimizers, and a second engine over the same parameters, see no difference.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import logger
from torch import Tensor, nn

from .... import accelerators
from ....bindings.install import installed
from ....bindings.rows import Moment
from ....errors import refuse_unknown_version
from .layout import WAITING, FlatLayout, Group, find_buffer, lay_out, zero_padding


_SIGNATURES = {
    "__init__": ("init_optimizer", "param_names", "dp_process_group", "round_robin_gradients", "has_moe_layers"),
    "flatten_dense_tensors_aligned": ("tensor_list", "alignment", "use_cpu_data"),
    "_round_robin_reorder": ("tensor_list", "num_partitions"),
}
_missing = [
    f"{name}({argument})"
    for name, arguments in _SIGNATURES.items()
    for argument in arguments
    if argument not in inspect.signature(getattr(DeepSpeedZeroOptimizer, name, lambda: None)).parameters
]
if "available_memory" not in vars(type(get_accelerator())):
    _missing.append(f"{type(get_accelerator()).__name__}.available_memory")
refuse_unknown_version("deepspeed", _missing, "laying out ZeRO's stages 1 and 2")

_INIT = inspect.signature(DeepSpeedZeroOptimizer.__init__)

# Whether this thread is inside the constructor of an optimizer all of whose groups lie in buffers of ours.
_taking_over: ContextVar[bool] = ContextVar("hf_zero_stream_taking_over", default=False)


def watch(buffer: Tensor, layout: FlatLayout) -> None:
    """Let DeepSpeed's flatten recognise parameters that lie in `buffer` as `layout` says."""
    waiting = WAITING.add(buffer, layout)
    installed(Moment.FLAT).__enter__()
    weakref.finalize(waiting, installed(Moment.FLAT).__exit__)  # once it is taken over, or found to be freed


def buffer_group(params: Sequence[Tensor], world_size: int, settings: Mapping[str, Any]) -> Group:
    """The trainable parameters of an optimizer group as they will lie in DeepSpeed's flat buffer."""
    if settings.get("round_robin_gradients") is True:
        order = DeepSpeedZeroOptimizer._round_robin_reorder(None, list(range(len(params))), world_size)[0]
        params = [params[index] for index in order]
    numels, itemsize = [param.numel() for param in params], params[0].dtype.itemsize
    is_aligned = settings.get("parameter_alignment") is True
    return Group(params, FlatLayout.of_group(numels, itemsize, world_size, parameter_alignment=is_aligned))


def free_device_bytes() -> int:
    """Memory of the device that nobody uses, in bytes, after torch has given back what it only keeps."""
    accelerator = get_accelerator()
    accelerator.empty_cache()
    if accelerator.device_name() == accelerators.kind():
        # DeepSpeed's own figure is the total less this process's share where pynvml is not installed.
        return accelerators.free_bytes(torch.device(accelerator.device_name()))
    return accelerator.available_memory()


def construct(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    arguments = _INIT.bind(self, *args, **kwargs).arguments
    param_groups = [group["params"] for group in arguments["init_optimizer"].param_groups]
    optimized = [param for params in param_groups for param in params]
    if not any(map(WAITING.find, optimized)):
        original(self, *args, **kwargs)
        return
    everything = [*optimized, *(param for param in arguments["param_names"] or () if isinstance(param, nn.Parameter))]
    flattened = [[param for param in params if param.requires_grad and param.numel()] for params in param_groups]
    try:
        reason = _stock_reason(self, arguments, flattened)
        if not reason:
            self.hf_zero_stream_flatten = _prepare(arguments, flattened, everything)
        elif dist.get_rank(arguments.get("dp_process_group")) == 0:
            logger.info(f"hf_zero_stream: parameters are flattened by DeepSpeed: {reason}")
        token = _taking_over.set(not reason)
        try:
            original(self, *args, **kwargs)
        finally:
            _taking_over.reset(token)
    finally:
        WAITING.forget(everything)  # what DeepSpeed has now is its own, whichever way it got it


def _prepare(
    arguments: Mapping[str, Any], flattened: Sequence[Sequence[nn.Parameter]], everything: Iterable[nn.Parameter]
) -> str:
    process_group = arguments.get("dp_process_group")
    world_size = dist.get_world_size(process_group)
    groups = [buffer_group(params, world_size, arguments) for params in flattened]
    moved = set(map(id, chain.from_iterable(flattened)))
    others = {id(param): param for param in everything if id(param) not in moved}
    how = lay_out(groups, others.values(), process_group, free_device_bytes())
    if dist.get_rank(process_group) == 0:
        numel = sum(group.layout.numel for group in groups)
        logger.info(f"hf_zero_stream: {len(groups)} flat buffer(s) of {numel} elements in all: {how}")
    return how


def _stock_reason(self: Any, arguments: Mapping[str, Any], flattened: Iterable[Sequence[nn.Parameter]]) -> str:
    """Why this optimizer is left to DeepSpeed's own flatten, or an empty string."""
    if type(self) is not DeepSpeedZeroOptimizer or arguments.get("zenflow_config") is not None:
        return "ZenFlow"
    if arguments.get("has_moe_layers"):
        return "DeepSpeed's MoE layers are partitioned over other groups of ranks"
    device = torch.device(get_accelerator().current_device_name())
    for params in flattened:
        if not params:
            return "an optimizer group without trainable parameters"
        if len({param.dtype for param in params}) > 1:
            return "an optimizer group of several dtypes"
        if any(param.device != device for param in params):
            return f"parameters that are not on {device}"
    return ""


def flatten(
    original: Any, self: Any, tensor_list: Sequence[Tensor], alignment: int, use_cpu_data: bool = False, **kwargs: Any
) -> Tensor:
    if _taking_over.get() and not use_cpu_data:
        paddings = kwargs.get("param_padding") or [0] * len(tensor_list)
        # DeepSpeed 0.18.9 has empty parameters in its groups too.
        pairs = [(tensor, padding) for tensor, padding in zip(tensor_list, paddings, strict=True) if tensor.numel()]
        tensors, paddings = zip(*pairs, strict=True)
        layout = FlatLayout.padded([tensor.numel() for tensor in tensors], paddings, alignment)
        buffer = find_buffer(tensors, layout)
        if buffer is not None:
            zero_padding(buffer, layout)
            return buffer
    return original(self, tensor_list, alignment, use_cpu_data, **kwargs)


def available_memory(original: Callable[..., int], *args: Any, **kwargs: Any) -> int:
    return sys.maxsize if _taking_over.get() else original(*args, **kwargs)
