"""Has transformers build the model of a load; keeps what a user's ``__init__`` makes of it under ZeRO-3.

Stock fills the parameters that it has made. Here others take their place, and get what it gave to those: values,
names, attributes and hooks.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import UninitializedParameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel, modeling_utils
from transformers.utils import logging

from ..checkpoint.lazy import LazyTensor, copy_attributes
from ..checkpoint.nodes import HostTensor
from ..settings.config import announced_local_rank
from .ds_config import zero3_hidden
from .session import Original, Session, in_session, is_user_class


KEPT_BYTES = 2**28
"""How many bytes of values of parameters are kept from the end of an ``__init__``, where users' classes add theirs."""

_VALUE, _MADE = "_hf_zero_stream_value", "_hf_zero_stream_made"


@in_session
def get_init_context(session: Session, original: Original, cls: Any, *args: Any) -> Any:
    """The contexts in which transformers builds the model."""
    if session.building:
        return original(cls, *args)
    is_part, hides_zero3 = session.inside is not None, session.load.destination.hides_zero3
    with zero3_hidden() if is_part or hides_zero3 else nullcontext():
        contexts = [_building(session), *original(cls, *args)]
    if hides_zero3 and not is_part:
        # transformers' own tests look for this line, which it logs where it finds ZeRO-3.
        modeling_utils.logger.info("Detected DeepSpeed ZeRO-3: activating zero.init() for this model")
        # Sub-models that an __init__ builds by from_config must not open a zero.Init of their own.
        contexts.append(modeling_utils.set_zero3_state())
        if session.load.config.random_numbers == "stock" and not session.is_dry:
            contexts += [modeling_utils.init.no_init_weights(), DrawOnDevice(session.load.destination.device)]
        if is_user_class(cls):
            contexts = [each for each in contexts if not isinstance(each, torch.device)]
            contexts.append(parameters_on_meta(session))
    return contexts


@contextmanager
def _building(session: Session) -> Iterator[None]:
    session.building = True
    try:
        with zero3_hidden():
            yield
    finally:
        session.building = False


@contextmanager
def parameters_on_meta(session: Session) -> Iterator[None]:
    """Have this thread build modules whose parameters are on the meta device, and nothing else is.

    Under ZeRO-3 stock builds models on a real device. So the ``__init__`` of users' classes may look at values of
    tensors, or compute buffers that no checkpoint has and no ``_init_weights`` computes. transformers' own never do.
    """
    thread, random_state = threading.get_ident(), torch.get_rng_state()
    kept: deque[nn.Parameter] = deque()
    kept_bytes = 0

    def on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
        nonlocal kept_bytes
        if threading.get_ident() != thread or param is None or param.is_meta or type(param) is not nn.Parameter:
            return None
        made: Any = vars(param).get(_MADE)  # of one that two modules have
        if made is None:
            made = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
            copy_attributes(param, made)
            setattr(param, _MADE, made)
            setattr(made, _VALUE, param.detach())
            kept.append(made)
            kept_bytes += made.nbytes
            while kept_bytes > KEPT_BYTES:
                oldest = kept.popleft()
                kept_bytes -= oldest.nbytes
                delattr(oldest, _VALUE)
        return made

    handle = register_module_parameter_registration_hook(on_meta)
    session.builds_values = True
    try:
        yield
    finally:
        session.builds_values = False
        handle.remove()
        torch.set_rng_state(random_state)  # what the checkpoint lacks is initialised as in a plain load


def keep_shared(session: Session, model: Any, loading_info: Any) -> None:
    """Have a parameter that a user's ``__init__`` gave two names keep both, where the checkpoint has it under one."""
    if is_user_class(type(model)):
        names: dict[int, list[str]] = {}
        for name, param in session.built.items():
            names.setdefault(id(param), []).append(name)
        missing = loading_info.missing_keys
        for group in names.values():
            found = [name for name in group if name not in missing]
            for name in group if found else ():
                if name in missing:
                    _set_parameter(model, name, model.get_parameter(found[0]))
                    missing.discard(name)


