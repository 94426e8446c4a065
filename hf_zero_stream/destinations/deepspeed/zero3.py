"""ZeRO-3 parameters that begin as partitions.

Stock ``zero.Init`` allocates each parameter in full, broadcasts it and cuts it up. Here a parameter begins as a
placeholder that owns one element but reports its full shape; DeepSpeed attaches its methods to it, and only the
partition is ever allocated. Everything else (memory-efficient linear, hpZ groups, devices, buffers kept in fp32) is
done by the constructor of ``zero.Init`` itself. Tried with DeepSpeed 0.18.9 and 0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import config as deepspeed_config
from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partition_parameters import (
    Init,
    PartitionedParamStatus,
    free_param,
    is_zero_param,
)
from deepspeed.utils import groups
from pydantic import ValidationError
from torch import nn

from ... import accelerators
from ...errors import ConfigError, UnsupportedError, refuse_unknown_version, require_names
from ...holdings.deepspeed.partitions import own_range
from ...registry import tool
from ..base import allocating


_DTYPES = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16}  # by section of a config
_TRUE = ("true", "1", "on", "t", "y", "yes")  # to pydantic, with which DeepSpeed parses its config


require_names(
    "deepspeed",
    Init,
    *("_convert_to_deepspeed_param", "_convert_to_zero_parameters", "_aligned_size", "_partition_param"),
    purpose="ZeRO-3",
)


def offloads(ds_config: Mapping[str, Any]) -> bool:
    """Whether partitions of this config are offloaded, to the host or to NVMe."""
    return _offload_device(ds_config) not in (None, OffloadDeviceEnum.none)


def uses_nvme(ds_config: Mapping[str, Any]) -> bool:
    """Whether partitions of this config are offloaded to NVMe."""
    return bool(_offload_device(ds_config) == OffloadDeviceEnum.nvme)


def _offload_device(ds_config: Mapping[str, Any]) -> Any:
    return ((ds_config.get("zero_optimization") or {}).get("offload_param") or {}).get("device")


def _swapping(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    if not uses_nvme(ds_config):
        return {}
    return {"remote_device": "nvme", "param_swapper": nvme().shared_swapper(ds_config)}


def nvme() -> Any:
    """The functions for partitions in swap files: :mod:`...plugins.nvme.swapping`, if that plug-in is there."""
    return tool("nvme", "nvme", "offload_param to NVMe")


class PartitionedInit(Init):
    """``deepspeed.zero.Init`` over a module whose parameters are placeholders (see :func:`placeholder`).

    After construction each of them is a ZeRO-3 parameter, whose partition (see :func:`own_range`) is still to be
    filled, but for the padding: it is zero. Only those that are `swapped` go to swap files, and those that a
    `file_swapper` has taken it reads itself. Other parameters are treated as stock does.

    Inside a ``zero.Init`` of the caller's, `around`, that one decides on everything, as in stock. The ranks that share
    parameters are those of data parallelism in `mpu`, if there is one, else all.
    """

    def __init__(
        self,
        module: nn.Module,
        ds_config: Mapping[str, Any],
        swapped: Iterable[nn.Parameter],
        around: Init | None = None,
        file_swapper: Any = None,
        mpu: Any = None,
    ) -> None:
        self._file_swapper = file_swapper
        self._swapped = set(map(id, swapped))  # no parameters: they keep this object alive
        if around is not None:
            self.__dict__.update(vars(around), module=module)  # its devices, groups, dtype and swapper
            self._convert_to_zero_parameters(module.parameters())
            if hasattr(self, "_keep_in_fp32"):  # earlier versions keep no buffers
                self._keep_in_fp32(module)
            return
        has_hpz = ds_config.get("zero_optimization", {}).get("zero_hpz_partition_size", 1) > 1
        super().__init__(
            module=module,
            config_dict_or_path=dict(ds_config),
            data_parallel_group=None if mpu is None else mpu.get_data_parallel_group(),
            mpu=mpu,
            # Those that share hpZ's copies, if an earlier zero.Init made the groups: another must not make them.
            zero_param_parallel_group=groups._get_zero_param_intra_parallel_group() if has_hpz else None,
            **_swapping(ds_config),
        )
        if self.param_swapper is not None:
            nvme().share_swapper(ds_config, self.param_swapper)

    def _convert_to_zero_parameters(self, param_list: Iterable[nn.Parameter]) -> None:
        # DeepSpeed would quantise the partition of a frozen parameter while it is empty, and then copy floating-point
        # values into int8. Here it stays as it is until the user calls optimizer.quantize_nontrainable_params().
        self.quantized_nontrainable_weights = False
        for param in param_list:
            if is_zero_param(param) or param.is_meta:
                continue  # a meta parameter here is one end of a tie, about to be replaced by the other end
            if not is_placeholder(param):
                # DeepSpeed calls this again for parameters that were added later (LoRA, a new head).
                super()._convert_to_zero_parameters([param])
                continue
            self._convert_to_deepspeed_param(param)
            if self._file_swapper is None or not self._file_swapper.has_taken(param):
                self._allocate_partition(param)
            else:
                self._file_swapper.adopt(param, self, partial(self._allocate_partition, param))
            free_param(param)

    def _allocate_partition(self, param: Any) -> None:
        """The allocation that ``_partition_param`` would make, without the full parameter it would copy from."""
        part, start, stop = own_range(param)
        param.ds_numel_aligned = param.aligned_size()
        swapper = self.param_swapper
        # Stock would write a partition of another dtype with the wrong size.
        is_swapped = swapper is not None and param.dtype == swapper.dtype and swapper.swappable_tensor(numel=part)
        if is_swapped != (id(param) in self._swapped):
            refuse_unknown_version("deepspeed", ["swapper that takes the partitions which were planned for it"])
        if is_swapped:
            partition = torch.empty(0, dtype=param.dtype)
        else:
            remote = self.remote_device if swapper is None else "cpu"
            device = self.local_device if param.ds_persist else torch.device(remote)
            with allocating(param._hf_zero_stream_name, part * param.dtype.itemsize, device, dist.get_rank()):
                pins = device.type == "cpu" and self.pin_memory and accelerators.kind() is not None
                partition = torch.empty(part, dtype=param.dtype, device=device, pin_memory=pins)
            partition[stop - start :].zero_()
        partition.requires_grad = False
        partition.ds_numel = part
        partition.status = PartitionedParamStatus.NOT_AVAILABLE if is_swapped else PartitionedParamStatus.AVAILABLE
        partition.final_location = OffloadDeviceEnum.nvme if is_swapped else None
        param.ds_tensor = partition


def placeholder(
    name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device, requires_grad: bool
) -> nn.Parameter:
    """A parameter that reports `shape` and owns a single element, until :class:`PartitionedInit` partitions it."""
    param = nn.Parameter(torch.empty((), dtype=dtype, device=device).expand(shape), requires_grad=requires_grad)
    param._hf_zero_stream_name = name
    return param


def is_placeholder(param: torch.Tensor) -> bool:
    """Whether :func:`placeholder` made `param`."""
    return hasattr(param, "_hf_zero_stream_name")


def place_in_group(param: Any, rank: int, world_size: int) -> tuple[int, int]:
    """(this rank, number of ranks) of the group that a parameter is partitioned over; by default all ranks."""
    group = getattr(param, "ds_zero_partition_process_group", None)
    if group is not None:
        return dist.get_rank(group), dist.get_world_size(group)
    # In a plan for other ranks it has no process group, but only its place in it.
    return getattr(param, "ds_zero_partition_rank", rank), getattr(param, "ds_zero_partition_world_size", world_size)


def init_distributed() -> None:
    """Initialise torch.distributed as ``zero.Init`` would, if nobody has done it yet."""
    if not dist.is_initialized() or not deepspeed.comm.is_initialized():
        deepspeed.init_distributed()


def enabled_dtypes(ds_config: Mapping[str, Any]) -> list[torch.dtype]:
    """The 16-bit dtypes that this config turns on; DeepSpeed takes "auto" for absent."""
    return [dtype for name, dtype in _DTYPES.items() if str(_enabled(ds_config, name)).lower() in _TRUE]


def partition_dtype(ds_config: Mapping[str, Any]) -> torch.dtype:
    """The dtype that DeepSpeed gives to every floating-point parameter with this config."""
    return next(iter(enabled_dtypes(ds_config)), torch.float32)


def undecided(ds_config: Mapping[str, Any]) -> list[str]:
    """The sections that would decide on the dtype and whose `enabled` is still "auto", if no other one decides."""
    return [] if enabled_dtypes(ds_config) else [name for name in _DTYPES if _enabled(ds_config, name) == "auto"]


def _enabled(ds_config: Mapping[str, Any], section: str) -> Any:
    settings = ds_config.get(section)
    return settings.get("enabled") if isinstance(settings, Mapping) else None


def compatible_ops() -> dict[str, bool]:
    """DeepSpeed's ops by name, and whether each could be compiled here or is installed already."""
    from deepspeed.ops.op_builder import all_ops  # imports every builder

    found = {}
    for name, builder in all_ops.ALL_OPS.items():
        try:
            found[name] = bool(builder.is_compatible(verbose=False))
        except Exception:  # builders that look for a compiler or a GPU raise whatever they please
            found[name] = False
    found.pop("deepspeed_not_implemented", None)  # stands for ops that do not exist for this accelerator
    return found


