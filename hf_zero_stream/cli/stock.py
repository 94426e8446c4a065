"""Computes what stock transformers and DeepSpeed need for the same load: the other columns of ``plan``.

How they load under ZeRO-3 (transformers 5.23, ``_load_pretrained_model`` and ``_load_state_dict_into_zero3_model``;
DeepSpeed 0.19.8, ``GatheredParameters``):

- Rank 0 maps all shards into its memory and reads every byte; the other ranks read the headers.
- Rank 0 converts one parameter at a time: the largest is in its host memory, in the file's dtype.
- Module by module, each rank gathers the module's own parameters whole on its device, rank 0 copies its values in and
  broadcasts them, and each rank cuts them up again.

C: the checkpoint's bytes. P: a rank's partitions. M: the largest module's own parameters (whole, in the dtype of the
partitions). G: the largest parameter (whole, in the checkpoint's dtype).

=====================  =================  ===========
                       rank 0             other ranks
=====================  =================  ===========
bytes read             C                  headers
bytes received         0                  all parameters, whole
device peak            P + M              P + M
host, anonymous        G                  0
host, mapped files     C                  0
=====================  =================  ===========

Measured on a CPU, for a mixture of experts of 1.2 GB on two ranks: 6 % more on rank 0 and 9 % more on the other.

P is in host memory if parameters are offloaded, and everything is if the device is a CPU. Mapped files count as
resident memory (and towards a container's limit), but the kernel may drop them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..footprint.memory import HOST
from ..loading.dry_load import Forecast
from .models import lazy_model, quantisation


__all__ = ["stock_load"]


def stock_load(forecast: Forecast, folder: Path, arguments: Mapping[str, Any], device: str) -> dict[str, Any] | None:
    """The bytes of the table above; peaks are by place, and without mapped files.

    None for a quantised checkpoint, of which every stock rank loads all. `forecast` is of any rank.
    """
    if quantisation(folder) is not None:
        return None
    model, _, tied = lazy_model(folder, arguments)
    plan, memory = forecast.load, forecast.memory
    dtypes = {target.name: target.dtype for target in plan.targets}
    modules, largest = Counter[str](), 0
    for name, param in model.named_parameters():
        if name not in tied:
            modules[name.rpartition(".")[0]] += param.numel() * dtypes.get(name, param.dtype).itemsize
            largest = max(largest, param.nbytes)
    others = Counter(memory.load_peak)
    others[HOST] -= memory.staging
    others[device] += max(modules.values(), default=0)
    read = sum(shard.size_bytes for shard in plan.shards)
    return {
        "rank0_read": read,
        "rank0_mapped": read,
        "rank0_peak": dict(others + Counter({HOST: largest})),
        "other_received": modules.total(),
        "other_peak": dict(+others),
    }
