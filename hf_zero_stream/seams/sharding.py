"""The seams of ``from_pretrained(distributed_config=...)``, by which transformers shards a model before it loads it.

transformers slices the tensors of the checkpoint as the parameters that they end in are sharded, and converts the
slices, which is wrong for conversions that split or permute what was cut. While a load streams, whole lazy tensors go
through the conversions, as in a load that is not sharded, and our destination takes its shards of the results.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

from .. import accelerators
from ..bindings.table import refuse_lacking
from ..errors import VersionError
from ..settings.config import announced_local_rank


_SINCE = "5.17"

SIZES = ("tp_size", "fsdp_size", "dp_replicate_size", "pp_size")
"""The attributes of a ``DistributedConfig`` that shard a model where they are more than 1."""


def is_known() -> bool:
    """Whether this version of transformers shards models in the way that the seams here are for."""
    return Version(transformers.__version__) >= Version(_SINCE)


def distributed_config_of(kwargs: Mapping[str, Any]) -> Any:
    """Return the config by which these arguments of ``from_pretrained`` shard the model; None if they do not.

    Raises what transformers raises if they contradict each other, and a VersionError if this version of transformers
    lacks what the seams here call.
    """
    config = kwargs.get("distributed_config")
    if not is_known():
        _refuse_shards_of_stock(config)
        return None
    if config is None:
        of_its_own = {name: kwargs[name] for name in ("tp_plan", "tp_size") if kwargs.get(name) is not None}
        config = DistributedConfig(**of_its_own) if of_its_own else None
    elif isinstance(config, Mapping):
        config = DistributedConfig.from_dict(dict(config))
    if config is None or not any(getattr(config, size, None) not in (None, 1) for size in SIZES):
        return None
    refuse_lacking("distributed_config")
    return config


def _refuse_shards_of_stock(config: Any) -> None:
    """Raise a VersionError if `config` asks an older transformers for FSDP2, which gives some types other values."""
    asked = config if isinstance(config, Mapping) else vars(config) if config is not None else {}
    if sizes := [size for size in ("fsdp_size", "dp_replicate_size") if asked.get(size) not in (None, 1)]:
        raise VersionError(
            f"distributed_config= with {' and '.join(sizes)} is streamed with transformers {_SINCE} or newer. "
            f"transformers {transformers.__version__} itself cuts tensors before it converts them, which gives some "
            f"models other values: install a newer one, or, if you know that yours gets its own, load it without "
            "streaming()."
        )


def cuts_matrices(config: Any) -> str:
    """Why the weights of a model that `config` shards cannot be packed; "" if only FSDP2 shards it."""
    asks = [f"{name} {size}" for name in ("tp_size", "ep_size") if (size := getattr(config, name, None) or 1) > 1]
    if not asks:
        return ""
    return f"{' and '.join(asks)} would cut weights by rows, columns and experts, which packed bytes do not have"


def init_distributed() -> torch.device:
    """Make the process group that transformers would make later, and return the device that it gives this rank."""
    from transformers.distributed import utils  # not in versions in which :func:`is_known` is false

    utils._ensure_torch_distributed()
    kind = device_type()
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, announced_local_rank())


def device_type() -> str:
    """The type of the device on which transformers puts shards, on this machine."""
    return accelerators.kind() or "cpu"


def unshard(model: nn.Module) -> None:
    """Put whole parameters on the meta device in the place of sharded ones, so that whole tensors are converted."""
    whole: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, param in module._parameters.items():
            if isinstance(param, DTensor):
                empty = torch.empty(param.shape, dtype=param.dtype, device="meta")
                made = nn.Parameter(empty, requires_grad=param.requires_grad)
                module._parameters[key] = whole.setdefault(id(param), made)


def class_of_model(model: nn.Module) -> Any:
    """The model's own class, not the one of torch's that ``fully_shard`` has put in its place.

    transformers takes that for custom code, of which it skips initialisation code, and with it buffers that only the
    code of a whole model fills.
    """
    return next(base for base in type(model).__mro__ if not base.__module__.startswith("torch."))