def refuse_packed(ds_config: Mapping[str, Any]) -> None:
    """Refuse settings under which parameters of bytes beside those of floating point fail, or were never tried."""
    zero = ds_config.get("zero_optimization", {})
    reasons = {
        "zero_optimization.stage3_use_all_reduce_for_fetch_params": (
            zero.get("stage3_use_all_reduce_for_fetch_params"),
            "gathers all parameters of a module in one buffer of one dtype",
        ),
        "zero_optimization.offload_param.device: nvme": (
            uses_nvme(ds_config),
            "has swap buffers of one floating-point dtype",
        ),
        "zero_optimization.zero_quantized_weights": (
            zero.get("zero_quantized_weights"),
            "would quantise packed bytes a second time when they are gathered",
        ),
        "expert_parallel": (
            (ds_config.get("expert_parallel") or {}).get("enabled"),
            "cuts experts out of weights that are not packed",
        ),
    }
    refuse_settings(
        reasons,
        "this checkpoint's weights would stay quantised (keep_quantized). Remove the setting from the DeepSpeed "
        "config, or load dequantised: StreamingConfig(keep_quantized=False), or a quantization_config with "
        "dequantize=True.",
    )


def refuse_settings(reasons: Mapping[str, tuple[Any, str]], against: str) -> None:
    """Raise an UnsupportedError for the first of these settings that is set; each has what it does `against`."""
    for setting, (is_set, why) in reasons.items():
        if is_set:
            raise UnsupportedError(f"{setting} {why}, and {against}")


