"""The memory that stock's load needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from ...plugin_api import lazy_model, quantisation_of
from .footprint import FILES, HOST
from .plan import Forecast


def stock_load(forecast: Forecast, place: str, arguments: Mapping[str, Any], device: str) -> dict[str, Any] | None:
    """Bytes that stock transformers and DeepSpeed need for the same load; peaks by place, without mapped files.

    None for a quantised checkpoint, of which every stock rank loads all, and for weights that stay in files.
    `forecast` is of any rank.

    How transformers 5.23 (``_load_pretrained_model``, ``_load_state_dict_into_zero3_model``) and DeepSpeed 0.19.8
    (``GatheredParameters``) load under ZeRO-3:

    - Rank 0 maps all shards into its memory and reads every byte; the other ranks read the headers. Mapped files count
      as resident memory (and towards a container's limit), but the kernel may drop them.
    - Rank 0 converts one parameter at a time: the largest is in its host memory, whole and in the checkpoint's dtype.
    - Module by module, each rank gathers the module's own parameters whole on its device, rank 0 copies its values in
      and broadcasts them, and each rank cuts them up again. So the peak of each rank's device is its partitions and
      the largest module's own parameters, in the partitions' dtype; the other ranks receive all parameters, whole.

    Measured on a CPU, for a mixture of experts of 1.2 GB on two ranks: 6 % more on rank 0 and 9 % more on the other.
    """
    if quantisation_of(place) is not None or FILES in forecast.memory.partitions:
        return None
    model, _, tied = lazy_model(place, arguments)
    plan, memory = forecast.load, forecast.memory
    dtypes = {target.name: target.dtype for target in plan.targets}
    modules, largest = Counter[str](), 0
    for name, param in model.named_parameters():
        if name not in tied:
            modules[name.rpartition(".")[0]] += param.numel() * dtypes.get(name, param.dtype).itemsize
            largest = max(largest, param.nbytes)
    others = Counter(memory.partitions) + Counter(memory.buffers) + Counter({HOST: memory.swap_buffers})
    others[device] += max(modules.values(), default=0)
    read = plan.checkpoint_bytes
    return {
        "rank0_read": read,
        "rank0_mapped": read,
        "rank0_peak": dict(others + Counter({HOST: largest})),
        "other_received": modules.total(),
        "other_peak": dict(+others),
    }
