"""The model that transformers makes of a checkpoint, without values, and the memory that stock's load needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedConfig
from transformers.quantizers import AutoQuantizationConfig

from ..bindings.table import installed
from ..errors import CheckpointError, HfZeroStreamError
from ..loading.dry_load import Forecast, lazily_loaded, load_of_layouts
from ..planning.footprint import HOST
from ..registry import PatchScope
from ..seams.session import bars_hidden
from ..settings.config import StreamingConfig


def load_arguments(place: str, trust_remote_code: bool, dequantize: bool) -> dict[str, Any]:
    """Arguments for ``from_pretrained``; transformers never asks on the terminal whether code may run."""
    if not dequantize:
        return {"trust_remote_code": trust_remote_code}
    method = _quantisation(place)
    if method is None:
        raise CheckpointError(f"{place}: --dequantize: config.json has no quantization_config. Leave the option out.")
    loading = AutoQuantizationConfig.from_dict({"quant_method": method, "dequantize": True})
    return {"trust_remote_code": trust_remote_code, "quantization_config": loading}


def _quantisation(place: str) -> str | None:
    """The method by which a checkpoint is quantised, such as "fp8"; None if it is not."""
    with installed(PatchScope.BLOCK):  # by which small files come from a URL
        config, _ = PreTrainedConfig.get_config_dict(place)
    found = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    return found and str(found.get("quant_method"))


def lazy_model(place: str, arguments: Mapping[str, Any]) -> tuple[nn.Module, set[str], set[str]]:
    """(the model on the meta device; the names that the checkpoint lacks; those of them that are tied to others)."""
    with closing(load_of_layouts(StreamingConfig(progress=False))) as load:
        return lazily_loaded(place, load, **arguments)


def stock_load(forecast: Forecast, place: str, arguments: Mapping[str, Any], device: str) -> dict[str, Any] | None:
    """Bytes that stock transformers and DeepSpeed need for the same load; peaks by place, without mapped files.

    None for a quantised checkpoint, of which every stock rank loads all. `forecast` is of any rank.

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
    if _quantisation(place) is not None:
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


@contextmanager
def transformers_errors(path: str) -> Iterator[None]:
    """Turn other libraries' errors about a checkpoint or a config into ours, with progress bars off."""
    try:
        with bars_hidden():
            yield
    except HfZeroStreamError:
        raise
    except Exception as error:  # a config.json can make them raise any exception
        raise CheckpointError(f"{path}: no model can be made of it: {type(error).__name__}: {error}") from error