def keep_values(session: Session, model: Any, missing: set[str]) -> set[str]:
    """Give parameters that the checkpoint lacks the values that a user's ``__init__`` has computed on rank 0.

    Returns the others.
    """
    if not is_user_class(type(model)) or not missing:
        return missing
    own = {name: value for name in missing if (value := _value_of(session.built.get(name))) is not None}
    values = session.load.coordinator.broadcast(lambda: own)
    for name, value in values.items():
        lazy = LazyTensor.whole(HostTensor.of(value), session.load.checkpoint.materialise)
        param = nn.Parameter(lazy, requires_grad=value.is_floating_point())  # as in a plain load
        _keep_attributes_of(session.built[name], param)  # the group that it is partitioned over, for instance
        _set_parameter(model, name, param)
    return missing - values.keys()


def _value_of(param: Any) -> torch.Tensor | None:
    """The value that ``__init__`` gave to `param`, as far as it is kept. A parameter of a subclass still has it."""
    if param is None or isinstance(param, UninitializedParameter):
        return None
    if param.is_meta or not isinstance(param, nn.Parameter):
        return vars(param).get(_VALUE)
    return param.detach().as_subclass(torch.Tensor)


def keep_attributes(session: Session, model: nn.Module) -> None:
    """Put the attributes and hooks that ``__init__`` gave to parameters on the parameters that replaced them."""
    now = dict(model.named_parameters(remove_duplicate=False))
    for name, old in session.built.items():
        new: Any = now.get(name)
        if new is None or new is old:
            continue
        _keep_attributes_of(old, new)
        for hook in (old._backward_hooks or {}).values():
            new.register_hook(hook)
        for hook in (old._post_accumulate_grad_hooks or {}).values():
            new.register_post_accumulate_grad_hook(hook)


def _keep_attributes_of(old: nn.Parameter, new: nn.Parameter) -> None:
    for key, value in vars(old).items():
        if key not in (_VALUE, _MADE, "_is_hf_initialized") and not hasattr(new, key):
            setattr(new, key, value)


def _set_parameter(model: nn.Module, name: str, param: nn.Parameter) -> None:
    prefix, _, key = name.rpartition(".")
    setattr(model.get_submodule(prefix), key, param)


class DrawOnDevice(TorchDispatchMode):
    """Inside, what is drawn on the meta device is also drawn on `device`, as stock does there, and dropped."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and _is_on_meta((args, kwargs)):
            real_args, real_kwargs = tree_map(self._real, (args, kwargs))
            func(*real_args, **real_kwargs)
        return func(*args, **kwargs)

    def _real(self, value: Any) -> Any:
        """`value` on the device, if it is a tensor of the meta device or names that."""
        if isinstance(value, torch.Tensor) and value.is_meta:
            return torch.zeros(value.shape, dtype=value.dtype, device=self._device)
        return self._device if isinstance(value, torch.device) and value.type == "meta" else value


def _is_on_meta(values: Any) -> bool:
    return any(getattr(value, "is_meta", False) or value == torch.device("meta") for value in tree_leaves(values))


logger = logging.get_logger(__name__)


def computed_buffers(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the values that transformers' initialisation gives a lazy `model`'s non-persistent buffers; spoils it."""
    made: dict[str, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        for key in module._non_persistent_buffers_set:
            buffer = module._buffers.get(key)
            if buffer is not None and buffer.is_meta:
                name = f"{prefix}.{key}" if prefix else key
                made[name] = module._buffers[key] = torch.empty_like(buffer, device="cpu")
        # Nothing else is initialised.
        module._is_hf_initialized = not module._non_persistent_buffers_set
    new = set(map(id, made.values()))
    for tensor in (*model.parameters(), *model.buffers()):
        tensor._is_hf_initialized = id(tensor) not in new
    try:
        model.initialize_weights()
    except NotImplementedError as error:  # a model's own code writes over loaded values, which are lazy
        if announced_local_rank() == 0:
            logger.warning(f"The non-persistent buffers of the model stay as they are: {error}")
        return {}
    # A buffer that was not written to holds nothing: its module's __init__ computes it, or nobody does.
    found = {name: model.get_buffer(name) for name in made}
    return {name: buffer for name, buffer in found.items() if buffer is not made[name] or buffer._version}
