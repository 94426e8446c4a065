"""What stock transformers and DeepSpeed need for the same load, computed: the other column of ``plan``.

How they load under ZeRO-3 (transformers 5.23, ``_load_pretrained_model`` and ``_load_state_dict_into_zero3_model``;
DeepSpeed 0.19.8, ``GatheredParameters``):

- Rank 0 maps all shards into its memory and reads every byte; the other ranks read the headers.
- Conversions run on rank 0, one at a time: the largest converted parameter is in its host memory, in the file's dtype.
- Module by module, each rank gathers the module's own parameters whole on its device, rank 0 copies its values in, and
  they are broadcast to all ranks and cut up again.

Hence, with C the checkpoint's bytes, P a rank's partitions, M the largest module's own parameters (whole, in the
dtype of the partitions) and G the largest parameter (whole, in the checkpoint's dtype):

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

Where parameters are offloaded P is in host memory, and where the device is a CPU all of it is. Mapped files count as
resident memory (and towards a container's limit), but the kernel may drop them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from ..footprint.memory import HOST
from ..loading.dry_load import Forecast
from .shapes import Shape


__all__ = ["StockLoad", "stock_load"]


@dataclass(frozen=True)
class StockLoad:
    """Bytes of the table above; `peak` maps places to bytes, without mapped files."""

    rank0_read: int
    rank0_mapped: int
    rank0_peak: dict[str, int]
    other_received: int
    other_peak: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def stock_load(forecast: Forecast, parameters: Sequence[Shape], device: str) -> StockLoad:
    """Stock's figures for the load that `forecast` is of.

    Args:
        forecast: of any rank.
        parameters: the model's, whole, in the checkpoint's dtype.
        device: type of the device that trains.
    """
    plan, memory = forecast.load, forecast.memory
    dtypes = {target.name: target.dtype for target in plan.targets}
    modules, total = Counter[str](), 0
    for param in parameters:
        whole = prod(param.shape) * dtypes.get(param.name, param.dtype).itemsize
        modules[param.name.rpartition(".")[0]] += whole
        total += whole
    others = Counter(memory.load_peak)
    others[HOST] -= memory.staging
    others[device] += max(modules.values(), default=0)
    first = others + Counter({HOST: max((param.nbytes for param in parameters), default=0)})
    read = sum(shard.size_bytes for shard in plan.shards)
    return StockLoad(read, read, dict(first), total, dict(+others))