_IN_PLACE_OF = {
    "stage3_partition_stream_chunk_size": (
        "Leave it out: hf_zero_stream reads parameters of any size through buffers that "
        '"hf_zero_stream": {"staging_bytes": "64MiB"} bounds.'
    )
}
"""What serves in place of keys that were proposed for DeepSpeed, and never came."""


def parsed(zero: Mapping[str, Any]) -> DeepSpeedZeroConfig:
    """The section ``zero_optimization`` of a DeepSpeed config; a ConfigError says what DeepSpeed does not take."""
    try:
        # Where DeepSpeed itself says what has become of a setting that is gone.
        getattr(deepspeed_config, "_reject_removed_config_keys", bool)({"zero_optimization": zero})
        return DeepSpeedZeroConfig(**zero)
    except ValidationError as error:
        wrong = {".".join(map(str, each["loc"])): each["msg"] for each in error.errors()}
        what = "; ".join(f"{key or 'all of it together'}: {message.rstrip('.')}" for key, message in wrong.items())
        advice = " ".join(_IN_PLACE_OF[key] for key in wrong if key in _IN_PLACE_OF)
        raise ConfigError(
            f"zero_optimization: DeepSpeed does not take {what}. {advice or 'Correct the DeepSpeed config.'}"
        ) from error
    except deepspeed_config.DeepSpeedConfigError as error:
        raise ConfigError(f"zero_optimization: DeepSpeed does not take this section of its config: {error}") from error


def refuse_unsupported(ds_config: Mapping[str, Any]) -> None:
    """Refuse settings that DeepSpeed does not take, under which it fails, or would give wrong partitions."""
    zero = ds_config.get("zero_optimization", {})
    parsed({name: value for name, value in zero.items() if value != "auto"})  # the model fills that in
    quantised = [name for name in ("zero_quantized_weights", "zero_quantized_nontrainable_weights") if zero.get(name)]
    if quantised:
        try:
            partition_parameters.CUDAQuantizer()  # loads DeepSpeed's kernels, as zero.Init is going to
        except Exception as error:
            raise UnsupportedError(
                f"{' and '.join(quantised)}: DeepSpeed's quantizer does not load for the accelerator of this machine "
                f"({get_accelerator().device_name()}): {type(error).__name__}: {error} Remove the setting from the "
                "DeepSpeed config, or train on a GPU."
            ) from error
    if ds_config.get("weight_quantization", {}).get("quantized_initialization"):
        raise UnsupportedError(
            "weight_quantization.quantized_initialization quantises full parameters while they are constructed, and "
            "no full parameter exists when streaming. Remove it from the DeepSpeed config."
        )
